#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/index_add_ops.h>
#include <ATen/ops/index_copy_ops.h>
#include <ATen/ops/index_fill_ops.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/index_reduce_ops.h>
#include <ATen/ops/scatter_add_ops.h>
#include <ATen/ops/scatter_ops.h>
#include <ATen/ops/scatter_reduce_ops.h>
#include <c10/util/Metaprogramming.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/unboxed_kernels.h"
#include "shardtensor/rules/index/element_rows.h"
#include "shardtensor/rules/index/flat_rows.h"
#include "shardtensor/rules/index/rows.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

// scatter, index_add and their kin above autograd, where self is cut along
// `dim` and the index isn't, or differs along other dims: Note [Rows of
// elements]. The rest is in by_index.cpp.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Dims = std::vector<int64_t>;

// Of an operator that may write into self.
template <class Op>
using ResultOf = typename c10::guts::infer_function_traits_t<
    typename Op::schema>::return_type;
template <class Op>
using SelfOf = std::
    conditional_t<std::is_reference_v<ResultOf<Op>>, Tensor&, const Tensor&>;

// ---- what is written --------------------------------------------------------

/// None where elements of self lie in one place, too: PyTorch refuses most such
/// writes.
std::optional<int64_t> written_cut_dim(
    const Tensor& self,
    int64_t dim,
    const Tensor& index) {
  const auto wrapped = wrapped_cut_dim(self, dim, index);
  for (int64_t d = 0; wrapped && d < self.dim(); ++d) {
    if (is_expanded(self, d)) {
      return {};
    }
  }
  return wrapped;
}

/// self[indices] = values.
struct RowsToPut {
  Indices indices;
  Tensor values;
};

bool names_whole_rows(
    const Tensor& self,
    const Tensor& index,
    const Dims& dims) {
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (std::ranges::find(dims, d) == dims.end() &&
        index.size(d) != self.size(d)) {
      return false;
    }
  }
  return true;
}

bool source_covers(
    const Tensor& self,
    const Tensor& index,
    const Tensor& source) {
  if (source.dim() != index.dim() ||
      source.scalar_type() != self.scalar_type()) {
    return false;
  }
  for (int64_t d = 0; d < index.dim(); ++d) {
    if (index.size(d) > source.size(d)) {
      return false;
    }
  }
  return true;
}

/// None where index or source don't fit, or another way is as good.
std::optional<RowsToPut> rows_of_scatter(
    const char* op,
    const Tensor& self,
    int64_t given_dim,
    const Tensor& index,
    const Tensor& source) {
  const auto dim = written_cut_dim(self, given_dim, index);
  const auto dims =
      dim ? dims_of_rows(self, *dim, index) : std::optional<Dims>();
  if (!dims || !are_rows(self, *dim, index, *dims) ||
      !names_whole_rows(self, index, *dims) ||
      (source.dim() > 0 && !source_covers(self, index, source))) {
    return {};
  }
  const auto rows =
      cut_as_batches(index_of_dims(index, *dims), *dims, self, *dim);
  check_gather_index(op, rows, *dim, self.size(*dim));
  auto named = named_rows(rows, *dims, *dim, self.dim());
  auto values = source;
  for (int64_t d = 0; d < source.dim(); ++d) {
    values = values.narrow(d, 0, index.size(d));
  }
  if (source.dim() > 0) {
    values = values.permute(named.order);
  }
  return RowsToPut{std::move(named.indices), values};
}

/// In memory as scatter's result.
Tensor put(const Tensor& self, const RowsToPut& rows, bool accumulate) {
  return at::index_put(
      self.contiguous(), rows.indices, rows.values, accumulate);
}
Tensor& put(Tensor& self, const RowsToPut& rows, bool accumulate) {
  return at::index_put_(self, rows.indices, rows.values, accumulate);
}

Tensor number_of(const Tensor& self, const at::Scalar& value) {
  return at::full(
      {}, value, at::device(self.device()).dtype(self.scalar_type()));
}

/// Where ranks have parts of an index of rows, the dispatch level fills them.
template <class Op>
ResultOf<Op> scatter_value_function(
    c10::DispatchKeySet keys,
    SelfOf<Op> self,
    int64_t dim,
    const Tensor& index,
    const at::Scalar& value) {
  const auto cut_dim = written_cut_dim(self, dim, index);
  if (cut_dim && !travels_as_it_is(self, *cut_dim, index)) {
    if (const auto rows = rows_of_scatter(
            Op::name, self, dim, index, number_of(self, value))) {
      return put(self, *rows, /*accumulate=*/false);
    }
  }
  return FunctionLevel<Op, typename Op::schema>::call(
      keys, self, dim, index, value);
}

