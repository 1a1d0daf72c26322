#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// The sum of a ShardTensor over dims: a Partial ShardTensor, so that nothing
/// moves until the value is needed. fp16 and bf16 sums accumulate in fp32; they
/// and truth values are reduced at once. Its gradient is made shard by shard.
at::Tensor sum_dims(
    const at::Tensor& tensor,
    const std::vector<int64_t>& dims,
    bool keepdim,
    std::optional<at::ScalarType> dtype);

} // namespace shardtensor::detail
