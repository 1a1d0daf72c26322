#pragma once

#include <utility>

#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace shardtensor {

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
  boxed(handle_of<Op>(), &stack);
  return c10::impl::PopResult<Result>::call(stack);
}

} // namespace shardtensor
