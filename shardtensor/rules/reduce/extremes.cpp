#include <limits>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/argmax_ops.h>
#include <ATen/ops/argmin.h>
#include <ATen/ops/argmin_ops.h>
#include <ATen/ops/full.h>
#include <ATen/ops/max.h>
#include <ATen/ops/max_ops.h>
#include <ATen/ops/min.h>
#include <ATen/ops/take.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "shardtensor/layout/global_rows.h"
#include "shardtensor/rules/reduce/reduction_table.h"
#include "shardtensor/tensor/shard_tensor.h"

// The largest and smallest elements, and where they are: every rank's best
// one, then the best of those.

namespace shardtensor::detail {
namespace {

// ---- values -----------------------------------------------------------------

at::Scalar lowest(at::ScalarType dtype) {
  if (at::isFloatingType(dtype)) {
    return -std::numeric_limits<double>::infinity();
  }
  switch (dtype) {
    case at::kBool:
      return false;
    case at::kByte:
      return 0;
    case at::kChar:
      return std::numeric_limits<int8_t>::min();
    case at::kShort:
      return std::numeric_limits<int16_t>::min();
    case at::kInt:
      return std::numeric_limits<int32_t>::min();
    default:
      return std::numeric_limits<int64_t>::min();
  }
}

at::Scalar highest(at::ScalarType dtype) {
  if (at::isFloatingType(dtype)) {
    return std::numeric_limits<double>::infinity();
  }
  switch (dtype) {
    case at::kBool:
      return true;
    case at::kByte:
      return std::numeric_limits<uint8_t>::max();
    case at::kChar:
      return std::numeric_limits<int8_t>::max();
    case at::kShort:
      return std::numeric_limits<int16_t>::max();
    case at::kInt:
      return std::numeric_limits<int32_t>::max();
    default:
      return std::numeric_limits<int64_t>::max();
  }
}

struct Largest : ReductionKind {
  static std::optional<at::Scalar> neutral(at::ScalarType dtype) {
    return lowest(dtype);
  }
};
struct Smallest : ReductionKind {
  static std::optional<at::Scalar> neutral(at::ScalarType dtype) {
    return highest(dtype);
  }
};

std::tuple<at::Tensor, at::Tensor> aminmax_kernel(
    const at::Tensor& self,
    std::optional<int64_t> dim,
    bool keepdim) {
  const auto dims = dim ? std::vector<int64_t>{*dim} : std::vector<int64_t>();
  return {at::amin(self, dims, keepdim), at::amax(self, dims, keepdim)};
}

// ---- where they are ---------------------------------------------------------

using ValuesIndices = std::tuple<at::Tensor, at::Tensor>;

constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();

/// What a rank without rows says: it loses against any element.
ValuesIndices no_candidate(const Reduction& reduction, bool largest) {
  const auto dtype = reduction.local.scalar_type();
  return {
      reduction.neutral(largest ? lowest(dtype) : highest(dtype), dtype),
      reduction.neutral(kNowhere, at::kLong)};
}

/// The best of stacked values and indices: the first index among equals, in
/// global order; NaN is best of all, as in PyTorch.
Terms best_of(const Terms& stacked, bool largest) {
  const auto& values = stacked[0];
  const auto& indices = stacked[1];
  const auto best =
      largest ? at::amax(values, {0}, true) : at::amin(values, {0}, true);
  const auto is_best = values.eq(best).logical_or(values.ne(values));
  const auto nowhere = at::full({}, kNowhere, indices.options());
  return {
      best.squeeze(0),
      at::amin(at::where(is_best, indices, nowhere), {0}, false)};
}

/// The best of the ranks' candidates.
ValuesIndices best_of_ranks(
    const Reduction& reduction,
    const ValuesIndices& candidate,
    bool largest) {
  if (reduction.axes.empty()) {
    return candidate;
  }
  const auto best = reduction.merged(
      {std::get<0>(candidate), std::get<1>(candidate)},
      [&](const Terms& stacked) { return best_of(stacked, largest); });
  return {best[0], best[1]};
}

/// This rank's best rows of one dim, and where these are in the tensor.
ValuesIndices best_along(
    const Reduction& reduction,
    int64_t dim,
    bool keepdim,
    bool largest) {
  auto [values, rows] = largest ? at::max(reduction.local, dim, keepdim)
                                : at::min(reduction.local, dim, keepdim);
  if (!reduction.axes.empty()) {
    const auto& spec = *reduction.spec;
    rows = global_rows(rows, spec, dim, spec.mesh()->position());
  }
  return {values, rows};
}

/// This rank's best element, and where it is in the flattened tensor.
ValuesIndices best_of_all(const Reduction& reduction, bool largest) {
  const auto& spec = *reduction.spec;
  const auto& sizes = reduction.result->local_sizes();
  const auto index =
      largest ? at::argmax(reduction.local) : at::argmin(reduction.local);
  return {
      at::take(reduction.local, index).view(sizes),
      flat_indices(index, spec, spec.mesh()->position()).view(sizes)};
}

ValuesIndices extreme_along(
    const char* op,
    const at::Tensor& self,
    int64_t dim,
    bool keepdim,
    bool largest) {
  const Reduction reduction(op, self, at::IntArrayRef(&dim, 1), keepdim);
  check_empty_takes_dtype<at::_ops::max_dim>(reduction.local, dim, keepdim);
  const auto along = at::maybe_wrap_dim(dim, self.dim());
  TORCH_CHECK_INDEX(
      self.dim() == 0 || self.size(along) > 0,
      op,
      ": expected dim ",
      along,
      " to have at least one element, got sizes ",
      self.sizes());
  const auto [values, rows] = best_of_ranks(
      reduction,
      reduction.has_rows() ? best_along(reduction, along, keepdim, largest)
                           : no_candidate(reduction, largest),
      largest);
  return {wrap(values, reduction.result), wrap(rows, reduction.result)};
}

at::Tensor extreme_index(
    const char* op,
    const at::Tensor& self,
    std::optional<int64_t> dim,
    bool keepdim,
    bool largest) {
  const auto local = impl_of(self)->local();
  largest ? check_takes_dtype<at::_ops::argmax>(local, std::nullopt, false)
          : check_takes_dtype<at::_ops::argmin>(local, std::nullopt, false);
  if (dim) {
    return std::get<1>(
        largest ? at::max(self, *dim, keepdim) : at::min(self, *dim, keepdim));
  }
  TORCH_CHECK_INDEX(
      self.numel() > 0, op, ": expected at least one element, got none");
  const Reduction reduction(op, self, {}, keepdim);
  const auto [value, index] = best_of_ranks(
      reduction,
      reduction.has_rows() ? best_of_all(reduction, largest)
                           : no_candidate(reduction, largest),
      largest);
  return wrap(index, reduction.result);
}

ValuesIndices max_dim_kernel(
    const at::Tensor& self,
    int64_t dim,
    bool keepdim) {
  return extreme_along("max", self, dim, keepdim, true);
}

ValuesIndices min_dim_kernel(
    const at::Tensor& self,
    int64_t dim,
    bool keepdim) {
  return extreme_along("min", self, dim, keepdim, false);
}

at::Tensor argmax_kernel(
    const at::Tensor& self,
    std::optional<int64_t> dim,
    bool keepdim) {
  return extreme_index("argmax", self, dim, keepdim, true);
}

at::Tensor argmin_kernel(
    const at::Tensor& self,
    std::optional<int64_t> dim,
    bool keepdim) {
  return extreme_index("argmin", self, dim, keepdim, false);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  reduction<at::_ops::amax, Largest>(m);
  reduction<at::_ops::amin, Smallest>(m);
  reduction<at::_ops::max, Largest>(m);
  reduction<at::_ops::min, Smallest>(m);
  m.impl("max.dim", max_dim_kernel);
  m.impl("min.dim", min_dim_kernel);
  m.impl("argmax", argmax_kernel);
  m.impl("argmin", argmin_kernel);
  m.impl("aminmax", aminmax_kernel);
}

} // namespace shardtensor::detail