/// The cut dim along which an index of rows writes; none where another way is
/// needed.
std::optional<int64_t> dim_of_rows(
    const Tensor& self,
    int64_t dim,
    const Tensor& index) {
  const bool names_rows = index.scalar_type() == at::kLong && index.dim() == 1;
  return names_rows ? written_cut_dim(self, dim, index) : std::nullopt;
}

template <class Op>
ResultOf<Op> index_fill_function(
    c10::DispatchKeySet keys,
    SelfOf<Op> self,
    int64_t given_dim,
    const Tensor& index,
    const at::Scalar& value) {
  constexpr bool writes = std::is_same_v<SelfOf<Op>, Tensor&>;
  const auto dim = dim_of_rows(self, given_dim, index);
  if constexpr (!writes) {
    if (dim && is_cut(index) && !self.is_contiguous()) {
      return self.clone().index_fill_(*dim, index, value); // in memory as there
    }
  }
  if (!dim || index.numel() == 0 || is_cut(index)) {
    return FunctionLevel<Op, typename Op::schema>::call(
        keys, self, given_dim, index, value);
  }
  const auto extent = self.size(*dim);
  check_index(Op::name, index, *dim, extent, /*may_be_negative=*/true);
  const auto named = named_rows(index, {*dim}, *dim, self.dim());
  const auto number = number_of(self, value);
  if constexpr (writes) {
    return at::index_put_(self, named.indices, number);
  } else {
    return at::index_put(self, named.indices, number);
  }
}

template <class Op>
ResultOf<Op> scatter_function(
    c10::DispatchKeySet keys,
    SelfOf<Op> self,
    int64_t dim,
    const Tensor& index,
    const Tensor& source) {
  if (const auto rows = rows_of_scatter(Op::name, self, dim, index, source)) {
    return put(self, *rows, /*accumulate=*/false);
  }
  return FunctionLevel<Op, typename Op::schema>::call(
      keys, self, dim, index, source);
}

template <class Op>
ResultOf<Op> index_copy_function(
    c10::DispatchKeySet keys,
    SelfOf<Op> self,
    int64_t given_dim,
    const Tensor& index,
    const Tensor& source) {
  const auto dim = dim_of_rows(self, given_dim, index);
  const auto fits = [&] {
    auto sizes = self.sizes().vec();
    sizes[*dim] = index.size(0);
    return source.sizes() == sizes &&
        source.scalar_type() == self.scalar_type();
  };
  if (!dim || index.numel() == 0 || !fits()) {
    return FunctionLevel<Op, typename Op::schema>::call(
        keys, self, given_dim, index, source);
  }
  check_index(Op::name, index, *dim, self.size(*dim));
  const auto named = named_rows(index, {*dim}, *dim, self.dim());
  return put(self, {named.indices, source}, /*accumulate=*/false);
}

// ---- what is reduced --------------------------------------------------------

/// A whole index of rows cut as the source along `dim`, else as self; none
/// where neither is cut there.
std::optional<Tensor> cut_beside(
    const Tensor& self,
    int64_t dim,
    const Tensor& rows,
    const Tensor& source) {
  const auto own = without_partial(spec(self));
  const auto& axes = own->axes(dim);
  const auto& like = is_shard_tensor(source) ? spec(source) : own;
  const auto is_beside = [&](int64_t axis) {
    const auto placement = own->placement(axis);
    return placement.is_replicate() || placement == Placement::shard(dim);
  };
  const auto has_axis = [&](int64_t axis) {
    return std::ranges::find(like->axes(dim), axis) != like->axes(dim).end();
  };
  if (!is_cut(rows) && like->is_sharded(dim) &&
      like->size(dim) == rows.size(0) && std::ranges::all_of(axes, has_axis) &&
      std::ranges::all_of(like->axes(dim), is_beside)) {
    return redistribute(promote(rows, own->mesh()), layout_of_dim(like, dim));
  }
  return axes.empty() ? std::nullopt
                      : std::optional(cut_index(rows, own->mesh(), axes));
}

