#pragma once

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

// Convolutions of volumes on CPUs, by oneDNN. PyTorch chooses kernels by the
// size of what it is given, which is right for images. Of volumes it leaves
// pieces below 20,480 elements, not counting the last dim, to kernels that
// write out every window: 27 times the piece in memory, and many times the
// time. And oneDNN takes the weight's gradient five times slower where the
// first dim is padded, by windows written out, too.

/// Whether volume_conv can take the place of at::conv3d and gains by it.
bool suits_volume_conv(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& bias);

/// at::conv3d with one value per dim. Differentiable twice.
at::Tensor volume_conv(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    int64_t groups);

} // namespace shardtensor::detail
