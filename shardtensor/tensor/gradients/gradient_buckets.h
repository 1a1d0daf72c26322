#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/comm/autograd_node.h"
#include "shardtensor/layout/mesh.h"
#include "shardtensor/tensor/gradients/completing_node.h"

namespace shardtensor::detail {

// Note [Gradient buckets]
// Terms that may wait are summed beside backward, as DDP does: those of a
// bucket travel as soon as all have come, and backward ends with the wait for
// all buckets. All ranks must fill and start the same buckets in the same
// order, but nodes may become ready in another order on each: it is enough that
// one of them computes a part of its forward in a thread. So the order is that
// of the forward, backwards; what two threads record at the same time has none
// that ranks could share, so a program has one wait for the other. Which nodes
// will come, the engine knows (its graph has none for unused parameters); a
// node that comes early waits for those before it. Terms of nodes that nobody
// knows of are summed at the end.

/// The term of the parameter that `accumulate`, an AccumulateGrad, belongs to,
/// from the backward node `from`: it shall be summed over `axes`, and given to
/// `accumulate` at the end of this backward. See may_wait.
void sum_later(
    const CompletingNode& from,
    const NodePtr& accumulate,
    const at::Tensor& term,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes);

/// This backward has called all it will call for `node`. Communication: starts
/// an all-reduce for each bucket that is complete.
void note_that_terms_came(const CompletingNode& node);

} // namespace shardtensor::detail
