#pragma once

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// Whether autocast is on for the tensor's device and has this operator on its
/// lists. `op` is "aten::group_norm".
bool autocast_lists(const char* op, const at::Tensor& tensor);

/// Whether autocast runs this operator, one of its fp32 lists, on such a tensor
/// in fp32, or, where no dtype is asked for, with an fp32 result; function
/// level rules run above autocast.
inline bool autocast_widens(const char* op, const at::Tensor& tensor) {
  return tensor.defined() && at::isReducedFloatingType(tensor.scalar_type()) &&
      autocast_lists(op, tensor);
}

/// What autocast does to an input of an operator that it runs in fp32.
at::Tensor autocast_to_float(const char* op, const at::Tensor& tensor);

/// What autocast does to an input of an operator that it runs in lower
/// precision, and the dtype that this gives it.
at::ScalarType autocast_lower_precision(const at::Tensor& tensor);
at::Tensor autocast_to_lower_precision(const at::Tensor& tensor);

} // namespace shardtensor::detail
