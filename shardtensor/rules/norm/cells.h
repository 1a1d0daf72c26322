#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/reduce/moments.h"

namespace shardtensor::detail {

// The passes of a norm over large fp32, fp64 and bf16 tensors in the CPU's
// memory, each of which reads its inputs once. A cell is a set of elements that
// share their mean, weight and bias: an image of one channel. Sums are taken in
// fp64 over short runs. Nothing here communicates or records.

/// Where the cells of a tensor are. What is known of them is a tensor with size
/// 1 in the dims of a cell.
struct Cells {
  std::vector<int64_t> dims; // of one cell, sorted
  // Of cells that lie interleaved in memory, sorted: the channels where they
  // are last. None: each cell is a run of its own.
  std::vector<int64_t> interleaved;
  int64_t length = 1; // elements of a cell
  int64_t width = 1; // cells that lie interleaved
};

/// The longest cells that `constant` (sorted) and the strides of all tensors
/// (of the same sizes) allow; std::nullopt where cells are no gain: short ones,
/// other dtypes and devices, a tensor that a compiler traces.
std::optional<Cells> find_cells(
    const std::vector<at::Tensor>& tensors,
    const std::vector<int64_t>& constant);

Moments cell_moments(const at::Tensor& x, const Cells& cells);

struct CellSums {
  at::Tensor values; // of y
  at::Tensor products; // of y * (x - mean)
};
/// An undefined mean means zero, here and below.
CellSums cell_sums(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& y,
    const Cells& cells);

/// (x - mean) * scale + bias.
at::Tensor scale_cells(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& scale,
    const at::Tensor& bias,
    const Cells& cells);

/// (x - mean) * scale + y * scale_y + bias.
at::Tensor combine_cells(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& scale,
    const at::Tensor& y,
    const at::Tensor& scale_y,
    const at::Tensor& bias,
    const Cells& cells);

} // namespace shardtensor::detail
