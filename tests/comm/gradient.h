#pragma once

#include <torch/csrc/autograd/autograd.h>

namespace shardtensor::testing {

/// The gradient of (y * gy).sum() for x.
inline at::Tensor gradient(
    const at::Tensor& y,
    const at::Tensor& x,
    const at::Tensor& gy,
    bool create_graph = false) {
  return torch::autograd::grad({y}, {x}, {gy}, {}, create_graph)[0];
}

} // namespace shardtensor::testing
