#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {

/// PyTorch's error of a dtype that an operator does not take. Kernels raise it
/// when they have something to do: a rank whose piece is empty would go on
/// alone. `args` are the operator's others, for a tensor of as many dims.
template <class Op, class... Args>
void check_takes_dtype(const at::Tensor& local, const Args&... args) {
  if (!at::isFloatingType(local.scalar_type()) && !is_traced(local)) {
    const std::vector<int64_t> one(local.dim(), 1);
    Op::call(at::zeros(one, local.options()), args...);
  }
}

/// The same, asked by those ranks alone whose own call would not.
template <class Op, class... Args>
void check_empty_takes_dtype(const at::Tensor& local, const Args&... args) {
  if (!is_traced(local) && local.numel() == 0) {
    check_takes_dtype<Op>(local, args...);
  }
}

} // namespace shardtensor::detail
