#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor {

// Neighbours in clouds of points: points ([B,] N, D) and queries ([B,] M, D),
// float or double, plain tensors or ShardTensors in any layout on one mesh.
// What is found lies as the queries do; its indices are rows of the whole
// cloud, nearest first, equal distances by row: the same as on one device.
// Distances and points are differentiable to any order (that of a distance of
// zero is zero). Coordinates must be finite. Communication: see PointTransport,
// and one number to agree that all coordinates are finite; where something is
// differentiated or points are returned, also the neighbours' coordinates.
// Raises on all ranks: for shapes, dtypes or meshes that don't fit, for
// coordinates that are not finite, and for 2^31 points and more.
// Thread safety / ordering: as in primitives.h.

/// The k nearest points of each query: indices ([B,] M, k), int64, and
/// distances. Raises: also unless 1 <= k <= N.
///
/// Example: points 0, 1 and 4 on a line, query 2: k = 2 finds the indices 1 and
/// 0 (both other points are 2 away), distances 1 and 2.
std::tuple<at::Tensor, at::Tensor> knn(
    const at::Tensor& points,
    const at::Tensor& queries,
    int64_t k);

/// The points within `radius` of each query. First the indices, then, as asked
/// for, the points, the distances and the number of neighbours of each query,
/// ([B,] M), at most max_points:
///
/// - with max_points its nearest max_points, ([B,] M, max_points), and zeros
///   where it has fewer;
/// - without, all pairs, query by query: indices (2, pairs), of the query and
///   of the point, or (3, pairs) with the batch entry before them.
///
/// Indices and numbers are of `index_dtype`, int64 or int32. Raises: also for
/// another, for a radius that is not finite and >= 0, and for max_points < 1.
///
/// Example: points 0, 1 and 4 on a line, queries 2 and 4, radius 1: all pairs
/// are (0, 1) and (1, 2); with max_points = 2 indices are {1, 0} and {2, 0}.
std::vector<at::Tensor> radius_search(
    const at::Tensor& points,
    const at::Tensor& queries,
    double radius,
    std::optional<int64_t> max_points = std::nullopt,
    bool return_dists = false,
    bool return_points = false,
    std::optional<at::ScalarType> index_dtype = std::nullopt,
    bool return_counts = false);

} // namespace shardtensor
