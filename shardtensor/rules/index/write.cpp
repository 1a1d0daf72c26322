#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ops/_unsafe_masked_index_put_accumulate_native.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_fill.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/rules/index/flat_rows.h"
#include "shardtensor/rules/index/masks.h"
#include "shardtensor/rules/index/put_rows.h"
#include "shardtensor/rules/index/row_terms.h"
#include "shardtensor/rules/index/rows.h"
#include "shardtensor/rules/index/rules.h"

// x[...] = values with tensors along sharded dims, and with masks.

namespace shardtensor::detail {
namespace {

/// x[mask] = number.
std::optional<at::Tensor> fill_mask(
    const at::Tensor& self,
    const Indices& given,
    const at::Tensor& values,
    bool accumulate) {
  const auto place = only_mask(given);
  if (!place || accumulate || values.numel() != 1) {
    return {};
  }
  const std::optional<at::Tensor> mask = given.get(*place);
  const auto after = self.dim() - *place - mask->dim();
  if (after < 0) {
    return {};
  }
  for (int64_t k = 0; k < mask->dim(); ++k) {
    if (mask->size(k) != self.size(*place + k)) {
      return {};
    }
  }
  TORCH_CHECK(
      mask->scalar_type() == at::kBool,
      "masked_fill_ only supports boolean masks, but got mask with dtype ",
      mask->dtype());
  auto sizes = mask->sizes().vec();
  sizes.insert(sizes.end(), after, 1);
  return mask->to(self.device(), at::kBool).reshape(sizes);
}

/// Of a mask that is the only index, where its elements may be counted.
std::optional<int64_t> place_of_mask(
    const at::Tensor& self,
    const Indices& given) {
  return has_no_values(impl_of(self)->local()) ? std::nullopt
                                               : only_mask(given);
}

/// x[mask] = values where every rank's rows of x get its rows of the values.
bool put_masked_rows(
    const at::Tensor& self,
    const Indices& given,
    const at::Tensor& values,
    bool accumulate) {
  const auto place = place_of_mask(self, given);
  if (!place) {
    return false;
  }
  const auto own = without_partial(spec(self));
  const std::optional<at::Tensor> mask = given.get(*place);
  if (!keeps_rows(own, *place, *mask)) {
    return false;
  }
  const auto rows = masked_rows(own, *place, *mask);
  const auto source = local_values(values, rows.result, self);
  const LocalToWrite target(self, own);
  target.local().index_put_(rows.index, source, accumulate);
  target.finish();
  return true;
}

/// The same of a mask of several dims that are cut behind the first, by what
/// x[mask] reads: rows of these dims as one (Note [Flat rows]).
bool put_flat_masked_rows(
    const at::Tensor& self,
    const Indices& given,
    const at::Tensor& values,
    bool accumulate) {
  const auto place = place_of_mask(self, given);
  if (!place) {
    return false;
  }
  const std::optional<at::Tensor> mask = given.get(*place);
  const auto dims = mask->dim();
  const auto own = without_partial(spec(self));
  if (*place + dims > self.dim() || mask->numel() == 0 ||
      self.sizes().slice(*place, dims) != mask->sizes()) {
    return false;
  }
  std::vector<int64_t> named(dims);
  std::iota(named.begin(), named.end(), *place);
  const auto axes = axes_of_dims(*own, named);
  if (axes.empty()) {
    return false;
  }
  auto rows = cut_along(flattened(self, *place, dims), *place, axes);
  auto flat = given.copy();
  flat.set(*place, flattened(promote(*mask, own->mesh()), 0, dims));
  at::index_put_(rows, flat, values, accumulate);
  self.copy_(rows.reshape(self.sizes()));
  return true;
}

/// A device is waited for: how many rows are this rank's?
void write_own_rows(
    const at::Tensor& local,
    const SpecPtr& spec,
    const Index& index,
    const at::Tensor& given,
    bool accumulate) {
  const auto own = own_index(spec, index);
  const auto chosen = own.mask.flatten().nonzero().select(1, 0);
  auto flat = own.index;
  for (auto& dim : flat.dims) {
    dim.rows = dim.rows.flatten().index_select(0, chosen);
  }
  const auto at = index.position;
  const auto dims = static_cast<int64_t>(index.sizes.size());
  auto values = given.expand(result_spec(spec, index)->local_sizes());
  values = dims == 0 ? values.unsqueeze(at) : values.flatten(at, at + dims - 1);
  local.index_put_(
      flat.list(spec->dim()), values.index_select(at, chosen), accumulate);
}

/// The same without the number of rows: those of other ranks go into a row
/// behind the last one. Copies the local tensor twice.
void write_beside_own_rows(
    const at::Tensor& local,
    const SpecPtr& spec,
    const Index& index,
    const at::Tensor& values) {
  auto own = own_index(spec, index);
  std::vector<int64_t> pad(2 * local.dim(), 0); // from the last dim backwards
  for (auto& [dim, rows] : own.index.dims) {
    pad[2 * (local.dim() - 1 - dim) + 1] = 1;
    rows = at::where(
        own.mask, rows, at::full({}, local.size(dim), rows.options()));
  }
  auto wider = at::constant_pad_nd(local, pad);
  wider.index_put_(own.index.list(spec->dim()), values);
  for (const auto& dim : own.index.dims) {
    wider = wider.narrow(dim.dim, 0, local.size(dim.dim));
  }
  local.copy_(wider);
}

/// The same where values are added: those of other ranks are zero.
void add_own_rows(
    const at::Tensor& local,
    const SpecPtr& spec,
    const Index& index,
    const at::Tensor& values) {
  if (local.numel() == 0) {
    return;
  }
  const auto own = own_index(spec, index);
  const auto after = result_spec(spec, index)->dim() - index.position -
      static_cast<int64_t>(index.sizes.size());
  auto sizes = own.mask.sizes().vec();
  sizes.insert(sizes.end(), after, 1);
  local.index_put_(
      own.index.list(spec->dim()),
      at::where(own.mask.view(sizes), values, at::zeros({}, values.options())),
      /*accumulate=*/true);
}

/// Every rank writes into the rows that it has, one index dim for all.
void write_rows(
    const at::Tensor& local,
    const SpecPtr& spec,
    const Index& index,
    const at::Tensor& values,
    bool accumulate) {
  constexpr int64_t kCheapCopy = 16 << 20; // bytes, beside waiting for a device
  const bool asks = !is_traced(local) && local.is_cpu();
  if (!asks && accumulate) {
    add_own_rows(local, spec, index, values);
  } else if (
      !asks &&
      (has_no_values(local) ||
       static_cast<int64_t>(local.nbytes()) <= kCheapCopy)) {
    write_beside_own_rows(local, spec, index, values);
  } else {
    write_own_rows(local, spec, index, values, accumulate);
  }
}

/// self[index] += values with a cut index, by what its rows get: Note [Rows by
/// a cut index].
bool adds_rows(
    const at::Tensor& self,
    const Indices& given,
    const at::Tensor& values) {
  const auto dim = only_rows(given);
  if (!dim || *dim >= self.dim() || !is_shard_tensor(values) ||
      values.scalar_type() != self.scalar_type()) {
    return false;
  }
  const std::optional<at::Tensor> index = given.get(*dim);
  if (!is_shard_tensor(*index)) {
    return false;
  }
  auto sizes = self.sizes().vec();
  sizes.erase(sizes.begin() + *dim);
  sizes.insert(
      sizes.begin() + *dim, index->sizes().begin(), index->sizes().end());
  const auto terms = row_terms(
      self,
      {"aten::index_put_",
       *index,
       values.expand(sizes),
       *dim,
       "sum",
       /*may_be_negative=*/true});
  if (!terms) {
    return false;
  }
  begin_row_write(self, terms->layout);
  const LocalToWrite target(self, terms->layout);
  target.local().add_(terms->rows);
  target.finish();
  return true;
}

/// The dims that are indexed, and those of the indices in their place.
struct Replaced {
  std::vector<int64_t> dims;
  int64_t position;
  int64_t index_dims;
};

std::optional<Replaced> replaced_dims(
    const at::Tensor& self,
    const Indices& given) {
  if (const auto place = only_mask(given)) {
    const std::optional<at::Tensor> mask = given.get(*place);
    std::vector<int64_t> dims(mask->dim());
    std::iota(dims.begin(), dims.end(), *place);
    return Replaced{std::move(dims), *place, 1};
  }
  const auto named = named_by_rows(self, given);
  if (!named) {
    return std::nullopt;
  }
  const auto sizes = shared_sizes(named->indices);
  return Replaced{
      named->dims, named->position(), static_cast<int64_t>(sizes.size())};
}

/// How `self` lies where its dims that are not indexed are cut as those of the
/// values; null where values say nothing of it.
SpecPtr layout_beside_values(
    const at::Tensor& self,
    const Indices& given,
    const at::Tensor& values) {
  const auto replaced = replaced_dims(self, given);
  if (!replaced || !is_shard_tensor(values) ||
      spec(values)->mesh() != spec(self)->mesh()) {
    return nullptr;
  }
  const auto& [dims, position, index_dims] = *replaced;
  const auto cut = without_partial(spec(values));
  const auto kept = self.dim() - static_cast<int64_t>(dims.size());
  const auto shift = cut->dim() - kept - index_dims; // values are broadcast
  int64_t next = 0;
  std::vector<int64_t> from;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (std::ranges::find(dims, dim) != dims.end()) {
      from.push_back(-1);
      continue;
    }
    const auto of_values = next + shift + (next < position ? 0 : index_dims);
    ++next;
    const bool fits = of_values >= 0 && cut->size(of_values) == self.size(dim);
    from.push_back(fits ? of_values : -1);
  }
  return with_dims(cut, self.sizes().vec(), from);
}

/// Of a tensor that is made to be written.
SpecPtr layout_of_made(
    const at::Tensor& self,
    const Indices& given,
    const at::Tensor& values) {
  if (const auto place = only_mask(given)) {
    const std::optional<at::Tensor> mask = given.get(*place);
    if (is_cut(*mask)) {
      return layout_beside(self, *place, *mask);
    }
  }
  const auto named = named_by_rows(self, given);
  if (named && named->dims.size() == 1) {
    const auto& index = named->indices[0];
    if (auto rows = layout_of_put_rows(self, index, named->dims[0], values)) {
      return rows;
    }
  }
  if (named) {
    if (auto layout = find_read_layout(self, named->dims, values)) {
      return layout;
    }
  }
  return layout_beside_values(self, given, values);
}

at::Tensor& index_put_in_place_kernel(
    at::Tensor& self,
    const Indices& given,
    const at::Tensor& values,
    bool accumulate) {
  TORCH_CHECK_TYPE(
      is_shard_tensor(self),
      "index_put_: cannot write a ShardTensor into a plain tensor; use "
      "full_tensor() or to_local()");
  if (const auto indices = without_scalar_mask(given)) {
    begin_row_write(self);
    auto rows = self.unsqueeze(0);
    index_put_in_place_kernel(rows, *indices, values, accumulate);
    return self;
  }
  if (const auto mask = fill_mask(self, given, values, accumulate)) {
    begin_row_write(self, layout_of_made(self, given, values));
    return self.masked_fill_(*mask, values.reshape({}));
  }
  if (accumulate && adds_rows(self, given, values)) {
    return self;
  }
  begin_row_write(self, layout_of_made(self, given, values));
  if (put_masked_rows(self, given, values, accumulate) ||
      put_flat_masked_rows(self, given, values, accumulate)) {
    return self;
  }
  if (puts_rows(self, given, values, accumulate)) {
    return self;
  }
  if (indexes_whole_dims(without_partial(spec(self)), given)) {
    check_indices("aten::index_put_", self, given, values);
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::index_put_", "");
    torch::jit::Stack stack{self, given, values, accumulate};
    run_rule(op, index_put_rule, &stack);
    return self;
  }
  const auto index = read_indices(self, given);
  if (index.dims.empty()) {
    return accumulate ? self.add_(values) : self.copy_(values);
  }
  const auto wanted =
      contiguous_dims(without_partial(spec(self)), index.indexed());
  const LocalToWrite target(self, wanted);
  const auto source = local_values(values, result_spec(wanted, index), self);
  if (axes_of_dims(*wanted, index.indexed()).empty()) {
    target.local().index_put_(index.list(self.dim()), source, accumulate);
  } else {
    write_rows(target.local(), wanted, index, source, accumulate);
  }
  target.finish();
  return self;
}

at::Tensor& index_put_impl_kernel(
    at::Tensor& self,
    const Indices& given,
    const at::Tensor& values,
    bool accumulate,
    bool) {
  return index_put_in_place_kernel(self, given, values, accumulate);
}

at::Tensor index_put_kernel(
    const at::Tensor& self,
    const Indices& given,
    const at::Tensor& values,
    bool accumulate) {
  auto result = self.clone();
  return index_put_in_place_kernel(result, given, values, accumulate);
}

at::Tensor put_kernel(
    const at::Tensor& self,
    const at::Tensor& index,
    const at::Tensor& source,
    bool accumulate) {
  TORCH_CHECK_INDEX(
      index.scalar_type() == at::kLong,
      "put_(): Expected a long tensor for index, but got ",
      index.scalar_type());
  TORCH_CHECK_INDEX(
      index.numel() == source.numel(),
      "put_(): Expected source and index to have the same number of elements, "
      "but got source.numel() = ",
      source.numel(),
      ", index.numel() = ",
      index.numel());
  Indices indices;
  indices.push_back(index.reshape({-1}));
  const auto result =
      at::index_put(
          self.reshape({-1}), indices, source.reshape({-1}), accumulate)
          .reshape(self.sizes());
  return self.is_contiguous() ? result : at::empty_like(self).copy_(result);
}

/// The number stays where it is: nobody reads it.
at::Tensor index_fill_kernel(
    const at::Tensor& self,
    int64_t dim,
    const at::Tensor& index,
    const at::Tensor& value) {
  TORCH_CHECK(
      value.dim() == 0,
      "index_fill_ only supports a 0-dimensional value tensor, but got tensor "
      "with ",
      value.dim(),
      " dimension(s).");
  const auto filled =
      at::index_fill(at::zeros_like(self, at::kBool), dim, index, 1);
  return at::where(filled, value.to(self.scalar_type()), self);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("index_fill.int_Tensor", index_fill_kernel);
  m.impl("index_put", index_put_kernel);
  m.impl("index_put_", index_put_in_place_kernel);
  m.impl("_index_put_impl_", index_put_impl_kernel);
  m.impl("_unsafe_index_put", index_put_kernel);
  m.impl(
      "_unsafe_masked_index_put_accumulate",
      at::native::_unsafe_masked_index_put_accumulate);
  m.impl("put", put_kernel);
}

} // namespace shardtensor::detail
