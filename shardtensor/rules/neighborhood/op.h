#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/neighborhood/windows.h"

namespace shardtensor::detail {

/// The neighbourhood attention of one piece: see kernel.h.
/// Differentiable to any order; one operator for a compiler. Double backward
/// and forward mode copy the keys of all windows.
at::Tensor attend_piece(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale);

} // namespace shardtensor::detail
