#pragma once

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/detach_ops.h>

#include "shardtensor/dispatch/arguments/plain_writes.h"
#include "shardtensor/dispatch/boxed_call.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/dispatch/rule.h"
#include "shardtensor/dispatch/unboxed.h"
#include "shardtensor/tensor/dtensor.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

// The typed kernels that Note [Unboxed kernels] tells of, made from an
// operator's at::_ops struct.

namespace shardtensor::detail {

// ---- function level ---------------------------------------------------------

/// Looks at all arguments: nothing to promote or to join, no constant, no known
/// zeros, no transform.
class Ready {
 public:
  explicit Ready(c10::DispatchKeySet keys)
      : holds_(!keys.has_any(kTransformKeys)) {}

  void see(const at::Tensor& tensor) {
    if (is_shard_tensor(tensor)) {
      const auto* own = spec(tensor)->mesh().get();
      holds_ = holds_ && !constant_view_of(tensor) &&
          !impl_of(tensor)->may_know_zeros() && (!mesh_ || mesh_ == own);
      mesh_ = own;
      if (tensor.requires_grad() && c10::GradMode::is_enabled()) {
        keep_gradient_layout(tensor);
      }
    } else {
      holds_ = holds_ && tensor.defined() && tensor.dim() == 0 &&
          !tensor.requires_grad() && !is_dtensor(tensor);
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
  void see(const c10::List<std::optional<at::Tensor>>& tensors) {
    for (const std::optional<at::Tensor> tensor : tensors) {
      see(tensor);
    }
  }
  template <class Other>
  void see(const Other&) {}

  bool holds() const {
    return holds_;
  }

 private:
  bool holds_;
  const Mesh* mesh_ = nullptr;
};

template <class Op, class Signature>
struct FunctionLevel;

template <class Op, class Result, class... Args>
struct FunctionLevel<Op, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    Ready ready(keys);
    (ready.see(args), ...);
    bool holds = ready.holds();
    if constexpr (std::is_same_v<Op, at::_ops::detach>) {
      holds = holds && !is_accumulating_plain();
    }
    if (holds) {
      const ViewReplay replay;
      return Op::redispatch(
          below_function_level(keys), std::forward<Args>(args)...);
    }
    return boxed_call<Op, Result, BelowFunctionLevel, Args...>(
        BelowFunctionLevel{keys}, std::forward<Args>(args)...);
  }
};

template <class Op>
c10::KernelFunction function_level() {
  return c10::KernelFunction::makeFromUnboxedRuntimeFunction(
      &FunctionLevel<Op, typename Op::schema>::call);
}

// ---- dispatch level ---------------------------------------------------------

/// Looks at all arguments: tensors of one layout without a Partial, dense in
/// the same order, and plain numbers. A pointwise result then has that layout
/// and that order, beside a number that of dims of one element, too.
class Alike {
 public:
  void see(const at::Tensor& tensor) {
    if (!is_shard_tensor(tensor)) {
      all_sharded_ = false;
      holds_ = holds_ && tensor.defined() && tensor.dim() == 0;
      return;
    }
    row_major_ = row_major_ && has_row_major_strides(tensor);
    const auto& own = spec(tensor);
    if (!spec_) {
      spec_ = &own;
      if (!tensor.is_contiguous()) {
        strides_ = tensor.strides();
      }
      holds_ = holds_ && !own->has_partial();
    }
    holds_ = holds_ && own == *spec_ &&
        (strides_.empty() ? tensor.is_contiguous()
                          : tensor.strides() == strides_ &&
                 tensor.is_non_overlapping_and_dense());
  }
  template <class Other>
  void see(const Other&) {}

  bool holds() const {
    return holds_ && spec_ && (all_sharded_ || row_major_ || !strides_.empty());
  }
  bool all_sharded() const {
    return all_sharded_;
  }
  const SpecPtr& layout() const {
    return *spec_;
  }
  /// Empty: contiguous.
  at::IntArrayRef strides() const {
    return strides_;
  }

 private:
  bool holds_ = true;
  bool all_sharded_ = true;
  bool row_major_ = true;
  const SpecPtr* spec_ = nullptr;
  at::IntArrayRef strides_;
};

inline const at::Tensor& local_argument(const at::Tensor& tensor) {
  return is_shard_tensor(tensor) ? impl_of(tensor)->local() : tensor;
}
template <class Other>
const Other& local_argument(const Other& other) {
  return other;
}

struct RunRule {
  Rule rule;
  void operator()(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      const {
    run_rule(op, rule, stack);
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
      return wrap(
          Op::call(local_argument(args)...), alike.layout(), alike.strides());
    }
    return boxed_call<Op, at::Tensor, RunRule, Args...>(
        RunRule{rule_}, std::forward<Args>(args)...);
  }

 private:
  Rule rule_;
};

template <class Op>
c10::KernelFunction pointwise(Rule rule) {
  using Kernel = Pointwise<Op, typename Op::schema>;
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(
      std::make_unique<Kernel>(rule));
}

// ---- entries of a table -----------------------------------------------------

/// A pointwise operator, typed on both levels.
template <class Op>
UnboxedOperator unboxed_pointwise() {
  return {{Op::name, Op::overload_name}, &function_level<Op>, &pointwise<Op>};
}

/// Typed at the function level.
template <class Op>
UnboxedOperator unboxed_above() {
  return {{Op::name, Op::overload_name}, &function_level<Op>, nullptr};
}

} // namespace shardtensor::detail
