#pragma once

#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace shardtensor {

template <class Op>
const c10::OperatorHandle& handle_of() {
  static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      Op::name, Op::overload_name);
  return handle;
}

/// The argument that an operator writes into and returns.
template <class First, class... Rest>
at::Tensor& written_argument(First& first, Rest&... rest) {
  if constexpr (std::is_same_v<First, at::Tensor>) { // not const
    return first;
  } else {
    return written_argument(rest...);
  }
}

/// Calls a boxed function with typed arguments.
template <class Op, class Result, class Boxed, class... Args>
Result boxed_call(const Boxed& boxed, Args... args) {
  auto stack = c10::impl::boxArgs<Args...>(std::forward<Args>(args)...);
  boxed(handle_of<Op>(), &stack);
  if constexpr (std::is_same_v<Result, at::Tensor&>) {
    return written_argument(args...);
  } else {
    return c10::impl::PopResult<Result>::call(stack);
  }
}

} // namespace shardtensor
