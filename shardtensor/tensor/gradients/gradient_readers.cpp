#include "shardtensor/tensor/gradients/gradient_readers.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace shardtensor {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

struct Reader final : torch::autograd::PostAccumulateGradHook {
  explicit Reader(std::vector<int64_t> averaged) : ranks(std::move(averaged)) {}
  void operator()(const at::Tensor& /*leaf*/) override {}
  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}
  void apply_with_saved(
      at::Tensor& /*leaf*/,
      torch::dynamo::autograd::SwapSavedVariables& /*saved*/) override {}

  const std::vector<int64_t> ranks; // increasing
};

std::function<void()>& teller() {
  static auto* held = new std::function<void()>();
  return *held;
}

} // namespace

void note_reader(const at::Tensor& leaf, std::vector<int64_t> ranks) {
  if (!leaf.requires_grad()) {
    return;
  }
  std::sort(ranks.begin(), ranks.end());
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(leaf);
  const auto* known = dynamic_cast<const Reader*>(hook.get());
  if (!hook || (known && known->ranks != ranks)) {
    torch::autograd::impl::set_post_acc_grad_hooks(
        leaf, std::make_unique<Reader>(std::move(ranks)));
  }
}

void set_gradient_readers(std::function<void()> tell) {
  teller() = std::move(tell);
}

namespace detail {

void learn_readers() {
  static thread_local int last = -1;
  const int task = torch::autograd::get_current_graph_task_id();
  const bool is_traced = c10::impl::dispatch_mode_enabled();
  if (teller() && !is_traced && std::exchange(last, task) != task) {
    teller()();
  }
}

void check_averages_over(
    const Node* next,
    const Mesh& mesh,
    const std::vector<int64_t>& axes) {
  const auto* accumulate = dynamic_cast<const AccumulateGrad*>(next);
  if (!accumulate) {
    return;
  }
  const auto& hook =
      torch::autograd::impl::post_acc_grad_hooks(accumulate->variable);
  const auto* reader = dynamic_cast<const Reader*>(hook.get());
  if (!reader) {
    return;
  }
  for (const int64_t axis : axes) {
    for (int64_t i = 0; i < mesh.ranks(axis); ++i) {
      const auto position = mesh.with_coordinate(mesh.position(), axis, i);
      TORCH_CHECK_VALUE(
          std::binary_search(
              reader->ranks.begin(),
              reader->ranks.end(),
              mesh.global_rank(position)),
          "gradient policy 'deferred': a parameter of sizes ",
          accumulate->variable.sizes(),
          " is averaged over ",
          reader->ranks.size(),
          " ranks, expected at least all along axis ",
          axis,
          " of ",
          mesh,
          ", which each have a term of its gradient; wrap it over these, too, or "
          "use 'immediate' or 'coalesced'");
    }
  }
}

} // namespace detail
} // namespace shardtensor
