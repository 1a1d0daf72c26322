#include "shardtensor/rules/unboxed.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/abs_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cos_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/leaky_relu_backward_ops.h>
#include <ATen/ops/leaky_relu_ops.h>
#include <ATen/ops/log_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/reshape_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_backward_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sin_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_ops.h>
#include <ATen/ops/where_ops.h>

#include <torch/csrc/autograd/VariableTypeUtils.h>

#include "shardtensor/rules/function_level.h"
#include "shardtensor/rules/view_call.h"

namespace shardtensor {
namespace {

using c10::DispatchKeySet;

template <class Op>
const c10::OperatorHandle& handle_of() {
  static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      Op::name, Op::overload_name);
  return handle;
}

/// Calls a boxed function with typed arguments.
template <class Op, class Result, class Boxed, class... Args>
Result boxed_call(const Boxed& boxed, Args... args) {
  auto stack = c10::impl::boxArgs<Args...>(std::forward<Args>(args)...);
  boxed(handle_of<Op>(), stack);
  return c10::impl::PopResult<Result>::call(stack);
}

// ---- function level ---------------------------------------------------------

/// Looks at all arguments: nothing to promote, no transform.
class Ready {
 public:
  explicit Ready(DispatchKeySet keys)
      : holds_(!keys.has_any(DispatchKeySet(
            {c10::DispatchKey::FuncTorchGradWrapper,
             c10::DispatchKey::FuncTorchBatched}))) {}

  void see(const at::Tensor& tensor) {
    if (is_shard_tensor(tensor)) {
      if (tensor.requires_grad() && c10::GradMode::is_enabled()) {
        keep_gradient_layout(tensor);
      }
    } else {
      holds_ = holds_ && tensor.defined() && tensor.dim() == 0 &&
          !tensor.requires_grad();
    }
  }
  void see(const at::ITensorListRef& tensors) {
    for (const auto& tensor : tensors) {
      see(tensor);
    }
  }
  void see(const std::optional<at::Tensor>& tensor) {
    if (tensor && tensor->defined()) {
      see(*tensor);
    }
  }
  template <class Other>
  void see(const Other&) {}

  bool holds() const {
    return holds_;
  }

 private:
  bool holds_;
};

template <class Op, class Signature>
struct FunctionLevel;

template <class Op, class Result, class... Args>
struct FunctionLevel<Op, Result(Args...)> {
  static Result call(DispatchKeySet keys, Args... args) {
    Ready ready(keys);
    (ready.see(args), ...);
    if (ready.holds()) {
      const ViewReplay replay;
      return Op::redispatch(
          below_function_level(keys), std::forward<Args>(args)...);
    }
    return boxed_call<Op, Result, Boxed, Args...>(
        Boxed{keys}, std::forward<Args>(args)...);
  }

  struct Boxed {
    DispatchKeySet keys;
    void operator()(const c10::OperatorHandle& op, torch::jit::Stack& stack)
        const {
      run_below_function_level(op, keys, &stack);
    }
  };
};

template <class Op>
c10::KernelFunction function_level() {
  return c10::KernelFunction::makeFromUnboxedRuntimeFunction(
      &FunctionLevel<Op, typename Op::schema>::call);
}

// ---- views that nothing records ---------------------------------------------

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
       DispatchKey::FuncTorchGradWrapper,
       DispatchKey::FuncTorchBatched,
       DispatchKey::FuncTorchDynamicLayerFrontMode,
       DispatchKey::FuncTorchDynamicLayerBackMode});
  return is_shard_tensor(self) && !keys.has_any(kModes) &&
      keys.has(DispatchKey::ADInplaceOrView) &&
      keys.has_any(c10::autograd_dispatch_keyset) && !self.requires_grad() &&
      !self.is_inference() && !self._fw_grad(/*level=*/0).defined();
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

// ---- dispatch level ---------------------------------------------------------

/// Looks at all arguments: contiguous tensors of one layout without a Partial,
/// and plain numbers. A pointwise result then has that layout.
class Alike {
 public:
  void see(const at::Tensor& tensor) {
    if (!is_shard_tensor(tensor)) {
      all_sharded_ = false;
      holds_ = holds_ && tensor.defined() && tensor.dim() == 0;
      return;
    }
    const auto& own = spec(tensor);
    if (!spec_) {
      spec_ = &own;
      holds_ = holds_ && !own->has_partial();
    }
    holds_ = holds_ && own == *spec_ && tensor.is_contiguous();
  }
  template <class Other>
  void see(const Other&) {}

  bool holds() const {
    return holds_ && spec_;
  }
  bool all_sharded() const {
    return all_sharded_;
  }
  const SpecPtr& layout() const {
    return *spec_;
  }

 private:
  bool holds_ = true;
  bool all_sharded_ = true;
  const SpecPtr* spec_ = nullptr;
};

