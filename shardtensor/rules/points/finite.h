#pragma once

#include <string>

#include <ATen/core/TensorBody.h>

namespace shardtensor::detail {

/// Raises where a coordinate is not finite, on every rank if on one. Nothing
/// happens while a compiler traces. Communication: one all-reduce of a number
/// where the points are cut.
void check_finite(const char* op, const at::Tensor& points);

/// Of plain tensors, on the ranks of a group; "": on this one.
void check_finite(
    const char* op,
    const at::Tensor& points,
    const at::Tensor& queries,
    const std::string& group);

} // namespace shardtensor::detail
