#pragma once

#include <cstdint>
#include <vector>

#include "shardtensor/dispatch/call.h"

namespace shardtensor::detail {

/// The strides of a new tensor of `sizes` that `call` makes, none for a
/// contiguous one: see Note [Nominal strides]. `keeps_order` says that the
/// operator goes over its operands element by element, see Decision.
std::vector<int64_t> nominal_strides(
    const Call& call,
    bool keeps_order,
    const std::vector<int64_t>& sizes);

/// What TensorIterator gives a tensor of `sizes` made of these operands, which
/// may be broadcast: dims in memory in the order that the first operand that
/// tells two of them apart has them in.
std::vector<int64_t> elementwise_strides(
    at::ArrayRef<at::Tensor> operands,
    const std::vector<int64_t>& sizes);

/// TensorIterator's order of dims in memory, the innermost first, for operands
/// of these strides, 0 where they are broadcast to `sizes`.
std::vector<int64_t> memory_order(
    const std::vector<std::vector<int64_t>>& strides,
    const std::vector<int64_t>& sizes);

/// Of a tensor of `sizes` without gaps, whose dims lie in memory in `order`,
/// the innermost first.
std::vector<int64_t> dense_strides(
    const std::vector<int64_t>& order,
    const std::vector<int64_t>& sizes);

} // namespace shardtensor::detail
