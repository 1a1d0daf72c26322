#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/comm/transforms.h"

namespace shardtensor::detail {

/// The elements of a plain tensor of integers, in order. A device is waited
/// for. Also inside of transforms, see Note [Transforms].
inline std::vector<int64_t> host_numbers(const at::Tensor& numbers) {
  const auto host = value_inside(numbers.to(at::kCPU, at::kLong).contiguous());
  const auto* const data = host.const_data_ptr<int64_t>();
  return {data, data + host.numel()};
}

} // namespace shardtensor::detail
