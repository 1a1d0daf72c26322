#include <algorithm>
#include <optional>

#include <ATen/ops/aminmax.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/bincount_ops.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/trace_ops.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/refused_dtype.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/global_rows.h"

// How many elements fall into each bin: every rank counts its own, for bins
// that all have agreed on.

namespace shardtensor::detail {
namespace {

/// One number per bin, to be summed over the ranks that hold other elements.
at::Tensor counts_of(const at::Tensor& own, const SpecPtr& spec) {
  return wrap(
      own, with_dims(spec, own.sizes().vec(), {-1}, Placement::partial()));
}

at::Tensor bincount_kernel(
    const at::Tensor& self,
    const std::optional<at::Tensor>& weights,
    int64_t minlength) {
  TORCH_CHECK(minlength >= 0, "minlength should be >= 0");
  TORCH_CHECK(
      self.dim() == 1 && at::isIntegralType(self.scalar_type(), true),
      "bincount only supports 1-d non-negative integral inputs.");
  const auto given = local_of(self);
  const bool weighs = weights && weights->defined();
  TORCH_CHECK(
      !weighs || weights->sizes() == self.sizes(),
      "weights should be 1-d and have the same length as input");
  if (self.numel() > 0) {
    const auto [lowest, highest] = at::aminmax(self);
    TORCH_CHECK(
        lowest.item<int64_t>() >= 0,
        "bincount only supports 1-d non-negative integral inputs.");
    minlength = std::max(minlength, highest.item<int64_t>() + 1);
    check_empty_takes_dtype<at::_ops::bincount>(
        given.tensor, std::optional<at::Tensor>(), int64_t{0});
  }
  const auto own =
      weighs ? local_of(*weights, given.spec).tensor : at::Tensor();
  if (given.tensor.numel() > 0 || self.numel() == 0) {
    return counts_of(at::bincount(given.tensor, own, minlength), given.spec);
  }
  const auto type = !weighs             ? at::kLong
      : own.scalar_type() == at::kFloat ? at::kFloat
                                        : at::kDouble;
  return counts_of(
      at::zeros({minlength}, given.tensor.options().dtype(type)), given.spec);
}

at::Tensor histc_kernel(
    const at::Tensor& self,
    int64_t bins,
    const at::Scalar& min,
    const at::Scalar& max) {
  const auto given = local_of(self);
  auto lowest = min.toDouble();
  auto highest = max.toDouble();
  if (lowest == highest && self.numel() > 0 && !self.is_meta()) {
    const auto [least, most] = at::aminmax(self);
    lowest = least.item<double>();
    highest = most.item<double>();
  }
  if (lowest == highest) {
    lowest -= 1;
    highest += 1;
  }
  const auto own = at::histc(given.tensor, bins, lowest, highest);
  return counts_of(own, given.spec);
}

/// Nothing moves: an element knows whether it is on the diagonal.
at::Tensor trace_kernel(const at::Tensor& self) {
  TORCH_CHECK(self.dim() == 2, "trace: expected a matrix");
  const auto& local = impl_of(self)->local();
  check_takes_dtype<at::_ops::trace>(local);
  const auto options = local.options().dtype(at::kLong);
  const auto on_diagonal = own_rows(*spec(self), 0, options)
                               .unsqueeze(1)
                               .eq(own_rows(*spec(self), 1, options));
  const auto diagonal =
      at::where(on_diagonal, local, at::zeros({}, local.options()));
  // Autocast, which asks for no other dtype of it, has one for sums.
  const auto dtype = self.scalar_type();
  return at::sum(
      wrap(diagonal, spec(self)),
      at::isIntegralType(dtype, /*includeBool=*/true) ? at::kLong : dtype);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("bincount", bincount_kernel);
  m.impl("histc", histc_kernel);
  m.impl("trace", trace_kernel);
}

} // namespace shardtensor::detail
