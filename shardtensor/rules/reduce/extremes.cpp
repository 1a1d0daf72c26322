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
#include <torch/library.h>

#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/terms.h"

// argmax and argmin: every rank's best element, then the best of those.

namespace shardtensor {
namespace {

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
  m.impl("argmax", argmax_kernel);
  m.impl("argmin", argmin_kernel);
  m.impl("aminmax", aminmax_kernel);
}

} // namespace shardtensor
