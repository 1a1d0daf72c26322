#include <c10/util/SmallVector.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/view_ops.h>

#include <torch/csrc/autograd/VariableTypeUtils.h>

#include "shardtensor/dispatch/unboxed_kernels.h"
#include "shardtensor/rules/view/kept_plans.h"

// view and cat in one step where nothing is to be decided: see Note [Unboxed
// kernels].

namespace shardtensor::detail {
namespace {

using c10::DispatchKeySet;

/// Views a tensor anew, after its base was written.
struct ReplayView : torch::autograd::ViewFunc {
  explicit ReplayView(at::IntArrayRef sizes) : sizes(sizes) {}
  at::Tensor operator()(const at::Tensor& base) const override {
    return base.view(sizes);
  }
  std::unique_ptr<ViewFunc> clone_and_set(
      std::optional<std::vector<c10::SymInt>>,
      std::optional<std::vector<at::Tensor>>) const override {
    return std::make_unique<ReplayView>(sizes);
  }
  at::DimVector sizes;
};

/// True where autograd only notes that the result is a view: then one step does
/// what its two levels would.
bool is_unrecorded(DispatchKeySet keys, const at::Tensor& self) {
  using c10::DispatchKey;
  constexpr DispatchKeySet kModes(
      {DispatchKey::Python,
       DispatchKey::PythonTLSSnapshot,
       DispatchKey::Functionalize,
       DispatchKey::Tracer,
       DispatchKey::FuncTorchDynamicLayerFrontMode,
       DispatchKey::FuncTorchDynamicLayerBackMode});
  return is_shard_tensor(self) && !keys.has_any(kModes | kTransformKeys) &&
      keys.has(DispatchKey::ADInplaceOrView) &&
      keys.has_any(c10::autograd_dispatch_keyset) && !self.requires_grad() &&
      !self.is_inference() && !self._fw_grad(/*level=*/0).defined() &&
      !constant_view_of(self);
}

at::Tensor view_function_level(
    DispatchKeySet keys,
    const at::Tensor& self,
    c10::SymIntArrayRef size) {
  const auto sizes = c10::asIntArrayRefSlowOpt(size);
  if (!sizes || !is_unrecorded(keys, self)) {
    return FunctionLevel<at::_ops::view, at::_ops::view::schema>::call(
        keys, self, size);
  }
  at::Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = at::_ops::view::redispatch(
        keys & c10::after_ADInplaceOrView_keyset, self, size);
  }
  using torch::autograd::CreationMeta;
  return torch::autograd::as_view(
      self,
      result,
      /*is_bw_differentiable=*/true,
      /*is_fw_differentiable=*/true,
      std::make_unique<ReplayView>(*sizes),
      nullptr,
      c10::GradMode::is_enabled() ? CreationMeta::DEFAULT
                                  : CreationMeta::NO_GRAD_MODE);
}

c10::KernelFunction view() {
  return c10::KernelFunction::makeFromUnboxedRuntimeFunction(
      &view_function_level);
}

// ---- cat --------------------------------------------------------------------

/// cat along a dim that is whole.
class UnboxedCat : public c10::OperatorKernel {
 public:
  explicit UnboxedCat(Rule rule) : rule_(rule) {}

  at::Tensor operator()(const at::ITensorListRef& tensors, int64_t dim) {
    Alike alike;
    for (const auto& tensor : tensors) {
      alike.see(tensor);
    }
    const auto whole = whole_dim(alike, dim);
    if (!whole) {
      return boxed_call<
          at::_ops::cat,
          at::Tensor,
          RunRule,
          const at::ITensorListRef&,
          int64_t>(RunRule{rule_}, tensors, dim);
    }
    const auto plan = find_view_plan(
        "cat",
        alike.layout(),
        {*whole, static_cast<int64_t>(tensors.size())},
        [&] {
          const auto& own = alike.layout();
          auto sizes = own->sizes();
          sizes[*whole] *= static_cast<int64_t>(tensors.size());
          return ViewPlan{own, with_sizes(own, std::move(sizes))};
        });
    c10::SmallVector<at::Tensor, 4> locals;
    for (const auto& tensor : tensors) {
      locals.push_back(impl_of(tensor)->local());
    }
    return wrap(at::cat(locals, *whole), plan->output);
  }

 private:
  /// `dim` counted from the front, where tensors alike have it whole.
  static std::optional<int64_t> whole_dim(const Alike& alike, int64_t dim) {
    if (!alike.holds() || !alike.all_sharded() || !alike.strides().empty()) {
      return std::nullopt;
    }
    const auto& layout = *alike.layout();
    dim = dim < 0 ? dim + layout.dim() : dim;
    const bool is_whole =
        dim >= 0 && dim < layout.dim() && !layout.is_sharded(dim);
    return is_whole ? std::optional(dim) : std::nullopt;
  }

  Rule rule_;
};

c10::KernelFunction cat(Rule rule) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, UnboxedCat>(
      std::make_unique<UnboxedCat>(rule));
}

const RegisterUnboxed views{
    {{"aten::view", ""}, &view, nullptr},
    {{"aten::cat", ""}, &function_level<at::_ops::cat>, &cat},
};

} // namespace
} // namespace shardtensor::detail
