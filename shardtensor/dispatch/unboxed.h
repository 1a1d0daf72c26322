#pragma once

#include <initializer_list>

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/operator_name.h>

#include "shardtensor/dispatch/rule.h"

namespace shardtensor::detail {

/// Note [Unboxed kernels]
/// A boxed kernel serves every operator, but each level that a call passes puts
/// all arguments on a stack and takes them off again. The commonest operators
/// have typed kernels on both levels. They go straight on where nothing is to
/// be decided or promoted, else they do what the boxed kernel does. A view of
/// what needs no gradient skips autograd's two levels as well, which would note
/// that it is a view, and does that itself.
struct UnboxedOperator {
  c10::OperatorName name;
  c10::KernelFunction (*function_level)();
  /// Null for operators that have a typed kernel of their own, or none.
  c10::KernelFunction (*dispatch_level)(Rule);
};

/// At namespace scope: `const RegisterUnboxed mine{{...}};`. An operator's rule
/// may be registered before or after.
struct RegisterUnboxed {
  RegisterUnboxed(std::initializer_list<UnboxedOperator> operators);
};

} // namespace shardtensor::detail
