#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/argmin.h>
#include <ATen/ops/full.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/rules/reduce/reduction.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/terms.h"

// The largest and smallest elements, and where they are: every rank's best
// one, then the best of those.

namespace shardtensor {
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

at::Tensor amax_kernel(
    const at::Tensor& self,
    at::IntArrayRef dim,
    bool keepdim) {
  const Reduction reduction("amax", self, dim, keepdim);
  const auto term = reduction.has_rows()
      ? at::amax(reduction.local, reduction.dims, keepdim)
      : reduction.neutral(lowest(self.scalar_type()), self.scalar_type());
  return wrap(at::amax(reduction.gathered(term), {0}, false), reduction.result);
}

at::Tensor amin_kernel(
    const at::Tensor& self,
    at::IntArrayRef dim,
    bool keepdim) {
  const Reduction reduction("amin", self, dim, keepdim);
  const auto term = reduction.has_rows()
      ? at::amin(reduction.local, reduction.dims, keepdim)
      : reduction.neutral(highest(self.scalar_type()), self.scalar_type());
  return wrap(at::amin(reduction.gathered(term), {0}, false), reduction.result);
}

at::Tensor max_kernel(const at::Tensor& self) {
  TORCH_CHECK(self.numel() > 0, "max: expected at least one element, got none");
  return amax_kernel(self, {}, false);
}

at::Tensor min_kernel(const at::Tensor& self) {
  TORCH_CHECK(self.numel() > 0, "min: expected at least one element, got none");
  return amin_kernel(self, {}, false);
}

// ---- extreme values with their indices --------------------------------------

using ValuesIndices = std::tuple<at::Tensor, at::Tensor>;

/// The best of the ranks' candidates: the first index among equals, in global
/// order; NaN is best of all, as in PyTorch.
ValuesIndices first_best(
    const at::Tensor& values,
    const at::Tensor& indices,
    bool largest) {
  const auto best =
      largest ? at::amax(values, {0}, true) : at::amin(values, {0}, true);
  const auto is_best = values.eq(best).logical_or(values.ne(values));
  const auto none =
      at::full({}, std::numeric_limits<int64_t>::max(), indices.options());
  return {
      best.squeeze(0), at::amin(at::where(is_best, indices, none), {0}, false)};
}

ValuesIndices extreme_along(
    const char* op,
    const at::Tensor& self,
    int64_t dim,
    bool keepdim,
    bool largest) {
  const Reduction reduction(op, self, at::IntArrayRef(&dim, 1), keepdim);
  if (self.dim() == 0) {
    return largest
        ? ValuesIndices{
              wrap(reduction.local.clone(), reduction.result),
              wrap(
                  at::zeros({}, reduction.local.options().dtype(at::kLong)),
                  reduction.result)}
        : extreme_along(op, self, dim, keepdim, true);
  }
  const auto along = reduction.dims[0];
  TORCH_CHECK_INDEX(
      self.size(along) > 0,
      op,
      ": expected dim ",
      along,
      " to have at least one element, got sizes ",
      self.sizes());
  const auto dtype = self.scalar_type();
  at::Tensor values;
  at::Tensor indices;
  if (reduction.has_rows()) {
    std::tie(values, indices) = largest
        ? at::max(reduction.local, along, keepdim)
        : at::min(reduction.local, along, keepdim);
    indices = indices + reduction.spec->interval(along).begin;
  } else {
    values = reduction.neutral(largest ? lowest(dtype) : highest(dtype), dtype);
    indices = reduction.neutral(std::numeric_limits<int64_t>::max(), at::kLong);
  }
  if (!reduction.axes.empty()) {
    std::tie(values, indices) = first_best(
        reduction.gathered(values), reduction.gathered(indices), largest);
  }
  return {wrap(values, reduction.result), wrap(indices, reduction.result)};
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

// ---- indices only -----------------------------------------------------------

/// The row-major index in the whole tensor of element `flat` of this rank's.
int64_t global_index(const ShardSpec& spec, int64_t flat) {
  int64_t result = 0;
  int64_t stride = 1;
  for (int64_t dim = spec.dim() - 1; dim >= 0; --dim) {
    const auto size = spec.local_sizes()[dim];
    auto row = flat % size;
    flat /= size;
    if (spec.is_sharded(dim)) {
      const auto own = spec.interval(dim);
      row = row / own.extent() * spec.partition(dim).period() + own.begin +
          row % own.extent();
    }
    result += row * stride;
    stride *= spec.size(dim);
  }
  return result;
}

/// The first of the best elements of all ranks.
at::Tensor extreme_of_all(
    const char* op,
    const at::Tensor& self,
    bool keepdim,
    bool largest) {
  TORCH_CHECK_INDEX(
      self.numel() > 0, op, ": expected at least one element, got none");
  const auto& own = spec(self);
  const auto whole = without_partial(own);
  const auto local = redistribute_local(impl_of(self)->local(), own, whole);
  const auto result = make_replicated(whole->mesh(), {});
  const auto axes = whole->sharded_axes();
  const auto none = std::numeric_limits<int64_t>::max();
  auto best = at::full({}, none, local.options().dtype(at::kLong));
  auto value = at::full({}, 0, local.options());
  if (local.numel() > 0) {
    best = largest ? at::argmax(local) : at::argmin(local);
    value = local.flatten().select(0, best.item<int64_t>());
    best.fill_(global_index(*whole, best.item<int64_t>()));
  }
  const auto values = gather_terms(value, result, axes);
  const auto indices = gather_terms(best, result, axes);
  const auto counts = indices.ne(none);
  const auto valid = values.masked_select(counts);
  const auto extreme = valid.isnan().any().item<bool>()
      ? valid.masked_select(valid.isnan()).select(0, 0)
      : largest ? at::amax(valid, {0}, false)
                : at::amin(valid, {0}, false);
  const auto is_best =
      values.eq(extreme).logical_or(values.isnan()).logical_and(counts);
  const auto first = at::amin(
      at::where(is_best, indices, at::full({}, none, indices.options())),
      {0},
      false);
  const auto sizes =
      keepdim ? std::vector<int64_t>(self.dim(), 1) : std::vector<int64_t>();
  return wrap(first.reshape(sizes), make_replicated(whole->mesh(), sizes));
}

at::Tensor extreme_index(
    const char* op,
    const at::Tensor& self,
    std::optional<int64_t> dim,
    bool keepdim,
    bool largest) {
  if (!dim) {
    return extreme_of_all(op, self, keepdim, largest);
  }
  return std::get<1>(
      largest ? at::max(self, *dim, keepdim) : at::min(self, *dim, keepdim));
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

std::tuple<at::Tensor, at::Tensor> aminmax_kernel(
    const at::Tensor& self,
    std::optional<int64_t> dim,
    bool keepdim) {
  const auto dims = dim ? std::vector<int64_t>{*dim} : std::vector<int64_t>();
  return {at::amin(self, dims, keepdim), at::amax(self, dims, keepdim)};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("amax", amax_kernel);
  m.impl("amin", amin_kernel);
  m.impl("max", max_kernel);
  m.impl("min", min_kernel);
  m.impl("max.dim", max_dim_kernel);
  m.impl("min.dim", min_dim_kernel);
  m.impl("argmax", argmax_kernel);
  m.impl("argmin", argmin_kernel);
  m.impl("aminmax", aminmax_kernel);
}

} // namespace shardtensor
