#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "shardtensor/dispatch/function_level.h"

// t_() and its like: the tensor itself shows its elements in another order.

namespace shardtensor::detail {
namespace {

using torch::autograd::ViewFunc;
using torch::autograd::ViewInfo;

using View = std::function<at::Tensor(const at::Tensor&)>;

struct FunctionOfView : ViewFunc {
  explicit FunctionOfView(View view) : view_(std::move(view)) {}
  at::Tensor operator()(const at::Tensor& base) const override {
    return view_(base);
  }
  std::unique_ptr<ViewFunc> clone_and_set(
      std::optional<std::vector<c10::SymInt>>,
      std::optional<std::vector<at::Tensor>>) const override {
    return std::make_unique<FunctionOfView>(view_);
  }
  View view_;
};

/// What `op` does in place, as the operator of its name that makes a view.
View functional_view(
    const c10::OperatorHandle& op,
    std::vector<c10::IValue> arguments) {
  auto name = op.operator_name();
  name.name.pop_back(); // its underscore
  if (name.name == "aten::transpose") {
    name.overload_name = "int";
  }
  const auto view = c10::Dispatcher::singleton().findSchemaOrThrow(
      name.name.c_str(), name.overload_name.c_str());
  return [view, arguments = std::move(arguments)](const at::Tensor& self) {
    torch::jit::Stack stack{self};
    stack.insert(stack.end(), arguments.begin(), arguments.end());
    view.callBoxed(stack);
    return stack.at(0).toTensor();
  };
}

/// The way from `info`'s base to the tensor goes on by `view`.
void go_on(const ViewInfo& info, const at::Tensor& self, View view, View back) {
  if (info.has_view_fn()) {
    const_cast<ViewInfo&>(info) = info.chain( // NOLINT: autograd has no setter
        self,
        self,
        std::make_unique<FunctionOfView>(std::move(view)),
        std::move(back));
  }
}

/// A view is found again from its base by the operators that made it, and these
/// are to know of this one. PyTorch, which looks at strides, needs none.
void shown_otherwise(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const auto given = torch::jit::last(*stack, count);
  const auto self = given[0].toTensor();
  const std::vector<c10::IValue> others(given.begin() + 1, given.end());
  const auto sizes = self.sizes().vec();
  run_below_function_level(op, keys, stack);
  const auto* meta = is_shard_tensor(self)
      ? torch::autograd::impl::get_view_autograd_meta(self)
      : nullptr;
  if (!meta) {
    return;
  }
  const auto view = functional_view(op, others);
  const bool is_own_inverse = sizes.size() == self.sizes().size();
  const auto back = is_own_inverse
      ? view
      : View([sizes](const at::Tensor& shown) { return shown.view(sizes); });
  if (meta->has_bw_view()) {
    go_on(meta->get_backward_view(), self, view, back);
  }
  if (meta->has_fw_view() && !meta->shared_view_info()) {
    go_on(meta->get_forward_view(), self, view, back);
  }
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  for (const auto* op :
       {"t_",
        "transpose_",
        "squeeze_",
        "squeeze_.dim",
        "squeeze_.dims",
        "unsqueeze_"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&shown_otherwise>());
  }
}

} // namespace shardtensor::detail
