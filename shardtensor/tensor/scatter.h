#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/MemoryFormat.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

/// A plain tensor that one position of the mesh holds, cut as `spec` says:
/// every rank receives its shard only. `source` is a position; there `tensor`
/// has spec's global sizes, elsewhere only its dtype and device count. The
/// result is a leaf, which shows the strides of `format`, as from_local's does.
/// Communication: three integers from each rank to each, one message from the
/// source to every other rank, and an exchange for a repeated partition.
/// Raises, on every rank, for a Partial placement, a source outside the mesh,
/// other sizes at the source, a ShardTensor or an undefined tensor on any rank,
/// and where dtypes, sources or layouts differ between ranks.
at::Tensor scatter(
    const at::Tensor& tensor,
    int64_t source,
    const SpecPtr& spec,
    at::MemoryFormat format = at::MemoryFormat::Contiguous);

} // namespace shardtensor
