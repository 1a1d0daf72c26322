#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/median_ops.h>
#include <ATen/ops/nanmedian_ops.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/arguments/refused_dtype.h"
#include "shardtensor/rules/reduce/reduction.h"
#include "shardtensor/tensor/order_keys.h"

// The median of all elements. Nothing is sorted or moved: its digits of eight
// bits are found one after the other, the highest first, from how many elements
// have which. Communication: an all-reduce of 256 numbers for each digit.

namespace shardtensor::detail {
namespace {

constexpr int64_t kDigitBits = 8;
constexpr int64_t kDigits = 1 << kDigitBits;

at::Tensor summed(const Reduction& reduction, const at::Tensor& counts) {
  return all_reduce(
      counts, Reduce::Sum, *reduction.spec->mesh(), reduction.axes);
}

/// The key that `place` others come before.
at::Tensor select(
    const Reduction& reduction,
    const at::Tensor& keys,
    at::Tensor place) {
  const auto bits = static_cast<int64_t>(keys.element_size()) * 8;
  const at::Scalar mask = kDigits - 1;
  auto candidates = at::ones_like(keys, at::kLong);
  auto found = at::zeros({}, keys.options());
  for (int64_t shift = bits - kDigitBits; shift >= 0; shift -= kDigitBits) {
    // The highest digit has the sign, and negative numbers come first.
    const at::Scalar sign = shift == bits - kDigitBits ? kDigits / 2 : 0;
    const auto digits = keys.bitwise_right_shift(at::Scalar(shift))
                            .bitwise_and(mask)
                            .bitwise_xor(sign)
                            .to(at::kLong);
    const auto counts = summed(
        reduction,
        at::zeros({kDigits}, candidates.options())
            .scatter_add(0, digits, candidates));
    const auto is_before = counts.cumsum(0) <= place;
    const auto digit = is_before.sum();
    place = place - (counts * is_before).sum();
    candidates = candidates * (digits == digit);
    found = found +
        digit.bitwise_xor(sign)
            .to(keys.scalar_type())
            .bitwise_left_shift(shift);
  }
  return found;
}

template <class Op>
at::Tensor median_of(const at::Tensor& self, bool skips_nan) {
  const Reduction reduction(Op::name, self, {}, false);
  if (reduction.axes.empty() || self.numel() == 0) {
    return wrap(Op::call(reduction.local), reduction.result);
  }
  check_takes_dtype<Op>(reduction.local);
  const CommScope scope(Op::name);
  const auto keys = order_keys(reduction.local.flatten());
  const auto last =
      at::full({}, self.numel() - 1, keys.options().dtype(at::kLong));
  auto place = last.floor_divide(2);
  if (at::isFloatingType(self.scalar_type())) {
    const auto nans = summed(reduction, reduction.local.isnan().sum());
    place = skips_nan ? (last - nans).floor_divide(2).clamp_min(0)
                      : at::where(nans > 0, last, place);
  }
  return wrap(
      values_of_keys(select(reduction, keys, place), self.scalar_type()),
      reduction.result);
}

at::Tensor median_kernel(const at::Tensor& self) {
  return median_of<at::_ops::median>(self, false);
}

at::Tensor nanmedian_kernel(const at::Tensor& self) {
  return median_of<at::_ops::nanmedian>(self, true);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("median", median_kernel);
  m.impl("nanmedian", nanmedian_kernel);
}

} // namespace shardtensor::detail
