#include <limits>
#include <string>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/scatter_reduce.h>
#include <ATen/ops/segment_reduce.h>
#include <ATen/ops/segment_reduce_ops.h>
#include <torch/library.h>

#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/rules/index/row_terms.h"
#include "shardtensor/rules/index/rows.h"
#include "shardtensor/tensor/terms.h"

// Runs of rows, one behind the other. Each row learns the number of its run,
// and is reduced into the row of that number.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr auto kOtherNumber =
    "segment_reduce(): Expected all rows of lengths along axis to sum to "
    "data.size(lengths.dim()-1) when !unsafe.";

/// A layout of one dim, cut as the rows of `data`: for these pieces.
SpecPtr beside_rows(const SpecPtr& data, const Partition& pieces) {
  return layout_of_rows(data->mesh(), data->axes(0), pieces);
}

/// How many rows each piece of the runs has. Communication: one number.
Partition rows_of_pieces(const Tensor& lengths, const SpecPtr& runs) {
  const auto own = lengths.sum();
  if (!runs->is_sharded()) {
    return Partition({own.item<int64_t>()});
  }
  const auto all =
      gather_terms(own, make_replicated(runs->mesh(), {}), runs->axes(0))
          .flatten()
          .cpu();
  const auto* const data = all.const_data_ptr<int64_t>();
  return Partition(std::vector<int64_t>(data, data + all.numel()));
}

/// The rows of `data` that runs of these lengths have: all, unless `unsafe`
/// leaves the last ones out.
Tensor rows_in_runs(const Tensor& data, int64_t count, bool unsafe) {
  TORCH_CHECK(unsafe || count == data.size(0), kOtherNumber);
  TORCH_CHECK_VALUE(
      count <= data.size(0),
      "segment_reduce: expected lengths that sum to at most the ",
      data.size(0),
      " rows of data, got ",
      count);
  return count == data.size(0) ? data : data.narrow(0, 0, count);
}

/// The run that each row of `data` is in; a piece of the runs has as many rows
/// as its place in `pieces` says. Communication: a redistribution of integers.
Tensor runs_of_rows(
    const Tensor& lengths,
    const Partition& pieces,
    const Tensor& data) {
  const auto& runs = spec(lengths);
  const auto own = to_local(lengths);
  const auto first = runs->is_sharded() ? runs->interval(0).begin : 0;
  const auto numbers = at::repeat_interleave(
      at::arange(own.numel(), own.options()).add(first), own);
  const auto& rows = spec(data);
  const auto wanted = contiguous_dim(without_partial(rows), 0);
  return redistribute(
      from_local(numbers, beside_rows(rows, pieces)),
      beside_rows(
          rows,
          wanted->is_sharded(0) ? wanted->partition(0)
                                : Partition({data.size(0)})));
}

double neutral(const std::string& reduce) {
  const auto infinity = std::numeric_limits<double>::infinity();
  return reduce == "max" ? -infinity
      : reduce == "min"  ? infinity
      : reduce == "prod" ? 1
                         : 0;
}

Tensor reduced_runs(
    const Tensor& given,
    const std::string& reduce,
    const Tensor& lengths,
    bool unsafe,
    const std::optional<at::Scalar>& initial) {
  const auto pieces = rows_of_pieces(to_local(lengths), spec(lengths));
  const auto data = rows_in_runs(given, pieces.extent(), unsafe);
  const auto runs = runs_of_rows(lengths, pieces, data);
  if (spec(lengths)->is_sharded()) {
    note_row_layout(spec(runs), spec(lengths)); // results lie as lengths do
  }
  const bool is_extreme = reduce == "max" || reduce == "min";
  auto sizes = data.sizes().vec();
  sizes[0] = lengths.size(0);
  const auto start = data.new_full(
      sizes, initial && !is_extreme ? *initial : at::Scalar(neutral(reduce)));
  const auto result = at::scatter_reduce(
      start,
      0,
      viewed_along(runs, 0, data.dim()).expand_as(data),
      data,
      is_extreme             ? "a" + reduce
          : reduce == "mean" ? "sum"
                             : reduce);
  if (is_extreme && initial) {
    // A row that equals it has the gradient alone.
    const auto beyond =
        reduce == "max" ? result.lt(*initial) : result.gt(*initial);
    return result.masked_fill(beyond, *initial);
  }
  if (reduce == "mean") {
    const auto count = initial ? lengths.clamp_min(1) : lengths;
    return result / viewed_along(count.to(data.scalar_type()), 0, data.dim());
  }
  return result;
}

