#pragma once

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// What autocast does to an input of an operator that it runs in fp32; function
/// level rules run above autocast. `op` is "aten::group_norm"; nothing happens
/// unless autocast is on and has this operator among its fp32 operators.
at::Tensor autocast_to_float(const char* op, const at::Tensor& tensor);

/// What autocast does to an input of an operator that it runs in lower
/// precision, and the dtype that this gives it.
at::ScalarType autocast_lower_precision(const at::Tensor& tensor);
at::Tensor autocast_to_lower_precision(const at::Tensor& tensor);

} // namespace shardtensor::detail