/// The index of a reduction cut along all axes that cut self: its rows then
/// travel. None where it is so already, or is none of rows.
std::optional<Tensor> cut_for_reduction(
    const Tensor& self,
    int64_t given_dim,
    const Tensor& index,
    const Tensor& source) {
  const auto dim = wrapped_dim(self, given_dim, index);
  const auto is_cut_there = [&](const Tensor& x) {
    return is_shard_tensor(x) && x.dim() == self.dim() &&
        spec(x)->is_sharded(*dim);
  };
  if (!dim || source.dim() != self.dim() ||
      (!is_cut_there(self) && !is_cut_there(source)) ||
      (is_cut(index) && is_cut_beside(index, self, *dim))) {
    return {};
  }
  if (index.dim() == 1) {
    return index.numel() == 0 || source.size(*dim) != index.size(0)
        ? std::nullopt
        : cut_beside(self, *dim, index, source);
  }
  const auto dims = dims_of_rows(self, *dim, index);
  if (!dims || dims->size() > 1 || source.sizes() != index.sizes() ||
      !names_whole_rows(self, index, *dims)) {
    return {};
  }
  const auto cut = cut_beside(self, *dim, index_of_dims(index, *dims), source);
  return cut ? std::optional(widened(*cut, *dim, index.sizes())) : std::nullopt;
}

bool is_cut_along(const Tensor& source, int64_t dim) {
  const auto wrapped = dim < 0 ? dim + source.dim() : dim;
  return is_shard_tensor(source) && wrapped >= 0 && wrapped < source.dim() &&
      spec(source)->is_sharded(wrapped);
}

template <class Op, class Signature = typename Op::schema>
struct Reduction;

template <class Op, class Result, class Self, class... Rest>
struct Reduction<
    Op,
    Result(Self, int64_t, const Tensor&, const Tensor&, Rest...)> {
  static Result call(
      c10::DispatchKeySet keys,
      Self self,
      int64_t dim,
      const Tensor& index,
      const Tensor& source,
      Rest... rest) {
    if constexpr (!std::is_reference_v<Result>) {
      if (!is_shard_tensor(self) && is_cut_along(source, dim)) {
        const auto& mesh = spec(source)->mesh();
        const auto rows = promote_operand(self, mesh, Op::name);
        return Op::call(rows, dim, index, source, rest...);
      }
    }
    if (const auto cut = cut_for_reduction(self, dim, index, source)) {
      return Op::call(self, dim, *cut, source, rest...);
    }
    return FunctionLevel<Op, typename Op::schema>::call(
        keys, self, dim, index, source, rest...);
  }
};

/// Of batches with an index each: rows of both dims, as those of x[i, j] += y.
template <class Op>
ResultOf<Op> scatter_add_function(
    c10::DispatchKeySet keys,
    SelfOf<Op> self,
    int64_t dim,
    const Tensor& index,
    const Tensor& source) {
  const auto cut_dim = written_cut_dim(self, dim, index);
  if (cut_dim && travels_as_it_is(self, *cut_dim, index)) {
    return FunctionLevel<Op, typename Op::schema>::call(
        keys, self, dim, index, source);
  }
  const auto dims =
      cut_dim ? dims_of_rows(self, *cut_dim, index) : std::optional<Dims>();
  if (dims && dims->size() > 1) {
    if (const auto rows = rows_of_scatter(Op::name, self, dim, index, source)) {
      return put(self, *rows, /*accumulate=*/true);
    }
  }
  return Reduction<Op>::call(keys, self, dim, index, source);
}

// ---- registration -----------------------------------------------------------

template <class Op, auto function>
void add_rule(torch::Library& m) {
  const auto overload = std::string(Op::overload_name);
  const auto name =
      std::string(Op::name) + (overload.empty() ? "" : "." + overload);
  m.impl(name.c_str(), function_rule<Op, function>);
}

template <class Op>
void add_reduction(torch::Library& m) {
  add_rule<Op, &Reduction<Op>::call>(m);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  using namespace at::_ops;
  add_rule<scatter_src, scatter_function<scatter_src>>(m);
  add_rule<scatter__src, scatter_function<scatter__src>>(m);
  add_rule<scatter_value, scatter_value_function<scatter_value>>(m);
  add_rule<scatter__value, scatter_value_function<scatter__value>>(m);
  add_rule<scatter_add, scatter_add_function<scatter_add>>(m);
  add_rule<scatter_add_, scatter_add_function<scatter_add_>>(m);
  add_rule<index_fill_int_Scalar, index_fill_function<index_fill_int_Scalar>>(
      m);
  add_rule<index_fill__int_Scalar, index_fill_function<index_fill__int_Scalar>>(
      m);
  add_rule<index_copy, index_copy_function<index_copy>>(m);
  add_rule<index_copy_, index_copy_function<index_copy_>>(m);
  add_reduction<scatter_reduce_two>(m);
  add_reduction<scatter_reduce__two>(m);
  add_reduction<index_add>(m);
  add_reduction<index_add_>(m);
  add_reduction<index_reduce>(m);
  add_reduction<index_reduce_>(m);
}

} // namespace
} // namespace shardtensor::detail
