#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace shardtensor {

/// A mesh from cells that each have corners of their own, as STL files say:
/// corners (C, corners, D), float32 or float64; a plain tensor or a
/// ShardTensor in any layout. Equal corners become one point: points (P, D), in
/// the order in which they stand first, and cells (C, corners), int64, rows of
/// points. Of cut corners both results are cut by all axes, the points in like
/// numbers; they are those of one device, and no rank holds all. Not
/// differentiable. Communication: each different corner to the rank that
/// numbers it and back, a number for each coordinate; each point once to where
/// it ends up. Thread safety / ordering: as in primitives.h.
/// Raises on all ranks: for another shape or dtype.
///
/// Example: two triangles in one dim, {{5, 0, 1}, {1, 0, 7}}: points {5, 0, 1,
/// 7}, cells {{0, 1, 2}, {2, 1, 3}}.
std::tuple<at::Tensor, at::Tensor> merge_corners(const at::Tensor& corners);

} // namespace shardtensor
