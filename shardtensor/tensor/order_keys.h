#pragma once

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// Integers of 32 or 64 bits, ascending as the real elements do; NaN is the
/// last, and 0.0 comes after -0.0.
at::Tensor order_keys(const at::Tensor& values);

/// The same, but zeros of both signs are equal, as for who sorts.
at::Tensor sort_keys(const at::Tensor& values);

/// Not the types of which PyTorch refuses to sort some, and wide unsigned
/// ones, for which it lacks operators.
bool has_order_keys(at::ScalarType dtype);

/// The elements that have these keys.
at::Tensor values_of_keys(const at::Tensor& keys, at::ScalarType dtype);

} // namespace shardtensor::detail
