#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/reduce/moments.h"

namespace shardtensor::detail {

// The passes of a norm that read their inputs once. A slice is a set of
// elements that share their mean, weight and bias: an image of one channel. In
// the CPU's memory loops of our own visit large fp32, fp64 and bf16 tensors,
// with sums in fp64 over short runs; on a device that has PyTorch's kernels for
// a batch norm over processes, those do (slice_kernels.h). Nothing here
// communicates or records.

/// Where the slices of a tensor are. What is known of them is a tensor with
/// size 1 in the dims of a slice.
struct Slices {
  std::vector<int64_t> dims; // of one slice, sorted
  // Of slices that lie interleaved in memory, sorted: the channels where they
  // are last. None: each slice is a run of its own.
  std::vector<int64_t> interleaved;
  int64_t length = 1; // elements of a slice
  int64_t width = 1; // slices that lie interleaved
  // For the kernels of a device: all dims, from the outermost in memory.
  std::vector<int64_t> order;
};

/// The longest slices that `constant` (sorted) and the strides of all tensors
/// (of the same sizes) allow; std::nullopt where slices are no gain: short
/// ones, other dtypes and devices, a tensor that a compiler traces.
std::optional<Slices> find_slices(
    const std::vector<at::Tensor>& tensors,
    const std::vector<int64_t>& constant);

Moments slice_moments(const at::Tensor& x, const Slices& slices);

struct SliceSums {
  at::Tensor values; // of y
  at::Tensor products; // of y * (x - mean)
};
/// An undefined mean means zero, here and below.
SliceSums slice_sums(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& y,
    const Slices& slices);

/// (x - mean) * scale + bias.
at::Tensor scale_slices(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& scale,
    const at::Tensor& bias,
    const Slices& slices);

/// False for few elements on a device: what a kernel needs to know of slices
/// for combine_slices costs more than passes over them.
bool worth_combining(const at::Tensor& x, const Slices& slices);

/// (x - mean) * scale + y * scale_y + bias.
at::Tensor combine_slices(
    const at::Tensor& x,
    const at::Tensor& mean,
    const at::Tensor& scale,
    const at::Tensor& y,
    const at::Tensor& scale_y,
    const at::Tensor& bias,
    const Slices& slices);

} // namespace shardtensor::detail
