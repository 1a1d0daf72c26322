#pragma once

#include <cstdint>
#include <vector>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

// One dim cut by all axes of a mesh, in one piece for each rank: how rows lie
// that ranks send each other by their owners.

bool is_cut_by_all(const ShardSpec& spec, int64_t dim);

/// As it is if it is cut so, else in even pieces.
SpecPtr cut_by_all(const SpecPtr& spec, int64_t dim);

SpecPtr cut_by_all(
    const MeshPtr& mesh,
    std::vector<int64_t> sizes,
    int64_t dim,
    Partition pieces);

} // namespace shardtensor::detail
