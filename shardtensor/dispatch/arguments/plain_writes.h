#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace shardtensor::detail {

/// Note [Plain tensors written]
/// An in-place or out= argument cannot be promoted: what is written into the
/// wrapper would be lost to the plain tensor, to its views and to autograd. So
/// the operator runs on plain tensors instead, with every ShardTensor gathered:
/// PyTorch's own kernels and nodes, the same on every rank. The gradient of a
/// gathered tensor arrives as the plain tensor's does, complete on every rank.
/// Where lists hold both kinds (the parameters of an optimizer's foreach step)
/// each place is a call of its own.
///
/// True when the call on the stack, which has a ShardTensor among its
/// arguments, was such a one, and is done. Communication: that of full_tensor
/// for each ShardTensor.
bool run_writing_plain(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Note [Gradients of plain parameters]
/// A user's autograd.Function may return a ShardTensor as the gradient of a
/// plain parameter. PyTorch's node that accumulates it detaches, copies or adds
/// it, so these operators run on plain tensors there, as above. Others are
/// those of a hook.
///
/// True while such a node runs.
bool is_accumulating_plain();
/// The call on the stack as run_writing_plain(), if it is one of these.
bool run_accumulating_plain(
    const c10::OperatorHandle& op,
    torch::jit::Stack* stack);

} // namespace shardtensor::detail
