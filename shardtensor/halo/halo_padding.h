#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace shardtensor {

/// x between the neighbours' rows along dim: the last `width` rows of the rank
/// before, x, the first `width` rows of the rank after; at the ends of the
/// group `edge_padding` rows of zeros instead. For local tensors of which each
/// rank knows its own size only: x must have `width` rows on every rank, unless
/// there is one alone, and require grad on all or on none, or every rank raises
/// (see halo_exchange.h for ShardTensors, which need not). Differentiable to
/// any order: a neighbour's row hands its gradient back. Communication: one
/// message to each neighbour, and before it three integers from each rank to
/// each. Thread safety / ordering: as in primitives.h.
///
/// Example: ranks 0 and 1 hold {1, 2} and {3, 4}: with width 1 and edge_padding
/// 1 they get {0, 1, 2, 3} and {2, 3, 4, 0}.
at::Tensor halo_padding(
    const at::Tensor& x,
    int64_t dim,
    int64_t width,
    int64_t edge_padding,
    const std::string& group);

} // namespace shardtensor
