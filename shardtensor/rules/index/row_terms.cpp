#include "shardtensor/rules/index/row_terms.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/plans/layout_memory.h"
#include "shardtensor/rules/index/row_exchange.h"
#include "shardtensor/rules/index/rows.h"
#include "shardtensor/tensor/terms.h"

namespace shardtensor::detail {
namespace {

// ---- layouts ----------------------------------------------------------------

constexpr int64_t kLargeRows = 1 << 16; // elements

/// How rows of an extent lie that an index of a layout has met last.
LayoutMemory& row_layouts() {
  static LayoutMemory layouts;
  return layouts;
}

PlanKey row_layout_key(const SpecPtr& index, int64_t extent) {
  PlanKey key;
  key.add(index).add(extent);
  return key;
}

bool is_new(const at::Tensor& self) {
  const auto* seen = constant_view_of(self);
  return seen != nullptr && !seen->view;
}

/// How rows of `extent` are cut for this index, as a layout of one dim; null:
/// not at all.
SpecPtr rows_for(const SpecPtr& index, int64_t extent, bool is_large) {
  if (auto found =
          row_layouts().find(index->mesh(), row_layout_key(index, extent))) {
    return found;
  }
  const auto axes = index->axes(0);
  if (!is_large || axes.empty()) {
    return nullptr;
  }
  const auto pieces = index->partition(0).pieces();
  return layout_of_rows(
      index->mesh(), axes, Partition::chunked(extent, pieces));
}

/// See Note [Rows that are made]. Other dims are cut as the source's.
SpecPtr layout_of_new(const at::Tensor& self, const RowReduction& call) {
  const auto& index = spec(call.index);
  const auto dim = call.dim;
  const auto rows = rows_for(index, self.size(dim), self.numel() > kLargeRows);
  if (!rows) {
    return spec(self);
  }
  const auto cuts_no_row = [&](const std::vector<int64_t>& axes) {
    return std::ranges::none_of(
        axes, [&](int64_t axis) { return rows->placement(axis).is_shard(); });
  };
  auto placements = spec(self)->placements();
  ShardSpec::Partitions partitions(self.dim());
  partitions[dim] = rows->partition(0);
  for (int64_t axis = 0; axis < rows->mesh()->axes(); ++axis) {
    if (rows->placement(axis).is_shard()) {
      placements[axis] = Placement::shard(dim);
      continue;
    }
    if (!is_shard_tensor(call.source)) {
      continue;
    }
    const auto& source = spec(call.source);
    const auto cut = source->placement(axis);
    const auto shift = index->dim() - 1;
    const auto other = cut.dim > dim ? cut.dim - shift : cut.dim;
    if (cut.is_shard() && (cut.dim < dim || cut.dim > dim + shift) &&
        source->size(cut.dim) == self.size(other)) {
      placements[axis] = Placement::shard(other);
      if (cuts_no_row(source->axes(cut.dim))) {
        partitions[other] = source->partition(cut.dim);
      }
    }
  }
  return make_spec(
      rows->mesh(), self.sizes().vec(), placements, std::move(partitions));
}

SpecPtr layout_for(const at::Tensor& self, const RowReduction& call) {
  return is_new(self) ? layout_of_new(self, call) : without_partial(spec(self));
}

// ---- rows that every rank has -----------------------------------------------

/// The source's layout beside rows laid out as `rows`, the index cut as it is;
/// null where an axis that cuts the index cuts the rows, too.
SpecPtr source_beside(const SpecPtr& rows, const SpecPtr& index, int64_t dim) {
  auto placements = rows->placements();
  auto sizes = rows->sizes();
  auto partitions = rows->partitions();
  for (const auto axis : index->axes(0)) {
    if (!placements[axis].is_replicate()) {
      return nullptr;
    }
    placements[axis] = Placement::shard(dim);
  }
  sizes[dim] = index->size(0);
  partitions[dim] = index->partition(0);
  return make_spec(
      rows->mesh(), std::move(sizes), placements, std::move(partitions));
}

at::Tensor merged(
    const at::Tensor& rows,
    const SpecPtr& layout,
    const std::vector<int64_t>& axes,
    const std::string& reduce) {
  if (reduce == "sum") {
    return all_reduce(rows, Reduce::Sum, *layout->mesh(), axes);
  }
  // PyTorch's own, which knows what to do with NaN.
  return merge_terms(rows, layout, axes, [&](const at::Tensor& stacked) {
    return reduce == "prod" ? stacked.prod(0)
        : reduce == "amax"  ? stacked.amax(0)
                            : stacked.amin(0);
  });
}

/// Each rank's part of the source, and the merge of all ranks'.
std::optional<RowTerms> terms_of_all(
    const SpecPtr& layout,
    const RowReduction& call) {
  const auto& index = call.index;
  const auto cut = without_partial(spec(index));
  if (layout->is_sharded(call.dim) || layout->has_partial() ||
      cut->dim() != 1 || !cut->is_sharded() || cut->mesh() != layout->mesh() ||
      is_traced(impl_of(index)->local())) {
    return {};
  }
  const auto beside = source_beside(layout, cut, call.dim);
  if (!beside) {
    return {};
  }
  const auto extent = layout->size(call.dim);
  check_index(call.op, index, call.dim, extent, call.may_be_negative);
  const CommScope scope(call.op);
  const auto rows = nonnegative_rows(local_of(index, cut).tensor, extent);
  const auto axes = cut->axes(0);
  RowTerms terms{layout, {}, {}};
  if (call.source.defined()) {
    const auto source = local_of(call.source, beside).tensor;
    const auto own = at::full(
        layout->local_sizes(),
        neutral_of(call.reduce, source.scalar_type()),
        source.options());
    reduce_into(own, call.dim, rows, source, call.reduce);
    terms.rows = merged(own, layout, axes, call.reduce);
  }
  if (call.counts) {
    const auto counts = at::zeros({extent}, rows.options());
    counts.index_add_(0, rows, at::ones_like(rows));
    terms.counts = all_reduce(counts, Reduce::Sum, *layout->mesh(), axes);
  }
  return terms;
}

} // namespace

std::optional<RowTerms> row_terms(
    const at::Tensor& self,
    const RowReduction& call) {
  if (self.dim() == 0 || spec(call.index)->mesh() != spec(self)->mesh() ||
      spec(call.index)->dim() == 0) {
    return {};
  }
  const auto layout = layout_for(self, call);
  const auto exchange =
      row_exchange(call.op, call.index, layout, call.dim, call.may_be_negative);
  if (!exchange) {
    return terms_of_all(layout, call);
  }
  const CommScope scope(call.op);
  RowTerms terms{layout, {}, call.counts ? exchange->counts() : at::Tensor()};
  if (call.source.defined()) {
    const auto source =
        local_of(call.source, rows_spec(*exchange, layout, call.dim)).tensor;
    terms.rows = reduce_rows_by_index(*exchange, source, call.dim, call.reduce);
  }
  return terms;
}

void note_row_layout(const SpecPtr& index, const SpecPtr& rows) {
  row_layouts().note(index->mesh(), row_layout_key(index, rows->size(0)), rows);
}

SpecPtr layout_of_put_rows(
    const at::Tensor& self,
    const at::Tensor& index,
    int64_t dim,
    const at::Tensor& values) {
  const auto is_beside = [&](const at::Tensor& x) {
    return is_shard_tensor(x) && spec(x)->mesh() == spec(self)->mesh();
  };
  if (!is_new(self) || !is_beside(index) || index.dim() == 0 ||
      !spec(index)->is_sharded(0)) {
    return nullptr;
  }
  const bool has_rows =
      is_beside(values) && values.dim() == self.dim() + index.dim() - 1;
  const auto layout = layout_of_new(
      self, {"", index, has_rows ? values : at::Tensor(), dim, /*reduce=*/""});
  return layout->is_sharded(dim) ? layout : nullptr;
}

namespace {

LayoutMemory& read_layouts() {
  static LayoutMemory layouts;
  return layouts;
}

PlanKey read_layout_key(
    at::IntArrayRef sizes,
    const std::vector<int64_t>& named_dims,
    const SpecPtr& rows) {
  PlanKey key;
  key.add(sizes).add(named_dims).add(rows);
  return key;
}

} // namespace

void note_read_layout(
    const at::Tensor& x,
    const Indices& given,
    const at::Tensor& result) {
  if (!x.requires_grad()) {
    return;
  }
  const auto named = named_by_rows(x, given);
  if (!named || std::ranges::any_of(named->indices, is_cut)) {
    return;
  }
  const auto own = without_partial(spec(x));
  const auto rows = without_partial(spec(result));
  const auto key = read_layout_key(x.sizes(), named->dims, rows);
  // What is whole is not noted, but where it would be taken for what is cut.
  if (!axes_of_dims(*own, named->dims).empty() ||
      read_layouts().find(own->mesh(), key)) {
    read_layouts().note(own->mesh(), key, own);
  }
}

SpecPtr find_read_layout(
    const at::Tensor& self,
    const std::vector<int64_t>& named_dims,
    const at::Tensor& values) {
  if (!is_new(self) || !is_shard_tensor(values) ||
      spec(values)->mesh() != spec(self)->mesh()) {
    return nullptr;
  }
  const auto rows = without_partial(spec(values));
  return read_layouts().find(
      rows->mesh(), read_layout_key(self.sizes(), named_dims, rows));
}

void begin_row_write(const at::Tensor& self, const SpecPtr& layout) {
  if (constant_view_of(self)) {
    begin_write(*impl_of(self), is_new(self) ? layout : nullptr);
  }
}

} // namespace shardtensor::detail