const at::Tensor& local_argument(const at::Tensor& tensor) {
  return is_shard_tensor(tensor) ? impl_of(tensor)->local() : tensor;
}
template <class Other>
const Other& local_argument(const Other& other) {
  return other;
}

struct RunRule {
  Rule rule;
  void operator()(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      const {
    run_rule(op, rule, &stack);
  }
};

template <class Op, class Signature>
class Pointwise;

template <class Op, class... Args>
class Pointwise<Op, at::Tensor(Args...)> : public c10::OperatorKernel {
 public:
  explicit Pointwise(Rule rule) : rule_(rule) {}

  at::Tensor operator()(Args... args) {
    Alike alike;
    (alike.see(args), ...);
    if (alike.holds()) {
      return wrap(Op::call(local_argument(args)...), alike.layout());
    }
    return boxed_call<Op, at::Tensor, Boxed, Args...>(
        Boxed{rule_}, std::forward<Args>(args)...);
  }

 private:
  struct Boxed {
    Rule rule;
    void operator()(const c10::OperatorHandle& op, torch::jit::Stack& stack)
        const {
      run_rule(op, rule, &stack);
    }
  };

  Rule rule_;
};

template <class Op>
c10::KernelFunction pointwise(Rule rule) {
  using Kernel = Pointwise<Op, typename Op::schema>;
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(
      std::make_unique<Kernel>(rule));
}

/// cat along a dim that is whole.
class Cat : public c10::OperatorKernel {
 public:
  explicit Cat(Rule rule) : rule_(rule) {}

  at::Tensor operator()(const at::ITensorListRef& tensors, int64_t dim) {
    Alike alike;
    for (const auto& tensor : tensors) {
      alike.see(tensor);
    }
    const auto whole = [&] {
      const auto dims = alike.layout()->dim();
      dim = dim < 0 ? dim + dims : dim;
      return dim >= 0 && dim < dims && !alike.layout()->is_sharded(dim);
    };
    if (!alike.holds() || !alike.all_sharded() || !whole()) {
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
        {dim, static_cast<int64_t>(tensors.size())},
        [&] {
          const auto& own = alike.layout();
          auto sizes = own->sizes();
          sizes[dim] *= static_cast<int64_t>(tensors.size());
          return ViewPlan{own, with_sizes(own, std::move(sizes))};
        });
    c10::SmallVector<at::Tensor, 4> locals;
    for (const auto& tensor : tensors) {
      locals.push_back(impl_of(tensor)->local());
    }
    return wrap(at::cat(locals, dim), plan->output);
  }

 private:
  Rule rule_;
};

c10::KernelFunction cat(Rule rule) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Cat>(
      std::make_unique<Cat>(rule));
}

// ---- the table --------------------------------------------------------------

/// Typed on both levels.
template <class Op>
UnboxedOperator both() {
  return {{Op::name, Op::overload_name}, &function_level<Op>, &pointwise<Op>};
}

/// Typed at the function level.
template <class Op>
UnboxedOperator above() {
  return {{Op::name, Op::overload_name}, &function_level<Op>, nullptr};
}

} // namespace

const std::vector<UnboxedOperator>& unboxed_operators() {
  namespace ops = at::_ops;
  static const std::vector<UnboxedOperator> table = {
      both<ops::add_Tensor>(),
      both<ops::sub_Tensor>(),
      both<ops::mul_Tensor>(),
      both<ops::div_Tensor>(),
      both<ops::neg>(),
      both<ops::abs>(),
      both<ops::exp>(),
      both<ops::log>(),
      both<ops::sqrt>(),
      both<ops::rsqrt>(),
      both<ops::sin>(),
      both<ops::cos>(),
      both<ops::pow_Tensor_Scalar>(),
      both<ops::where_self>(),
      both<ops::relu>(),
      both<ops::sigmoid>(),
      both<ops::tanh>(),
      both<ops::silu>(),
      both<ops::gelu>(),
      both<ops::leaky_relu>(),
      both<ops::threshold_backward>(),
      both<ops::sigmoid_backward>(),
      both<ops::tanh_backward>(),
      both<ops::silu_backward>(),
      both<ops::gelu_backward>(),
      both<ops::leaky_relu_backward>(),
      {{ops::view::name, ops::view::overload_name}, &view, nullptr},
      above<ops::reshape>(),
      above<ops::permute>(),
      above<ops::transpose_int>(),
      above<ops::t>(),
      above<ops::unsqueeze>(),
      above<ops::slice_Tensor>(),
      {{"aten::cat", ""}, &function_level<ops::cat>, &cat},
      above<ops::mm>(),
      above<ops::addmm>(),
      above<ops::detach>(),
  };
  return table;
}

const UnboxedOperator* find_unboxed(const c10::OperatorName& name) {
  for (const auto& unboxed : unboxed_operators()) {
    if (unboxed.name == name) {
      return &unboxed;
    }
  }
  return nullptr;
}

} // namespace shardtensor
