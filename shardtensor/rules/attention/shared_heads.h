#pragma once

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

// Keys with fewer heads, along `dim`, than queries have: each serves as many
// neighbouring heads of these.

/// Every head of the queries gets its own copy.
inline at::Tensor for_heads(
    const at::Tensor& key,
    int64_t heads,
    int64_t dim = 1) {
  if (key.size(dim) == heads) {
    return key;
  }
  auto sizes = key.sizes().vec();
  sizes.insert(sizes.begin() + dim + 1, heads / key.size(dim));
  return key.unsqueeze(dim + 1).expand(sizes).flatten(dim, dim + 1);
}

/// The gradients of the copies, summed.
inline at::Tensor of_shared_heads(
    const at::Tensor& grad,
    int64_t heads,
    int64_t dim = 1) {
  return grad.size(dim) == heads
      ? grad
      : grad.unflatten(dim, {heads, grad.size(dim) / heads}).sum(dim + 1);
}

} // namespace shardtensor::detail
