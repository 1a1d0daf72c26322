#include "shardtensor/rules/index/rows.h"

#include <algorithm>

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/TensorAdvancedIndexingUtils.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/all.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>

#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/plans/view_plan.h"

namespace shardtensor::detail {
namespace {

/// The whole tensor, plain, on this rank.
at::Tensor whole(const at::Tensor& tensor) {
  return is_shard_tensor(tensor)
      ? local_of(tensor, replicated(spec(tensor))).tensor
      : tensor;
}

void check_rows(const at::Tensor& rows, int64_t dim, int64_t size) {
  if (rows.numel() == 0) {
    return;
  }
  if (is_traced(rows) || !rows.is_cpu()) { // a device is not waited for
    const auto text =
        c10::str("an index is out of bounds for dim ", dim, " of size ", size);
    at::_assert_async(rows.ge(-size).logical_and_(rows.lt(size)).all(), text);
    return;
  }
  const auto low = rows.min().item<int64_t>();
  const auto high = rows.max().item<int64_t>();
  TORCH_CHECK_INDEX(
      low >= -size && high < size,
      "index ",
      low < -size ? low : high,
      " is out of bounds for dim ",
      dim,
      " of size ",
      size);
}

} // namespace

void warn_of_bytes(const at::Tensor& index) {
  if (index.scalar_type() == at::kByte) {
    TORCH_WARN(
        "indexing with dtype torch.uint8 is now deprecated, please use a dtype "
        "torch.bool instead.");
  }
}

namespace {

/// What an argument of an index gives, whole on every rank.
at::Tensor whole_index(const at::Tensor& index) {
  TORCH_CHECK_INDEX(
      is_mask(index) || is_row_index(index),
      "tensors used as indices must be long, int, byte or bool tensors, got ",
      index.scalar_type());
  warn_of_bytes(index);
  if (is_mask(index) && is_shard_tensor(index) && spec(index)->is_sharded()) {
    note_fallback("aten::index", spec(index), replicated(spec(index)));
  }
  return whole(index);
}

void check_mask(const at::Tensor& mask, const at::Tensor& self, int64_t dim) {
  for (int64_t k = 0; k < mask.dim(); ++k) {
    TORCH_CHECK_INDEX(
        dim + k < self.dim() && mask.size(k) == self.size(dim + k),
        "the mask of sizes ",
        mask.sizes(),
        " does not match the indexed tensor of sizes ",
        self.sizes(),
        " at dim ",
        dim);
  }
}

/// The rows of each indexed dim as they are told; a mask says those of several.
std::vector<DimIndex> told_rows(
    const at::Tensor& self,
    const Indices& indices) {
  std::vector<DimIndex> dims;
  for (const auto& given : given_indices(indices)) {
    TORCH_CHECK_INDEX(
        given.dim < self.dim(),
        "too many indices for a tensor of sizes ",
        self.sizes());
    const auto plain = whole_index(given.index);
    if (!is_mask(plain)) {
      dims.push_back({given.dim, plain.to(at::kLong)});
      continue;
    }
    check_mask(plain, self, given.dim);
    const auto rows = plain.nonzero();
    for (int64_t k = 0; k < given.dims; ++k) {
      dims.push_back({given.dim + k, rows.select(1, k)});
    }
  }
  return dims;
}

/// Counted from the front, where self is, in sizes that all indices share.
at::Tensor counted_rows(
    const DimIndex& index,
    const at::Tensor& self,
    at::IntArrayRef sizes) {
  const auto extent = self.size(index.dim);
  check_rows(index.rows, index.dim, extent);
  // As in PyTorch, indices may lie on the host.
  return nonnegative_rows(index.rows.to(self.device()), extent).expand(sizes);
}

} // namespace

bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

bool is_row_index(const at::Tensor& index) {
  return index.scalar_type() == at::kLong || index.scalar_type() == at::kInt;
}

c10::SmallVector<GivenIndex, 4> given_indices(const Indices& indices) {
  c10::SmallVector<GivenIndex, 4> given;
  int64_t dim = 0;
  for (const std::optional<at::Tensor> index : indices) {
    int64_t dims = 1;
    if (index && index->defined()) {
      dims = is_mask(*index) ? index->dim() : 1;
      given.push_back({*index, dim, dims});
    }
    dim += dims;
  }
  return given;
}

int64_t index_position(at::IntArrayRef named) {
  const bool is_apart = named.empty() ||
      named.back() - named.front() + 1 != static_cast<int64_t>(named.size());
  return is_apart ? 0 : named.front();
}

bool is_cut(const at::Tensor& index) {
  return is_shard_tensor(index) && spec(index)->is_sharded();
}

std::vector<int64_t> shared_sizes(at::TensorList indices) {
  std::vector<int64_t> sizes;
  for (const auto& index : indices) {
    TORCH_CHECK_INDEX(
        at::are_expandable(sizes, index.sizes()),
        "shape mismatch: indexing tensors could not be broadcast together with "
        "shapes ",
        at::native::shapes_as_str(indices));
    sizes = at::infer_size(sizes, index.sizes());
  }
  return sizes;
}

void check_values_fit(at::IntArrayRef values, at::IntArrayRef result) {
  TORCH_CHECK(
      at::is_expandable_to(values, result),
      "shape mismatch: value tensor of shape ",
      values,
      " cannot be broadcast to indexing result of shape ",
      result);
}

std::optional<NamedDims> named_by_rows(
    const at::Tensor& self,
    const Indices& indices) {
  NamedDims named;
  for (const auto& given : given_indices(indices)) {
    if (given.dim >= self.dim() || !is_row_index(given.index)) {
      return {};
    }
    named.dims.push_back(given.dim);
    named.indices.push_back(given.index);
  }
  return named.dims.empty() ? std::nullopt : std::optional(std::move(named));
}

Index read_indices(const at::Tensor& self, const Indices& indices) {
  Index result;
  result.dims = told_rows(self, indices);
  std::vector<at::Tensor> told;
  for (const auto& index : result.dims) {
    told.push_back(index.rows);
  }
  result.sizes = shared_sizes(told);
  for (auto& index : result.dims) {
    index.rows = counted_rows(index, self, result.sizes);
  }
  result.position = index_position(result.indexed());
  return result;
}

SpecPtr result_spec(
    const SpecPtr& self,
    const Index& index,
    Placement on_indexed) {
  std::vector<int64_t> sizes;
  std::vector<int64_t> from;
  for (int64_t dim = 0; dim < self->dim(); ++dim) {
    if (!index.has(dim)) {
      sizes.push_back(self->size(dim));
      from.push_back(dim);
    }
  }
  sizes.insert(
      sizes.begin() + index.position, index.sizes.begin(), index.sizes.end());
  from.insert(from.begin() + index.position, index.sizes.size(), -1);
  return with_dims(self, std::move(sizes), from, on_indexed);
}

SpecPtr with_dims_of(
    const SpecPtr& spec,
    const std::vector<int64_t>& dropped,
    int64_t position,
    const SpecPtr& inserted) {
  std::vector<int64_t> from;
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    if (std::ranges::find(dropped, dim) == dropped.end()) {
      from.push_back(dim);
      sizes.push_back(spec->size(dim));
    }
  }
  from.insert(from.begin() + position, inserted->dim(), -1);
  sizes.insert(
      sizes.begin() + position,
      inserted->sizes().begin(),
      inserted->sizes().end());
  const auto kept = with_dims(spec, sizes, from);
  auto placements = kept->placements();
  auto partitions = kept->partitions();
  for (const auto axis : inserted->sharded_axes()) {
    const auto dim = inserted->placement(axis).dim;
    placements[axis] = Placement::shard(position + dim);
    partitions[position + dim] = inserted->partition(dim);
  }
  return make_spec(spec->mesh(), sizes, placements, partitions);
}

