#pragma once

#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// Strides of a copy of `tensor` that lies as it does; none: contiguous.
inline std::vector<int64_t> order_in_memory(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return {};
  }
  return tensor.is_non_overlapping_and_dense()
      ? tensor.strides().vec()
      : at::infer_dense_strides(tensor.sizes(), tensor.strides());
}

/// The same of a part of it.
inline std::vector<int64_t> order_in_memory(
    const at::Tensor& tensor,
    at::IntArrayRef sizes) {
  return tensor.sizes() == sizes
      ? order_in_memory(tensor)
      : at::infer_dense_strides(sizes, tensor.strides());
}

} // namespace shardtensor::detail
