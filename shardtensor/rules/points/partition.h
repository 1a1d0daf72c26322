#pragma once

#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace shardtensor {

/// A cloud of points (N, D) in another order, cut along dim 0 by all axes of
/// its mesh, so that each rank's points are near each other, and the
/// permutation: row i of the result was row permutation[i]. `method` says how
/// ranks get their points:
///
/// - "rcb": recursive coordinate bisection, across the widest dim;
/// - "hilbert": in the order of a Hilbert curve;
/// - "given": `owners` (N), int64, names the position in the mesh.
///
/// The first two give each rank the same sum of `weights` (N, >= 0 and not all
/// 0; none: the same number of points), up to two points. A rank's points stand
/// along the curve, given ones as they stood. Points are a ShardTensor in any
/// layout, float or double, on any device: what is planned of them, on the
/// host. They are differentiable to any order. Communication: each point once,
/// and for each halving of the ranks some hundred small all-reduces. Thread
/// safety / ordering: as in primitives.h. Raises on all ranks: for shapes,
/// dtypes, methods, owners or weights that don't fit, and for coordinates that
/// are not finite. Source: Berger and Bokhari 1987, A partitioning strategy for
/// nonuniform problems on multiprocessors ("rcb").
///
/// Example: points 3, 0, 2, 1 on a line, two ranks: {0, 1} and {2, 3}, the
/// permutation {1, 3} and {2, 0}.
std::tuple<at::Tensor, at::Tensor> partition_points(
    const at::Tensor& points,
    const std::string& method = "rcb",
    const std::optional<at::Tensor>& weights = std::nullopt,
    const std::optional<at::Tensor>& owners = std::nullopt);

} // namespace shardtensor