SpecPtr layout_of_rows(
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes,
    const Partition& partition) {
  std::vector<Placement> placements(mesh->axes());
  for (const auto axis : axes) {
    placements[axis] = Placement::shard(0);
  }
  return make_spec(mesh, {partition.extent()}, placements, {partition});
}

SpecPtr layout_of_dim(const SpecPtr& spec, int64_t dim) {
  return layout_of_rows(spec->mesh(), spec->axes(dim), spec->partition(dim));
}

at::Tensor nonnegative_rows(const at::Tensor& index, int64_t extent) {
  const auto rows = index.to(at::kLong);
  return at::where(rows.lt(0), rows + extent, rows);
}

OwnIndex own_index(const SpecPtr& spec, const Index& index) {
  OwnIndex own{{}, index};
  const auto device = index.dims.front().rows.options();
  own.mask = at::ones(index.sizes, device.dtype(at::kBool));
  for (auto& [dim, rows] : own.index.dims) {
    if (spec->is_sharded(dim)) {
      const auto interval = spec->interval(dim);
      own.mask = own.mask.logical_and(rows.ge(interval.begin))
                     .logical_and_(rows.lt(interval.end));
      rows = rows - interval.begin;
    }
  }
  for (auto& dim : own.index.dims) {
    dim.rows = dim.rows.masked_fill(own.mask.logical_not(), 0);
  }
  return own;
}

std::optional<Indices> without_scalar_mask(const Indices& indices) {
  for (const auto& given : given_indices(indices)) {
    if (given.dims == 0) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          indices.size() == 1,
          "a mask without dims beside other indices is not supported for "
          "ShardTensors, got ",
          indices.size(),
          " indices; index in two steps");
      Indices result;
      result.push_back(given.index.unsqueeze(0));
      return result;
    }
  }
  return {};
}

std::optional<int64_t> only_mask(const Indices& indices) {
  const auto given = given_indices(indices);
  const bool is_one =
      given.size() == 1 && is_mask(given[0].index) && given[0].dims > 0;
  return is_one ? std::optional(given[0].dim) : std::nullopt;
}

std::optional<int64_t> only_rows(const Indices& indices) {
  const auto given = given_indices(indices);
  const bool is_one = given.size() == 1 && is_row_index(given[0].index);
  return is_one ? std::optional(given[0].dim) : std::nullopt;
}

bool indexes_whole_dims(const SpecPtr& spec, const Indices& indices) {
  return std::ranges::all_of(given_indices(indices), [&](const auto& given) {
    return is_row_index(given.index) && given.dim < spec->dim() &&
        !spec->is_sharded(given.dim);
  });
}

void check_indices(
    const std::string& op,
    const at::Tensor& self,
    const Indices& indices,
    const at::Tensor& values) {
  const bool may_be_unseen = spec(self)->has_empty_piece() ||
      (values.defined() && is_shard_tensor(values) &&
       spec(values)->has_empty_piece());
  for (const auto& [index, dim, _] : given_indices(indices)) {
    if (is_cut(index) || may_be_unseen) {
      check_index(op, index, dim, self.size(dim), /*may_be_negative=*/true);
    }
  }
}

} // namespace shardtensor::detail
