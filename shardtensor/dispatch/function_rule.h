#pragma once

#include <optional>
#include <type_traits>

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/arguments/joined_operands.h"
#include "shardtensor/dispatch/boxed_call.h"
#include "shardtensor/dispatch/function_level.h"

namespace shardtensor {

inline bool has_transformed(const at::Tensor& tensor) {
  return is_transformed(tensor);
}
inline bool has_transformed(const std::optional<at::Tensor>& tensor) {
  return tensor && is_transformed(*tensor);
}
inline bool has_transformed(const at::ITensorListRef& tensors) {
  for (const auto& tensor : tensors) {
    if (is_transformed(tensor)) {
      return true;
    }
  }
  return false;
}
inline bool has_transformed(const at::TensorList& tensors) {
  return has_transformed(at::ITensorListRef(tensors));
}
template <class Other>
bool has_transformed(const Other&) {
  return false;
}

template <class Op, auto function, class Signature>
struct FunctionRule;

template <class Op, auto function, class Result, class... Args>
struct FunctionRule<Op, function, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    if ((has_transformed(args) || ...)) {
      return Op::redispatch(
          below_function_level(keys), std::forward<Args>(args)...);
    }
    Joinable joinable(keys);
    (joinable.see(args), ...);
    if (joinable.found()) {
      return boxed_call<Op, Result, decltype(&run_joined), Args...>(
          &run_joined, std::forward<Args>(args)...);
    }
    const CommScope scope(Op::name);
    if constexpr (
        std::is_invocable_v<
            decltype(function),
            c10::DispatchKeySet,
            typename c10::remove_symint<Args>::type...>) {
      return function(keys, c10::unpackSymInt<Args>(args)...);
    } else {
      return function(c10::unpackSymInt<Args>(args)...);
    }
  }
};

template <class Op, class Signature>
struct WithoutRule;

template <class Op, class Result, class... Args>
struct WithoutRule<Op, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    return boxed_call<Op, Result, BelowFunctionLevel, Args...>(
        BelowFunctionLevel{keys}, std::forward<Args>(args)...);
  }
};

/// The call as operators without a rule do it, for a rule that leaves it alone
/// and may have been given plain tensors: they are promoted, or written.
template <class Op>
constexpr auto without_rule = &WithoutRule<Op, typename Op::schema>::call;

/// What a function-level rule of one of PyTorch's operators is registered as:
///   m.impl("group_norm",
///          function_rule<at::_ops::group_norm, group_norm_function>);
/// `function` has the operator's C++ signature, with numbers that are not
/// symbolic. It may take the DispatchKeySet first: to send calls on by
/// without_rule<Op>(keys, ...). The call is the CommScope.
/// Where an argument is a tensor of a torch.func transform the function is not
/// called: the transform calls the operator again on what is inside. Nor where
/// Note [Joined operands] applies.
template <class Op, auto function>
constexpr auto function_rule =
    &FunctionRule<Op, function, typename Op::schema>::call;

} // namespace shardtensor
