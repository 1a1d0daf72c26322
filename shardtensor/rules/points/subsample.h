#pragma once

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace shardtensor {

/// One point for each cube of edge `size` that has any of the points ([B,] N,
/// D), float or double. The first cube begins at the least
/// coordinates; cubes stand in row-major order, those of each entry of a batch,
/// which has its own, after those of the entry before. The mean of a cube's
/// points (M, D), that of their `values` ([B,] N, C) (without values: of none,
/// (M, 0)), how many they are (M), int64, the cube of each point, ([B,] N),
/// int64, and the entry of each cube, (M), int64. Differentiable to any order
/// in points and values. Results of a cut cloud are cut along points and cubes
/// by all axes of its mesh, cubes in like numbers. Raises for coordinates that
/// are not finite and for more than 2^62 cubes between the outermost points.
/// Communication: the cloud's bounds, each different cube of a rank's points to
/// an owner and back, then points and values once.
/// Thread safety / ordering: as in primitives.h.
///
/// Example: points 0, 0.5 and 3 on a line, size 1: means 0.25 and 3, counts 2
/// and 1, cubes 0, 0 and 1.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
grid_subsample(
    const at::Tensor& points,
    double size,
    const std::optional<at::Tensor>& values = std::nullopt);

} // namespace shardtensor
