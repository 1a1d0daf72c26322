#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

/// The local tensor of `from` turned into the one of `to`, without autograd
/// history: same mesh, same global sizes. Communication: nothing when only
/// Replicate axes are cut, an all-reduce per axis that goes from Partial to
/// Replicate (one for all where those are the mesh's), and one exchange for
/// everything else. Raises when the meshes or
/// sizes differ, or when a Partial would have to be made from another
/// reduction's Partial, or an average, a maximum or a minimum from a Shard.
/// `format`: the one that the whole tensor shows, in which its boxes travel;
/// the same on all ranks.
at::Tensor redistribute_local(
    const at::Tensor& local,
    const SpecPtr& from,
    const SpecPtr& to,
    at::MemoryFormat format = at::MemoryFormat::Contiguous);

/// The elements that redistribute_local moves between all ranks together, for
/// choosing between layouts. The same on every rank.
int64_t redistribute_cost(const SpecPtr& from, const SpecPtr& to);

} // namespace shardtensor::detail
