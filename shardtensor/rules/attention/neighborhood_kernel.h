#pragma once

#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/attention/neighborhood_windows.h"

namespace shardtensor::detail {

// Neighbourhood attention of one piece in the CPU's memory, by loops of our
// own: each query meets the keys of its window, and no scores are kept. Tensors
// are (batch, dims..., heads, features), keys and values those of the rows that
// key_rows names, in each of one to three dims. fp16 and bf16 are computed in
// fp32. Nothing here communicates or records.

struct NeighborhoodOutput {
  at::Tensor output;
  at::Tensor log_sum; // of exponentials, (batch, dims..., heads)
};
NeighborhoodOutput attend_neighborhood(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale);

/// The gradients of query, key and value.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_neighborhood_backward(
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const NeighborhoodOutput& attended,
    const std::vector<NeighborhoodDim>& dims,
    double scale);

} // namespace shardtensor::detail
