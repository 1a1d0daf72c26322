#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/moments.h"

namespace shardtensor {

// The passes of a norm over large fp32 and fp64 tensors in the CPU's memory,
// each of which reads its inputs once. A cell is a run of elements side by side
// in memory that share their mean, weight and bias: an image of one channel.
// What is known of a cell is a tensor with size 1 in the dims of the cell.
// Sums are taken in fp64 over short runs. Nothing here communicates or records.

/// The last dims of x that make a cell, as many as `constant` (sorted) and the
/// strides of all tensors allow; std::nullopt where cells are no gain: short
/// ones, other dtypes and devices, a tensor that a compiler traces.
std::optional<std::vector<int64_t>> cell_dims(
    const std::vector<at::Tensor>& tensors,
    const std::vector<int64_t>& constant);

Moments cell_moments(const at::Tensor& x, const std::vector<int64_t>& cell);

struct CellSums {
  at::Tensor values; // of y
  at::Tensor products; // of y * (x - mean)
};
/// An undefined mean means zero, here and below.
CellSums cell_sums(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& y,
    const std::vector<int64_t>& cell);

/// (x - mean) * scale + bias.
at::Tensor scale_cells(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& scale,
    const at::Tensor& bias,
    const std::vector<int64_t>& cell);

/// (x - mean) * scale + y * scale_y + bias.
at::Tensor combine_cells(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& scale,
    const at::Tensor& y,
    const at::Tensor& scale_y,
    const at::Tensor& bias,
    const std::vector<int64_t>& cell);

} // namespace shardtensor
