#include "shardtensor/tensor/known_zeros.h"

#include <algorithm>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/graph_task.h>

#include "shardtensor/layout/plans/constant_layout.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

using torch::autograd::Node;

int64_t version_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor._version());
}

bool is_empty(const Box& box) {
  return std::ranges::any_of(
      box, [](const Interval& interval) { return interval.empty(); });
}

/// The box outside of which the tensor is zero, empty where it is nowhere else.
const Box* known_box(const at::Tensor& tensor) {
  const auto* impl = impl_of(tensor);
  const auto& known = impl->known_zeros();
  const bool holds = known && !impl->knows_zeros_of_base() &&
      !tensor.is_inference() && known->version == version_of(tensor);
  return holds ? &known->box : nullptr;
}

/// The smallest box around both.
Box hull(Box a, const Box& b) {
  if (is_empty(a) || is_empty(b)) {
    return is_empty(a) ? b : a;
  }
  for (size_t dim = 0; dim < a.size(); ++dim) {
    a[dim] = {
        std::min(a[dim].begin, b[dim].begin), std::max(a[dim].end, b[dim].end)};
  }
  return a;
}

bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() ||
      !node.retains_grad_hooks().empty() || !node.post_hooks().empty();
}

/// By torch.autograd.grad, or as one of backward's inputs.
bool is_asked_for(Node& node) {
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  if (!asked) {
    return false;
  }
  const auto found = asked->find(&node);
  return found != asked->end() && found->second.captures_;
}

/// Whose first input is what their result has outside of what they wrote, or
/// the same elements elsewhere.
bool passes_zeros_on(const Node& node) {
  return dynamic_cast<const torch::autograd::CopySlices*>(&node) ||
      dynamic_cast<const PassesZerosOn*>(&node) ||
      node.name() == "RollBackward0";
}

} // namespace

std::optional<ZerosBesideWrite> zeros_beside_write(const at::Tensor& view) {
  const auto& place = impl_of(view)->view_place();
  if (!place.base || !place.offset) {
    return {};
  }
  const at::Tensor base(place.base);
  const auto* known = known_box(base);
  if (!known || !base.is_contiguous()) {
    return {};
  }
  const auto shown = shown_box(
      base.sizes().vec(),
      {view.sizes().vec(), view.strides().vec(), *place.offset});
  return ZerosBesideWrite{base, hull(*known, shown)};
}

std::optional<Box> nonzero_box_of_sum(
    const at::Tensor& a,
    const at::Tensor& b) {
  const auto* of_a = nonzero_box(a);
  const auto* of_b = nonzero_box(b);
  return of_a && of_b && a.sizes() == b.sizes()
      ? std::optional(hull(*of_a, *of_b))
      : std::nullopt;
}

bool zeros_are_read(Node& made) {
  for (auto* node = &made; node; node = node->next_edge(0).function.get()) {
    if (!passes_zeros_on(*node) || has_hooks(*node) || is_asked_for(*node)) {
      return true;
    }
  }
  return false;
}

void note_known_zeros(const at::Tensor& tensor, Box box) {
  auto* impl = impl_of(tensor);
  if (tensor.is_inference() || is_traced(impl->local())) {
    return;
  }
  if (!impl->known_zeros() || impl->knows_zeros_of_base()) {
    impl->set_known_zeros(std::make_shared<KnownZeros>());
  }
  *impl->known_zeros() = {std::move(box), version_of(tensor)};
}

const Box* nonzero_box(const at::Tensor& tensor) {
  const auto* box = known_box(tensor);
  return box && !is_empty(*box) ? box : nullptr;
}

} // namespace shardtensor::detail
