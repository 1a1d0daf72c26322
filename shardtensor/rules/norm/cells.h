#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/reduce/moments.h"

namespace shardtensor::detail {

// The passes of a norm that read their inputs once. A cell is a set of elements
// that share their mean, weight and bias: an image of one channel. In the CPU's
// memory loops of our own visit large fp32, fp64 and bf16 tensors, with sums in
// fp64 over short runs; on a device that has PyTorch's kernels for a batch norm
// over processes, those do (cell_kernels.h). Nothing here communicates or
// records.

/// Where the cells of a tensor are. What is known of them is a tensor with size
/// 1 in the dims of a cell.
struct Cells {
  std::vector<int64_t> dims; // of one cell, sorted
  // Of cells that lie interleaved in memory, sorted: the channels where they
  // are last. None: each cell is a run of its own.
  std::vector<int64_t> interleaved;
  int64_t length = 1; // elements of a cell
  int64_t width = 1; // cells that lie interleaved
  // For the kernels of a device: all dims, from the outermost in memory.
  std::vector<int64_t> order;
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

/// False for few elements on a device: what a kernel needs to know of cells for
/// combine_cells costs more than passes over them.
bool worth_combining(const at::Tensor& x, const Cells& cells);

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
