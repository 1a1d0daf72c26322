#pragma once

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

// Keys with fewer heads than queries have, (batch, heads, rows, features).

/// Every head of the queries gets its own copy.
inline at::Tensor for_heads(const at::Tensor& key, int64_t heads) {
  return key.size(1) == heads
      ? key
      : key.repeat_interleave(heads / key.size(1), /*dim=*/1);
}

/// The gradients of the copies, summed.
inline at::Tensor of_shared_heads(const at::Tensor& grad, int64_t heads) {
  return grad.size(1) == heads
      ? grad
      : grad.unflatten(1, {heads, grad.size(1) / heads}).sum(2);
}

} // namespace shardtensor::detail
