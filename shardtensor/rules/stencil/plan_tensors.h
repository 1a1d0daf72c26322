#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

// Tensors that a plan knows, on the device of `like`: operators of their own,
// because a tracer sees through operators only.

/// int64.
at::Tensor index_tensor(
    const std::vector<int64_t>& values,
    const at::Tensor& like);

/// Of like's dtype.
at::Tensor weight_tensor(
    const std::vector<double>& values,
    const at::Tensor& like);

} // namespace shardtensor::detail
