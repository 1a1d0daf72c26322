#pragma once

#include "shardtensor/rules/norm/cells.h"

namespace shardtensor::detail {

// The passes of cells.h by the kernels that PyTorch has for a batch norm over
// processes, on CUDA and some other devices: moments, sums, scaling and the
// gradient of channels, with statistics in fp32 for half precision, too. Cells
// are shown to them as channels. Nothing here communicates or records.

/// True where the device of `x` has these kernels for its dtype.
bool have_kernels(const at::Tensor& x);

/// False where there are too few cells to fill a device, or too many short
/// ones: operators in several passes are faster.
bool suit_kernels(const at::Tensor& x, const Cells& cells);

/// Cells, as find_cells has them, of tensors on one device without gaps.
std::optional<Cells> find_kernel_cells(
    const std::vector<at::Tensor>& tensors,
    const std::vector<int64_t>& constant);

Moments moments_by_kernels(const at::Tensor& x, const Cells& cells);

CellSums sums_by_kernels(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& y,
    const Cells& cells);

at::Tensor scale_by_kernels(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& scale,
    const at::Tensor& bias,
    const Cells& cells);

at::Tensor combine_by_kernels(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& scale,
    const at::Tensor& y,
    const at::Tensor& scale_y,
    const at::Tensor& bias,
    const Cells& cells);

} // namespace shardtensor::detail
