#pragma once

#include <optional>
#include <tuple>

#include "shardtensor/rules/neighborhood/kernel.h"

namespace shardtensor::detail {

// What kernel.h does by NATTEN's kernels, which the Python package
// registers for the device where they are installed
// (python/shardtensor/nn/natten.py). Nothing where they are not, or cannot take
// a piece: attend_windows does.

std::optional<NeighborhoodOutput> attend_by_natten(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale);

/// The gradients of query, key and value.
std::optional<std::tuple<at::Tensor, at::Tensor, at::Tensor>>
attend_by_natten_backward(
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale);

} // namespace shardtensor::detail
