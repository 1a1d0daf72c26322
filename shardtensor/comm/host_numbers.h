#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// The elements of a plain tensor of integers, in order. A device is waited
/// for.
inline std::vector<int64_t> host_numbers(const at::Tensor& numbers) {
  const auto host = numbers.to(at::kCPU, at::kLong).contiguous();
  const auto* const data = host.const_data_ptr<int64_t>();
  return {data, data + host.numel()};
}

} // namespace shardtensor::detail
