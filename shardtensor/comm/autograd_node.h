#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace shardtensor::detail {

// Autograd nodes of our own: lighter than torch::autograd::Function, and usable
// under torch.func, which refuses C++ Functions.

// Note [One thread of backward]
// For a device the engine has a thread of its own, beside the caller's, which
// takes nodes whose gradients are undefined or on the host. What the one makes
// ready for the other comes sooner or later, on each rank as its threads run:
// the order of nodes, and so of messages, would be another one on each rank.
// The caller's thread alone takes them in the order of the forward.

/// Backwards that this thread calls have one thread, where `tensor` is on a
/// device.
inline void keep_backward_in_one_thread(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  }
}

/// What owns a node: intrusive_ptr in PyTorch 2.13, shared_ptr before.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class NodeType, class... Args>
auto make_node(Args&&... args) {
  if constexpr (
      std::is_same_v<NodePtr, c10::intrusive_ptr<torch::autograd::Node>>) {
    return c10::make_intrusive<NodeType>(std::forward<Args>(args)...);
  } else {
    // deleteNode is found by its argument: this version may not have it.
    return std::shared_ptr<NodeType>(
        new NodeType(std::forward<Args>(args)...),
        [](NodeType* node) { deleteNode(node); });
  }
}

/// PyTorch marks integers that a gradient's values were written into, too.
inline bool needs_node(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.defined() &&
      tensor.requires_grad() &&
      torch::autograd::isDifferentiableType(tensor.scalar_type());
}

/// Makes NodeType(args...) the way gradients flow from `output` back to
/// `input`, if they do. A node's apply() gets undefined tensors for gradients
/// that nobody asked for and passes them on.
template <class NodeType, class... Args>
void connect(
    const at::Tensor& output,
    const at::Tensor& input,
    Args&&... args) {
  if (!needs_node(input)) {
    return;
  }
  keep_backward_in_one_thread(output);
  auto node = make_node<NodeType>(std::forward<Args>(args)...);
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(output, node);
}

/// The same from several inputs, some of which may be undefined; the gradients
/// come in their order.
template <class NodeType, class... Args>
void connect(
    const at::Tensor& output,
    const torch::autograd::variable_list& inputs,
    Args&&... args) {
  if (std::none_of(inputs.begin(), inputs.end(), needs_node)) {
    return;
  }
  keep_backward_in_one_thread(output);
  auto node = make_node<NodeType>(std::forward<Args>(args)...);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  torch::autograd::set_history(output, node);
}

} // namespace shardtensor::detail
