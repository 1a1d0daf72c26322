#include "shardtensor/tensor/order_keys.h"

#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>

namespace shardtensor::detail {
namespace {

/// Integers in the order of the floating point numbers that have these bits,
/// and the way back: those below zero stand in the opposite order.
at::Tensor reordered(const at::Tensor& bits) {
  const at::Scalar all_but_sign = bits.scalar_type() == at::kLong
      ? std::numeric_limits<int64_t>::max()
      : std::numeric_limits<int32_t>::max();
  return at::where(bits < 0, bits.bitwise_xor(all_but_sign), bits);
}

} // namespace

at::Tensor order_keys(const at::Tensor& values) {
  if (!at::isFloatingType(values.scalar_type())) {
    return values.to(at::kLong);
  }
  const bool is_wide = values.scalar_type() == at::kDouble;
  const auto type = is_wide ? at::kLong : at::kInt;
  const auto numbers = values.to(is_wide ? at::kDouble : at::kFloat);
  return reordered(numbers.contiguous().view(type))
      .masked_fill(
          numbers.isnan(),
          is_wide ? std::numeric_limits<int64_t>::max()
                  : std::numeric_limits<int32_t>::max());
}

at::Tensor sort_keys(const at::Tensor& values) {
  return order_keys(values.is_floating_point() ? values.add(0) : values);
}

bool has_order_keys(at::ScalarType dtype) {
  return !at::isComplexType(dtype) && !at::isFloat8Type(dtype) &&
      !at::isBarebonesUnsignedType(dtype);
}

at::Tensor values_of_keys(const at::Tensor& keys, at::ScalarType dtype) {
  if (!at::isFloatingType(dtype)) {
    return keys.to(dtype);
  }
  const bool is_wide = keys.scalar_type() == at::kLong;
  return reordered(keys).view(is_wide ? at::kDouble : at::kFloat).to(dtype);
}

} // namespace shardtensor::detail
