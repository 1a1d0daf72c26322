#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/spectra/plan.h"

namespace shardtensor::detail {

/// The strides of the transform of x as the kernels of x's device leave them
/// (_exec_fft in ATen/native/mkl/SpectralOps.cpp and cuda/SpectralOps.cpp):
/// dims that are transformed lie innermost.
std::vector<int64_t> transformed_strides(
    const at::Tensor& x,
    const Transform& transform);

} // namespace shardtensor::detail