/// The lengths of the runs.
Tensor lengths_of(
    const Tensor& data,
    const OptionalTensor& lengths,
    const OptionalTensor& offsets) {
  const auto& runs = lengths ? lengths : offsets;
  const auto given = promote(runs->detach(), spec(data)->mesh()).to(at::kLong);
  return lengths ? given : at::diff(given);
}

/// Runs along `axis`, other ones in each entry of the dims before it: all
/// entries behind each other. Communication: one number beside that of those.
Tensor reduced_runs_of_entries(
    const Tensor& data,
    c10::string_view reduce,
    const Tensor& lengths,
    int64_t axis,
    const std::optional<at::Scalar>& initial) {
  const auto other = lengths.sum(-1).ne(data.size(axis)).any();
  TORCH_CHECK(!full_tensor(other).item<bool>(), kOtherNumber);
  const auto result = at::segment_reduce(
      data.flatten(0, axis),
      reduce,
      lengths.flatten(),
      std::nullopt,
      std::nullopt,
      0,
      /*unsafe=*/false,
      initial);
  return result.unflatten(0, lengths.sizes());
}

Tensor segment_reduce_function(
    c10::DispatchKeySet keys,
    const Tensor& data,
    c10::string_view reduce,
    const OptionalTensor& lengths,
    const OptionalTensor& indices,
    const OptionalTensor& offsets,
    int64_t axis,
    bool unsafe,
    const std::optional<at::Scalar>& initial) {
  const auto& runs = lengths ? lengths : offsets;
  const bool is_known = is_shard_tensor(data) && runs && !indices &&
      !(lengths && offsets) && data.dim() > 0 &&
      at::isFloatingType(data.scalar_type()) &&
      at::isIntegralType(runs->scalar_type(), false) &&
      runs->dim() == at::maybe_wrap_dim(axis, data.dim()) + 1 &&
      runs->sizes().slice(0, runs->dim() - 1) ==
          data.sizes().slice(0, runs->dim() - 1);
  const bool is_one = is_known && runs->dim() == 1;
  if (!(is_one || (is_known && !unsafe)) ||
      has_no_values(impl_of(data)->local())) {
    return without_rule<at::_ops::segment_reduce>(
        keys, data, reduce, lengths, indices, offsets, axis, unsafe, initial);
  }
  const auto counts = lengths_of(data, lengths, offsets);
  if (!is_one) {
    return reduced_runs_of_entries(
        data, reduce, counts, runs->dim() - 1, initial);
  }
  const auto& rows = spec(data);
  const auto pieces = rows->is_sharded(0) ? rows->partition(0).pieces() : 1;
  const auto wanted =
      beside_rows(rows, Partition::chunked(counts.size(0), pieces));
  const auto cut = spec(counts)->axes(0) == wanted->axes(0) &&
          (!wanted->is_sharded() || spec(counts)->partition(0).is_contiguous())
      ? counts
      : redistribute(counts, wanted);
  TORCH_CHECK(
      unsafe || counts.size(0) == 0 ||
          full_tensor(cut.min()).item<int64_t>() >= 0,
      "lengths contains negative value!");
  return reduced_runs(data, std::string(reduce), cut, unsafe, initial);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "segment_reduce",
      function_rule<at::_ops::segment_reduce, segment_reduce_function>);
}

} // namespace shardtensor::detail
