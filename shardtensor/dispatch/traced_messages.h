#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/real.h>
#include <ATen/ops/sum.h>

#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {

/// `result`, which does not depend on `unused`: what came with a message, or
/// went, where this rank's piece is empty or elsewhere. For a compiler it
/// depends on it. Otherwise that would drop the message here, and keep it on
/// the ranks that do use theirs.
inline at::Tensor needing(const at::Tensor& result, const at::Tensor& unused) {
  if (!is_traced(unused)) {
    return result;
  }
  const auto real = unused.is_complex() ? at::real(unused) : unused;
  const auto nothing = at::sum(real.reshape({-1}).narrow(0, 0, 0));
  return at::add(
      result, nothing.to(c10::toRealValueType(result.scalar_type())));
}

} // namespace shardtensor::detail
