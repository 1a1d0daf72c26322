#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/gather_ops.h>
#include <ATen/ops/index.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/take_along_dim_ops.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/unboxed_kernels.h"
#include "shardtensor/rules/index/element_rows.h"
#include "shardtensor/rules/index/rows.h"

// gather along a cut dim by what x[...] does: Note [Rows of elements].

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Dims = std::vector<int64_t>;

/// The dims of x[indices] as those of the call.
Tensor in_order(const Tensor& found, const Dims& order) {
  if (std::ranges::is_sorted(order)) {
    return found;
  }
  Dims back(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    back[order[i]] = static_cast<int64_t>(i);
  }
  return found.permute(back);
}

/// Along dims of whole rows, as far as the index goes.
Tensor narrowed(const Tensor& self, const Tensor& index, const Dims& dims) {
  auto result = self;
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (std::ranges::find(dims, d) == dims.end() &&
        index.size(d) < self.size(d)) {
      result = result.narrow(d, 0, index.size(d));
    }
  }
  return result;
}

std::optional<Tensor> gather_rows(
    const Tensor& self,
    int64_t given_dim,
    const Tensor& index) {
  const auto cut_dim = wrapped_cut_dim(self, given_dim, index);
  if (!cut_dim || travels_as_it_is(self, *cut_dim, index)) {
    return {};
  }
  const auto dim = *cut_dim;
  const auto dims = dims_of_rows(self, dim, index);
  if (!dims || !are_rows(self, dim, index, *dims)) {
    return {};
  }
  auto x = narrowed(self, index, *dims);
  if (travels_as_it_is(x, dim, index)) {
    return at::gather(x, dim, index);
  }
  const auto rows =
      cut_as_batches(index_of_dims(index, *dims), *dims, self, dim);
  check_gather_index("aten::gather", rows, dim, self.size(dim));
  Dims dropped;
  for (const auto d : *dims) {
    if (d != dim && is_expanded(self, d)) {
      dropped.push_back(d);
    }
  }
  for (size_t i = dropped.size(); i-- > 0;) {
    x = x.select(dropped[i], 0);
  }
  const auto named = named_rows(rows, *dims, dim, self.dim(), dropped);
  return in_order(at::index(x, named.indices), named.order).contiguous();
}

/// Of rows that all ranks have, by a cut index of rows.
std::optional<Tensor> gather_own_rows(
    const Tensor& self,
    int64_t given_dim,
    const Tensor& index) {
  const auto dim = wrapped_dim(self, given_dim, index);
  if (!dim || !is_cut(index) || spec(self)->is_sharded(*dim)) {
    return {};
  }
  const auto dims = dims_of_rows(self, *dim, index);
  if (!dims || dims->size() > 1) {
    return {};
  }
  auto sizes = self.sizes().vec();
  sizes[*dim] = index.size(*dim);
  if (index.sizes() != sizes) {
    return {};
  }
  const auto rows = index_of_dims(index, *dims);
  check_gather_index("aten::gather", rows, *dim, self.size(*dim));
  return at::index_select(self, *dim, rows);
}

Tensor gather_function(
    c10::DispatchKeySet keys,
    const Tensor& self,
    int64_t dim,
    const Tensor& index,
    bool sparse_grad) {
  using Op = at::_ops::gather;
  if (!sparse_grad) {
    for (const auto gathers : {gather_rows, gather_own_rows}) {
      if (const auto found = gathers(self, dim, index)) {
        return *found;
      }
    }
  }
  return FunctionLevel<Op, Op::schema>::call(
      keys, self, dim, index, sparse_grad);
}

/// What is expanded names rows, and would not once it was counted from the end.
Tensor counted_from_front(const Tensor& index, int64_t dim, int64_t extent) {
  auto rows = index;
  for (int64_t d = 0; d < index.dim(); ++d) {
    if (d != dim && is_same_along(index, d)) {
      rows = rows.narrow(d, 0, 1);
    }
  }
  return rows.remainder(extent).expand(index.sizes());
}

Tensor take_along_dim_function(
    c10::DispatchKeySet keys,
    const Tensor& self,
    const Tensor& index,
    std::optional<int64_t> given_dim) {
  using Op = at::_ops::take_along_dim;
  const auto dim = given_dim && index.scalar_type() == at::kLong
      ? wrapped_cut_dim(self, *given_dim, index)
      : std::nullopt;
  if (!dim || index.dim() != self.dim() || self.numel() == 0 ||
      index.numel() == 0) {
    return FunctionLevel<Op, Op::schema>::call(keys, self, index, given_dim);
  }
  const auto as_wide_as = [&](const Tensor& x, const Tensor& other) {
    auto sizes = other.sizes().vec();
    sizes[*dim] = x.size(*dim);
    return x.expand(at::infer_size(x.sizes(), sizes));
  };
  const auto rows = counted_from_front(index, *dim, self.size(*dim));
  return at::gather(as_wide_as(self, rows), *dim, as_wide_as(rows, self));
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("gather", function_rule<at::_ops::gather, gather_function>);
  m.impl(
      "take_along_dim",
      function_rule<at::_ops::take_along_dim, take_along_dim_function>);
}

} // namespace
} // namespace shardtensor::detail
