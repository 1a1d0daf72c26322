#pragma once

#include <cstdint>
#include <vector>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

// The layout of a tensor of which only the pieces' sizes are known. Shard dims
// may be negative; dims that nothing cuts have their local size.

/// From every position's local sizes. Raises where ranks that hold the same
/// piece of a dim give it different extents, or differ in the number of dims.
///
/// Example: a mesh of 2, Shard(0), local sizes (3, 4) and (2, 4): sizes (5, 4),
/// dim 0 cut as [3, 2].
SpecPtr infer_spec(
    const MeshPtr& mesh,
    const std::vector<Placement>& placements,
    const std::vector<std::vector<int64_t>>& local_sizes);

/// From this rank's local sizes and those along each mesh axis that shards:
/// along[axis][r] are the local sizes of the rank with coordinate r there, of
/// which only the dim that the axis cuts is read: they may be those of a tensor
/// with fewer or other dims that is cut alike. Raises when several axes shard
/// one dim: their pieces are not among these.
SpecPtr infer_spec_along_axes(
    const MeshPtr& mesh,
    const std::vector<Placement>& placements,
    const std::vector<int64_t>& local_sizes,
    const std::vector<std::vector<std::vector<int64_t>>>& along);

/// As if all pieces had the sizes of this one.
SpecPtr infer_even_spec(
    const MeshPtr& mesh,
    const std::vector<Placement>& placements,
    std::vector<int64_t> local_sizes);

} // namespace shardtensor
