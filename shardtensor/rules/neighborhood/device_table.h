#pragma once

#include <vector>

#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include "shardtensor/comm/plain_tensors.h"

namespace shardtensor::detail {

/// The host's numbers on a device: a tensor to keep, whatever modes and
/// transforms the call is in that makes it.
template <class Number>
at::Tensor device_table(
    std::vector<Number>& numbers,
    at::IntArrayRef sizes,
    at::Device device) {
  const OnPlainTensors plain;
  const c10::InferenceMode no_inference(false);
  const auto type = c10::CppTypeToScalarType<Number>::value;
  return at::from_blob(numbers.data(), sizes, type)
      .to(device, type, /*non_blocking=*/false, /*copy=*/true);
}

} // namespace shardtensor::detail
