#pragma once

#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace shardtensor {

// Between points ([B,] N, D) and the voxels of a box from `low` to `high` (D
// each), which has shape[d] of them along dim d: voxel i is [i, i + 1) * (high
// - low) / shape + low. Plain tensors or ShardTensors on one mesh; floating
// point. Coordinates must be finite, which is not looked at while a compiler
// traces; communication: one number. Made of operators that ShardTensor has, so
// differentiable to any order. Raises on all ranks: for shapes, dtypes, boxes,
// reductions or modes that don't fit, and for coordinates that are not finite.
// Thread safety / ordering: as in primitives.h.

/// The mean ("mean") or sum ("sum") of the values ([B,] N, C) of the points in
/// each voxel: ([B,] C, *shape), zero where there are none. Points outside the
/// box count nowhere. Differentiable in the values. The result's first dim of
/// space is cut by the axes that cut the points' rows, evenly. Communication:
/// each value once, to the rank that has its voxel.
///
/// Example: points 0.1, 0.2 and 0.9 with values 1, 3 and 5, the box from 0 to
/// 1, shape {2}: {2, 5}, as sum {4, 5}.
at::Tensor voxelize(
    const at::Tensor& points,
    const at::Tensor& values,
    at::ArrayRef<double> low,
    at::ArrayRef<double> high,
    at::IntArrayRef shape,
    const std::string& reduce = "mean");

/// The values of voxels ([B,] C, *shape), at the points: ([B,] N, C), cut as
/// their rows are. "linear": between the 2^D nearest centers of voxels, beyond
/// the outermost ones as on them; "nearest": of the voxel that a point is in,
/// outside the box the nearest. Differentiable in the voxels and, linear ones,
/// in the points. Communication: each voxel once to each rank whose points are
/// in or beside it.
///
/// Example: voxels 2 and 5 of the box from 0 to 1, the point 0.5: 3.5; the
/// point 0.1: 2.
at::Tensor devoxelize(
    const at::Tensor& voxels,
    const at::Tensor& points,
    at::ArrayRef<double> low,
    at::ArrayRef<double> high,
    const std::string& mode = "linear");

} // namespace shardtensor
