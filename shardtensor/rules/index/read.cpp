#include <ATen/ops/_unsafe_masked_index_native.h>
#include <ATen/ops/index.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/traced_messages.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/rules/index/masks.h"
#include "shardtensor/rules/index/memory_order.h"
#include "shardtensor/rules/index/row_exchange.h"
#include "shardtensor/rules/index/row_terms.h"
#include "shardtensor/rules/index/rows.h"
#include "shardtensor/rules/index/rules.h"
#include "shardtensor/tensor/redistribute.h"

// x[...] with tensors along sharded dims.

namespace shardtensor::detail {
namespace {

/// The mask of the index's dims beside the other dims of a result.
at::Tensor beside(const at::Tensor& mask, const Index& index, int64_t dims) {
  auto sizes = mask.sizes().vec();
  const auto after = dims - index.position - mask.dim();
  sizes.insert(sizes.end(), after, 1);
  return mask.reshape(sizes);
}

/// Every rank takes the rows that it has; their sum is the result.
at::Tensor partial_index(
    const at::Tensor& local,
    const SpecPtr& spec,
    const Index& index) {
  const auto own = own_index(spec, index);
  const auto result = result_spec(spec, index, Placement::partial());
  for (const auto& [dim, rows] : index.dims) {
    if (local.size(dim) == 0) {
      const auto none = at::zeros(result->local_sizes(), local.options());
      return wrap(needing(needing(none, own.mask), local), result);
    }
  }
  const auto rows = at::index(local, own.index.list(local.dim()));
  const auto mask = beside(own.mask, index, rows.dim());
  return wrap(rows.masked_fill(mask.logical_not(), 0), result);
}

at::Tensor read_by_index(const at::Tensor& self, const Indices& given) {
  const auto [local, own] = local_of(self);
  if (const auto place = only_mask(given)) {
    const std::optional<at::Tensor> mask = given.get(*place);
    if (keeps_rows(own, *place, *mask)) {
      const auto rows = masked_rows(own, *place, *mask);
      return wrap(at::index(local, rows.index), rows.result);
    }
  }
  if (const auto dim = only_rows(given)) {
    const std::optional<at::Tensor> index = given.get(*dim);
    if (const auto exchange =
            row_exchange("aten::index", *index, own, *dim, true)) {
      return read_rows(*exchange, local, own, *dim);
    }
  }
  if (indexes_whole_dims(own, given)) {
    check_indices("aten::index", self, given);
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::index", "Tensor");
    torch::jit::Stack stack{self, given};
    run_rule(op, index_rule, &stack);
    return stack.back().toTensor();
  }
  const auto index = read_indices(self, given);
  const auto indexed = index.indexed();
  const auto result = result_spec(own, index);
  if (axes_of_dims(*own, indexed).empty()) {
    return wrap(at::index(local, index.list(self.dim())), result);
  }
  if (result->numel() < own->numel() && self.scalar_type() != at::kBool) {
    const auto contiguous = contiguous_dims(own, indexed);
    return partial_index(
        redistribute_local(local, own, contiguous), contiguous, index);
  }
  const auto wanted = whole_dims(own, indexed);
  note_fallback("aten::index", own, wanted);
  return wrap(
      at::index(redistribute_local(local, own, wanted), index.list(self.dim())),
      result_spec(wanted, index));
}

at::Tensor index_kernel(const at::Tensor& self_or_plain, const Indices& given) {
  const auto self = is_shard_tensor(self_or_plain) ? self_or_plain : [&] {
    for (const std::optional<at::Tensor> index : given) {
      if (index && is_shard_tensor(*index)) {
        return promote(self_or_plain, spec(*index)->mesh());
      }
    }
    TORCH_INTERNAL_ASSERT(false, "index without a ShardTensor");
  }();
  if (const auto indices = without_scalar_mask(given)) {
    return index_kernel(self.unsqueeze(0), *indices);
  }
  const auto result = read_by_index(self, given);
  note_read_layout(self, given, result);
  const auto strides = indexed_strides(self, given, result.sizes().vec());
  return strides.empty()
      ? result
      : wrap(impl_of(result)->local(), spec(result), strides);
}

/// Ranks that cut the first dim alone find their rows in order. A result is
/// column-major, as PyTorch's.
at::Tensor nonzero_kernel(const at::Tensor& self) {
  const auto [local, own] = local_of(self);
  const auto dims = own->sharded_dims();
  if (dims != std::vector<int64_t>{0} || !own->is_contiguous()) {
    if (!dims.empty()) {
      note_fallback("aten::nonzero", own, replicated(own));
    }
    const auto rows =
        at::nonzero(redistribute_local(local, own, replicated(own)));
    const std::vector<int64_t> strides{1, rows.size(0)};
    return wrap(
        rows, make_replicated(own->mesh(), rows.sizes().vec()), strides);
  }
  auto rows = at::nonzero(local);
  rows.select(1, 0).add_(own->interval(0).begin);
  const auto partition = count_pieces(own, 0, rows.size(0), local.device());
  const std::vector<int64_t> strides{1, partition.extent()};
  return wrap(
      rows,
      make_spec(
          own->mesh(),
          {partition.extent(), rows.size(1)},
          own->placements(),
          {partition, std::nullopt}),
      strides);
}

at::Tensor take_kernel(const at::Tensor& self, const at::Tensor& index) {
  TORCH_CHECK_INDEX(
      index.scalar_type() == at::kLong,
      "take(): Expected a long tensor for index, but got ",
      index.scalar_type());
  TORCH_CHECK_INDEX(
      self.numel() > 0 || index.numel() == 0,
      "take(): tried to take from an empty tensor");
  Indices indices;
  indices.push_back(index);
  return at::index(self.reshape({-1}), indices);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("index.Tensor", index_kernel);
  m.impl("_unsafe_index.Tensor", index_kernel);
  m.impl("_unsafe_masked_index", at::native::_unsafe_masked_index);
  m.impl("take", take_kernel);
  m.impl("nonzero", nonzero_kernel);
}

} // namespace shardtensor::detail
