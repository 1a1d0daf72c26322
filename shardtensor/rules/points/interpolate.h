#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace shardtensor {

/// Values ([B,] N, C) of the points, at the queries: the mean of the k nearest
/// points' values, weighted by 1 / distance^power; at a point its own value.
/// Points, queries, layouts and communication as in points.h; values are of the
/// points' dtype, ShardTensors in any layout or plain. ([B,] M, C), as the
/// queries lie. Differentiable to any order in all three.
/// Raises: as knn, for values that don't lie beside the points, and unless
/// power > 0.
/// Source: Shepard 1968, A two-dimensional interpolation function for
/// irregularly-spaced data.
///
/// Example: points 0 and 3 on a line with values 1 and 4, query 1, k = 2, power
/// = 1: weights 1 and 1/2, hence 2.
at::Tensor interpolate_neighbors(
    const at::Tensor& points,
    const at::Tensor& values,
    const at::Tensor& queries,
    int64_t k = 3,
    double power = 2);

} // namespace shardtensor
