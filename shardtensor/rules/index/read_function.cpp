#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/index.h>
#include <ATen/ops/index_select_ops.h>
#include <ATen/ops/masked_select_ops.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/dispatch/arguments/joined_operands.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/unboxed_kernels.h"
#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/rules/index/flat_rows.h"
#include "shardtensor/rules/index/masks.h"
#include "shardtensor/rules/index/memory_order.h"
#include "shardtensor/rules/index/row_exchange.h"
#include "shardtensor/rules/index/rows.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

// x[...] above autograd: indices or a mask that stand for several dims, or are
// whole, become calls along one dim (Note [Flat rows]).

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Dims = std::vector<int64_t>;

constexpr auto kOp = "aten::index";

/// x[:, index], the index standing at `dim`.
Tensor read_along(const Tensor& x, int64_t dim, const Tensor& index) {
  Indices list;
  for (int64_t i = 0; i < dim; ++i) {
    list.push_back(std::nullopt);
  }
  list.push_back(index);
  return at::index(x, list);
}

/// The same in memory of these nominal strides, none: contiguous.
Tensor in_memory_order(const Tensor& x, const Dims& strides) {
  if (strides.empty()) {
    return x.contiguous();
  }
  Dims order(x.dim());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(
      order, [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  Dims back(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    back[order[i]] = static_cast<int64_t>(i);
  }
  return x.permute(order).contiguous().permute(back);
}

// ---- a mask -----------------------------------------------------------------

/// x[:, mask] where keeps_rows() is false for cuts of the dims of the mask.
std::optional<Tensor> read_by_flat_mask(const Tensor& x, const Indices& given) {
  const auto place = only_mask(given);
  if (!place) {
    return {};
  }
  const std::optional<Tensor> mask = given.get(*place);
  const auto dims = mask->dim();
  if (*place + dims > x.dim() || mask->numel() == 0 ||
      x.sizes().slice(*place, dims) != mask->sizes()) {
    return {};
  }
  Dims named(dims);
  std::iota(named.begin(), named.end(), *place);
  const auto own = without_partial(spec(x));
  const auto axes = axes_of_dims(*own, named);
  if (axes.empty() || keeps_rows(own, *place, *mask)) {
    return {};
  }
  const auto rows = cut_along(flattened(x, *place, dims), *place, axes);
  const auto chosen = flattened(promote(*mask, own->mesh()), 0, dims);
  const auto found = read_along(
      rows, *place, redistribute(chosen, layout_of_dim(spec(rows), *place)));
  return in_memory_order(found, indexed_strides(x, given, found.sizes().vec()));
}

// ---- indices of several dims ------------------------------------------------

/// The named dims side by side at the position of the result's, cut ones first:
/// one dim of all of them is then cut as they are.
Dims with_named_together(const SpecPtr& spec, const NamedDims& named) {
  auto together = named.dims;
  std::stable_partition(together.begin(), together.end(), [&](int64_t dim) {
    return spec->is_sharded(dim);
  });
  Dims order;
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    if (std::ranges::find(named.dims, dim) == named.dims.end()) {
      order.push_back(dim);
    }
  }
  order.insert(
      order.begin() + named.position(), together.begin(), together.end());
  return order;
}

/// The rows that the indices name of `dims` as one.
Tensor flat_index(
    const Tensor& x,
    const NamedDims& named,
    at::IntArrayRef dims) {
  Tensor flat;
  for (const auto dim : dims) {
    const auto extent = x.size(dim);
    const auto& index = named.index_of(dim);
    check_planned_index(kOp, index, dim, extent, /*may_be_negative=*/true);
    const auto row = index.to(x.device(), at::kLong).remainder(extent);
    flat = flat.defined() ? flat.mul(extent).add(row) : row;
  }
  return flat;
}

/// Several indices that are whole and name fewer rows than there are need no
/// plan: each rank gives the rows that it has, unless they cannot be summed.
bool must_plan(const Tensor& x, const NamedDims& named) {
  const auto sizes = shared_sizes(named.indices);
  int64_t rows = 1;
  for (const auto dim : named.dims) {
    rows *= x.size(dim);
  }
  return std::ranges::any_of(named.indices, is_cut) ||
      (!sizes.empty() &&
       (c10::multiply_integers(sizes) >= rows || x.scalar_type() == at::kBool));
}

/// x[i, :, j] where named dims are cut.
std::optional<Tensor> read_by_flat_index(
    const Tensor& x,
    const Indices& given) {
  const auto named = named_by_rows(x, given);
  if (!named || named->dims.size() < 2) {
    return {};
  }
  const auto own = without_partial(spec(x));
  const auto axes = axes_of_dims(*own, named->dims);
  if (axes.empty() || x.numel() == 0 || !must_plan(x, *named)) {
    return {};
  }
  const auto order = with_named_together(own, *named);
  const auto first = named->position();
  const auto count = static_cast<int64_t>(named->dims.size());
  const auto index =
      flat_index(x, *named, at::IntArrayRef(order).slice(first, count));
  const auto rows = flattened(x.permute(order), first, count);
  const auto found = read_along(
      cut_along(rows, first, axes), first, cut_index(index, own->mesh(), axes));
  return in_memory_order(found, indexed_strides(x, given, found.sizes().vec()));
}

// ---- one index --------------------------------------------------------------

/// Few rows stay terms of a sum.
bool has_rows_for_all(const ShardSpec& x, int64_t dim, const Tensor& index) {
  return index.dim() > 0 && index.numel() >= x.partition(dim).pieces();
}

/// The index of dim `dim` cut as the dim, where it is not and has rows for all:
/// its rows then travel as those of a cut one. Every rank knows what all need,
/// if the index was whole.
std::optional<Tensor> cut_for_rows(
    const char* op,
    const Tensor& x,
    int64_t dim,
    const Tensor& given,
    bool may_be_negative) {
  const auto own = without_partial(spec(x));
  const auto& axes = own->axes(dim);
  if (axes.empty() || is_cut_beside(given, x, dim) ||
      !(has_rows_for_all(*own, dim, given) || must_plan(x, {{dim}, {given}}))) {
    return {};
  }
  const auto index = given.to(x.device());
  const auto cut = cut_index(index, own->mesh(), axes);
  if (!is_cut(index)) {
    const auto whole = is_shard_tensor(index) ? local_of(index).tensor : index;
    plan_whole_index(op, whole, cut, own, dim, may_be_negative);
  }
  return cut;
}

/// x[:, index] where the index is not cut as the dim.
std::optional<Tensor> read_by_whole_index(
    const Tensor& x,
    const Indices& given) {
  const auto dim = only_rows(given);
  if (!dim || *dim >= x.dim()) {
    return {};
  }
  const std::optional<Tensor> index = given.get(*dim);
  const auto cut = cut_for_rows(kOp, x, *dim, *index, /*may_be_negative=*/true);
  if (!cut) {
    return {};
  }
  const auto found = read_along(x, *dim, *cut);
  // What is cut has lost how the index lies.
  return index->is_contiguous()
      ? found
      : in_memory_order(found, indexed_strides(x, given, found.sizes().vec()));
}

// ---- the call ---------------------------------------------------------------

/// Most calls don't.
bool names_cut_dims(const Tensor& x, const Indices& given) {
  if (!is_shard_tensor(x)) {
    return false;
  }
  for (const auto& [index, first, count] : given_indices(given)) {
    const auto end = std::min(first + count, x.dim());
    for (auto dim = first; dim < end; ++dim) {
      if (spec(x)->is_sharded(dim)) {
        return true;
      }
    }
  }
  return false;
}

/// function_rule has not looked at the indices.
bool is_plain_call(
    c10::DispatchKeySet keys,
    const Tensor& x,
    const Indices& given) {
  Joinable joinable(keys);
  joinable.see(x);
  for (const std::optional<Tensor> index : given) {
    if (has_transformed(index)) {
      return false;
    }
    joinable.see(index);
  }
  return !joinable.found() && !is_traced(impl_of(x)->local());
}

Tensor index_function(
    c10::DispatchKeySet keys,
    const Tensor& x,
    const Indices& given) {
  using Op = at::_ops::index_Tensor;
  if (names_cut_dims(x, given) && is_plain_call(keys, x, given)) {
    for (const auto read :
         {read_by_flat_mask, read_by_flat_index, read_by_whole_index}) {
      if (const auto found = read(x, given)) {
        return *found;
      }
    }
  }
  return FunctionLevel<Op, Op::schema>::call(keys, x, given);
}

Tensor masked_select_function(const Tensor& self, const Tensor& mask) {
  TORCH_CHECK(
      mask.scalar_type() == at::kBool,
      "masked_select: expected a bool mask, got ",
      mask.scalar_type());
  const auto sizes = at::infer_size(self.sizes(), mask.sizes());
  Indices indices;
  indices.push_back(mask.expand(sizes));
  return at::index(self.expand(sizes), indices);
}

/// Rows of x that x's ranks have, by an index whose pieces they name.
bool has_rows_of_cut_index(const Tensor& x, int64_t dim, const Tensor& index) {
  return is_cut(index) && spec(index)->mesh() == spec(x)->mesh() &&
      !spec(x)->is_sharded(dim) &&
      std::ranges::all_of(spec(index)->axes(0), [&](int64_t axis) {
           return spec(x)->placement(axis).is_replicate();
         });
}

Tensor index_select_function(
    c10::DispatchKeySet keys,
    const Tensor& x,
    int64_t dim,
    const Tensor& index) {
  using Op = at::_ops::index_select;
  if (is_shard_tensor(x) && x.dim() > 0 && index.dim() == 1 &&
      is_row_index(index) && !is_traced(impl_of(x)->local())) {
    const auto place = at::maybe_wrap_dim(dim, x.dim());
    constexpr auto op = "aten::index_select";
    if (const auto cut =
            cut_for_rows(op, x, place, index, /*may_be_negative=*/false)) {
      return Op::call(x, dim, *cut);
    }
    const bool names_few_rows =
        spec(x)->is_sharded(place) && !is_cut(index) && index.numel() > 0;
    if (names_few_rows || has_rows_of_cut_index(x, place, index)) {
      check_index(op, index, place, x.size(place), /*may_be_negative=*/false);
      Indices rows;
      rows.resize(place);
      rows.push_back(index);
      return at::index(x, rows).contiguous();
    }
  }
  return without_rule<Op>(keys, x, dim, index);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("index.Tensor", function_rule<at::_ops::index_Tensor, index_function>);
  m.impl(
      "index_select",
      function_rule<at::_ops::index_select, index_select_function>);
  m.impl(
      "masked_select",
      function_rule<at::_ops::masked_select, masked_select_function>);
}

} // namespace
} // namespace shardtensor::detail
