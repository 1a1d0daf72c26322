#include "shardtensor/comm/wire.h"

#include <cstdint>
#include <limits>

#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

namespace shardtensor {

namespace {

// Note [NaN in max and min]
// Backends compare with <, so that a NaN gets lost or not, depending on the
// order of the ranks, and differently on each of them. Extrema of
// floating-point numbers therefore travel as integers in the same order, NaN
// as the largest one (max) or the smallest one (min).
bool travels_as_keys(const at::Tensor& x, Reduce reduce) {
  return x.is_floating_point() &&
      (reduce == Reduce::Max || reduce == Reduce::Min);
}

/// Flips the magnitude bits of negative numbers; its own inverse.
at::Tensor flip_negative(const at::Tensor& bits) {
  const bool wide = bits.scalar_type() == at::kLong;
  const int64_t magnitude = wide ? std::numeric_limits<int64_t>::max()
                                 : std::numeric_limits<int32_t>::max();
  const at::Tensor sign = bits.bitwise_right_shift(wide ? 63 : 31);
  return bits.bitwise_xor(sign.bitwise_and(magnitude));
}

at::Tensor to_keys(const at::Tensor& x, Reduce reduce) {
  const bool wide = x.scalar_type() == at::kDouble;
  const at::Tensor values = (wide ? x : x.to(at::kFloat)).contiguous();
  const at::Tensor keys =
      flip_negative(values.view(wide ? at::kLong : at::kInt));
  const int64_t largest = wide ? std::numeric_limits<int64_t>::max()
                               : std::numeric_limits<int32_t>::max();
  return keys.masked_fill(
      values.isnan(), reduce == Reduce::Max ? largest : -largest - 1);
}

at::Tensor from_keys(const at::Tensor& keys, at::ScalarType dtype) {
  const bool wide = keys.scalar_type() == at::kLong;
  return flip_negative(keys).view(wide ? at::kDouble : at::kFloat).to(dtype);
}

} // namespace

at::Tensor to_wire(const at::Tensor& x, Reduce reduce) {
  if (travels_as_keys(x, reduce)) {
    return to_keys(x, reduce);
  }
  if (x.is_complex()) {
    return at::view_as_real(x.clone(at::MemoryFormat::Contiguous));
  }
  if (x.scalar_type() == at::kBool) {
    return x.to(at::kByte).contiguous();
  }
  if (x.scalar_type() == at::kShort) {
    return x.to(at::kInt).contiguous();
  }
  return x.clone(at::MemoryFormat::Contiguous);
}

Reduce wire_reduce(const at::Tensor& x, Reduce reduce) {
  if (reduce == Reduce::Avg) {
    return Reduce::Sum;
  }
  if (x.scalar_type() == at::kBool) {
    const bool any = reduce == Reduce::Sum || reduce == Reduce::Max;
    return any ? Reduce::Max : Reduce::Min;
  }
  return reduce;
}

at::Tensor from_wire(
    const at::Tensor& wire,
    const at::Tensor& x,
    Reduce reduce) {
  if (travels_as_keys(x, reduce)) {
    return from_keys(wire, x.scalar_type());
  }
  return x.is_complex() ? at::view_as_complex(wire) : wire.to(x.scalar_type());
}

} // namespace shardtensor
