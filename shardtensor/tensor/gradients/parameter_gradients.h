#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/mesh.h"

namespace shardtensor {

/// How the gradient of a plain, replicated parameter becomes complete. Each
/// rank's backward computes the term that its shard contributes.
///
/// - Immediate: an all-reduce inside backward, before anybody sees the
///   gradient. Right everywhere.
/// - Coalesced: terms are set aside and summed beside this backward in buckets,
///   one all-reduce each. Parameters get their gradients at its end. Falls back
///   to Immediate wherever somebody could see the gradient earlier: non-leaf
///   parameters, hooks, DDP, FSDP, torch.autograd.grad, create_graph.
/// - Deferred: the term times the number of ranks that share it, for DDP or
///   FSDP over the whole mesh, which average over all ranks themselves. Raises
///   in backward where they are over other ranks, see gradient_readers.h.
enum class GradientPolicy { Immediate, Coalesced, Deferred };

void set_gradient_policy(GradientPolicy policy);
GradientPolicy gradient_policy();
/// "immediate", "coalesced", "deferred".
const char* to_string(GradientPolicy policy);
/// Raises on another name.
GradientPolicy parse_gradient_policy(const std::string& name);

/// From how many bytes of one dtype and group on Coalesced terms travel. 25
/// MiB, the default, is DDP's; larger buckets are fewer messages, smaller ones
/// start earlier. What is left goes when the last term has come. For all
/// backwards of the process from now on, the same on all ranks. Raises where it
/// isn't positive.
void set_gradient_bucket_bytes(int64_t bytes);
int64_t gradient_bucket_bytes();

/// Plain parameters, equal on all ranks, about to be used by this rank's local
/// work, to whose result the ranks of `axes` contribute separately. Returns
/// them for local use; backward sums their gradients over `axes` by the
/// gradient policy, all in one message. Undefined tensors pass. Differentiable
/// twice. No communication forward. A ShardTensor among them is made Replicate
/// first and its gradient is summed at once.
std::vector<at::Tensor> shared_weights(
    const std::vector<at::Tensor>& weights,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes);

} // namespace shardtensor
