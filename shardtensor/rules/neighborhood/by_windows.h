#pragma once

#include "shardtensor/rules/neighborhood/kernel.h"

namespace shardtensor::detail {

// What kernel.h does by PyTorch's operators, on any device and
// differentiable to any order: the keys of each query's window are copied side
// by side.

/// `in_parts`: some of the queries at a time, so that the copies stay small
/// where nothing is recorded.
NeighborhoodOutput attend_windows(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale,
    bool in_parts);

/// The gradients of query, key and value.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_windows_backward(
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale,
    bool in_parts);

} // namespace shardtensor::detail
