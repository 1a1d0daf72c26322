#pragma once

#include "shardtensor/rules/norm/slices.h"

namespace shardtensor::detail {

// The passes of slices.h by the kernels that PyTorch has for a batch norm over
// processes, on CUDA and some other devices: moments, sums, scaling and the
// gradient of channels, with statistics in fp32 for half precision, too. Slices
// are shown to them as channels. Nothing here communicates or records.

/// True where the device of `x` has these kernels for its dtype.
bool have_kernels(const at::Tensor& x);

/// False where there are too few slices to fill a device, or too many short
/// ones: operators in several passes are faster.
bool suit_kernels(const at::Tensor& x, const Slices& slices);

/// Slices, as find_slices has them, of tensors on one device without gaps.
std::optional<Slices> find_kernel_slices(
    const std::vector<at::Tensor>& tensors,
    const std::vector<int64_t>& constant);

Moments moments_by_kernels(const at::Tensor& x, const Slices& slices);

SliceSums sums_by_kernels(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& y,
    const Slices& slices);

at::Tensor scale_by_kernels(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& scale,
    const at::Tensor& bias,
    const Slices& slices);

at::Tensor combine_by_kernels(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& scale,
    const at::Tensor& y,
    const at::Tensor& scale_y,
    const at::Tensor& bias,
    const Slices& slices);

} // namespace shardtensor::detail
