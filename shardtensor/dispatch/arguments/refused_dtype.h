#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/dispatch/arguments/tensor_arguments.h"
#include "shardtensor/dispatch/call.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {

/// A tensor of as many dims, with one element: a zero.
inline at::Tensor one_zero_like(const at::Tensor& tensor) {
  const std::vector<int64_t> sizes(tensor.dim(), 1);
  return at::zeros(sizes, tensor.options());
}

/// PyTorch's error of a dtype that an operator does not take. Kernels raise it
/// when they have something to do: a rank whose piece is empty would go on
/// alone. `args` are the operator's others, for a tensor of as many dims.
template <class Op, class... Args>
void check_takes_dtype(const at::Tensor& local, const Args&... args) {
  if (!at::isFloatingType(local.scalar_type()) && !is_traced(local)) {
    Op::call(one_zero_like(local), args...);
  }
}

/// The same, asked by those ranks alone whose own call would not.
template <class Op, class... Args>
void check_empty_takes_dtype(const at::Tensor& local, const Args&... args) {
  if (!is_traced(local) && local.numel() == 0) {
    check_takes_dtype<Op>(local, args...);
  }
}

/// The same for rules of operators that take tensors of one element. A decision
/// is kept for its dtypes, so this is asked once.
inline void check_takes_dtypes(const Call& call) {
  for (const auto& operand : call.operands()) {
    const auto& x = operand.tensor;
    if (has_no_values(is_shard_tensor(x) ? impl_of(x)->local() : x)) {
      return;
    }
  }
  bool are_common = true;
  torch::jit::Stack stack;
  for (size_t i = 0; i < call.arguments(); ++i) {
    stack.push_back(
        with_tensors(call.argument(i), [&](const at::Tensor& tensor) {
          const auto dtype = tensor.scalar_type();
          are_common =
              are_common && (dtype == at::kFloat || dtype == at::kDouble);
          return one_zero_like(tensor);
        }));
  }
  if (!are_common) {
    call.op().callBoxed(&stack);
  }
}

} // namespace shardtensor::detail
