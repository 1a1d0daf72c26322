#pragma once

#include <array>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/halo/slab.h"

namespace shardtensor::detail {

// What a rank does in a convolution that overlaps its messages: see
// conv_overlap.h. For a compiler each function is one operator of the graph,
// which contains its messages.

struct OverlapWork {
  std::vector<int64_t> stride;
  std::vector<int64_t> dilation;
  std::vector<int64_t> padding; // on the owned rows
  int64_t groups = 1;
  Slab slab;
};

/// Each with its own memory format, none undefined but bias. Communication: one
/// exchange.
struct OverlapOutput {
  at::Tensor output;
  at::Tensor slab; // rows of other ranks, for backward
};
OverlapOutput convolve_overlapped(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& bias,
    const OverlapWork& work);

/// Those of x, weight and bias that are wanted. Communication: one exchange if
/// that of x is.
struct OverlapGradients {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias;
};
OverlapGradients convolve_overlapped_backward(
    const at::Tensor& grad,
    const at::Tensor& x,
    const at::Tensor& slab,
    const at::Tensor& weight,
    const std::array<bool, 3>& wanted,
    const OverlapWork& work);

/// The wanted gradients of the local operator with this padding, by PyTorch's
/// own differentiable operator.
OverlapGradients convolution_gradients(
    const at::Tensor& grad,
    const at::Tensor& x,
    const at::Tensor& weight,
    at::IntArrayRef padding,
    const std::array<bool, 3>& wanted,
    const OverlapWork& work);

} // namespace shardtensor::detail
