#pragma once

#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/neighborhood/windows.h"

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

/// For these queries and values, without numbers yet, of the type of the
/// arithmetic.
NeighborhoodOutput empty_neighborhood_output(
    const at::Tensor& query,
    const at::Tensor& value);

/// The same into parts of tensors of the type of the arithmetic: rows of the
/// first of the dims. Gradients are added.
void attend_neighborhood_into(
    const NeighborhoodOutput& to,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale);
struct NeighborhoodGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
};
NeighborhoodGradients zero_gradients(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value);
void attend_neighborhood_backward_onto(
    const NeighborhoodGradients& to,
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const NeighborhoodOutput& attended,
    const std::vector<NeighborhoodDim>& dims,
    double scale);

} // namespace shardtensor::detail
