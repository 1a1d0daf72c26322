#pragma once

#include <cstdint>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace shardtensor {

// Points and queries as in points.h, with the layouts and errors of there.

/// `count` rows of points ([B,] N, D), each the one that is farthest from those
/// before, of equally far ones the first; the first row is `start`. ([B,]
/// count), int64, cut along count as the points' rows are, in even pieces. The
/// same rows as on one device. Communication: for each row found an all-gather
/// of D + 2 numbers.
/// Raises: also unless 1 <= count <= N and 0 <= start < N.
/// Source: Qi et al. 2017, PointNet++.
///
/// Example: points 0, 1, 5 and 7 on a line, count 3: rows 0, 3 and 2.
at::Tensor farthest_point_sampling(
    const at::Tensor& points,
    int64_t count,
    int64_t start = 0);

/// Groups of neighbours: for each query the `max_points` nearest points within
/// `radius`, ([B,] M, max_points), nearest first, and how many they are, ([B,]
/// M), both int64. Where there are fewer the nearest stands again, 0 where
/// there is none. Communication: as in points.h.
/// Raises: also for a radius that is not finite and >= 0, and max_points < 1.
/// Source: Qi et al. 2017, PointNet++.
///
/// Example: points 0, 1 and 4 on a line, query 2, radius 1, max_points 2: rows
/// {1, 1}, one neighbour.
std::tuple<at::Tensor, at::Tensor> ball_query(
    const at::Tensor& points,
    const at::Tensor& queries,
    double radius,
    int64_t max_points);

} // namespace shardtensor
