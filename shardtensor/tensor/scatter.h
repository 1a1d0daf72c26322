#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

/// A plain tensor that one position of the mesh holds, cut as `spec` says:
/// every rank receives its shard only. `source` is a position; there `tensor`
/// has spec's global sizes, elsewhere only its dtype and device count. The
/// result is a leaf. Communication: one message from the source to every other
/// rank, and an exchange for a repeated partition. Raises for a Partial
/// placement, a source outside the mesh, or other sizes at the source.
at::Tensor scatter(
    const at::Tensor& tensor,
    int64_t source,
    const SpecPtr& spec);

} // namespace shardtensor
