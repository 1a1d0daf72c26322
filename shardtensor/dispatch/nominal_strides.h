#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/dispatch/rule.h"

namespace shardtensor::detail {

/// The format that the call's last argument asks for; else what `strides_of`
/// says, see Decision.
std::vector<int64_t> nominal_strides(
    const Call& call,
    StridesOf strides_of,
    const std::vector<int64_t>& sizes);

// ---- what a rule may say, see Decision::strides_of --------------------------

/// Of an operator that goes over what it reads element by element.
std::vector<int64_t> strides_of_elements(
    const Call& call,
    const std::vector<int64_t>& sizes);

/// As the first operand lies.
std::vector<int64_t> strides_of_first(
    const Call& call,
    const std::vector<int64_t>& sizes);

/// However the operands lie.
std::vector<int64_t> row_major_strides(
    const Call& call,
    const std::vector<int64_t>& sizes);

/// The rule, saying so.
template <Decision (*rule)(Call&), StridesOf strides_of>
Decision rule_with_strides(Call& call) {
  auto decision = rule(call);
  decision.strides_of = strides_of;
  return decision;
}

// -----------------------------------------------------------------------------

/// Whether it is contiguous, its dims of one element, too, whose strides may
/// otherwise be any number.
inline bool has_row_major_strides(const at::Tensor& x) {
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  int64_t next = 1;
  for (auto dim = sizes.size(); dim-- > 0;) {
    if (strides[dim] != next) {
      return false;
    }
    next *= std::max<int64_t>(sizes[dim], 1);
  }
  return true;
}

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
