#pragma once

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// Integers of 32 or 64 bits, ascending as the real elements do; NaN is the
/// last, and 0.0 comes after -0.0.
at::Tensor order_keys(const at::Tensor& values);

/// The elements that have these keys.
at::Tensor values_of_keys(const at::Tensor& keys, at::ScalarType dtype);

} // namespace shardtensor::detail
