#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/sort_ops.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/collectives/key_bounds.h"
#include "shardtensor/collectives/route.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/dispatch/along_dim.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/tensor/order_keys.h"
#include "shardtensor/tensor/redistribute.h"

// Sorting along a dim that is cut. Where there are other dims these are cut
// instead. A sequence has none: each rank sorts its piece and sends what lies
// between two bounds to the rank of these bounds, which sorts what it gets (a
// sample sort: Blelloch et al., A comparison of sorting algorithms for the
// Connection Machine CM-2, 1991); then everything goes into pieces of the sizes
// that the sequence had.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Sorted = std::tuple<Tensor, Tensor>; // values, indices

/// Fewer are gathered: that is one exchange, not eight.
constexpr int64_t kFewest = 1 << 13;

/// A sequence in pieces, and the ranks that have them.
struct Sequence {
  SpecPtr layout;
  int64_t dim;
  std::string group;
};

std::optional<Sequence> find_sequence(const Tensor& self, int64_t dim) {
  const auto& given = spec(self);
  if (given->is_whole(dim) || self.numel() != self.size(dim) ||
      self.numel() < kFewest || !self.is_contiguous() ||
      !has_order_keys(self.scalar_type()) ||
      has_no_values(impl_of(self)->local())) {
    return {};
  }
  const auto& mesh = given->mesh();
  const auto& axes = given->axes(dim);
  if (axes.size() > 1 && mesh->ranks(axes) < mesh->ranks()) {
    return {};
  }
  return Sequence{
      contiguous_dim(without_partial(given), dim),
      dim,
      axes.size() == 1 ? mesh->group(axes.front()) : mesh->group()};
}

Tensor keys_in_order(const Tensor& values, bool descending) {
  const auto keys = sort_keys(values);
  return descending ? keys.bitwise_not() : keys;
}

struct InOrder {
  Tensor keys;
  Tensor values;
  Tensor places; // where they stood; equal ones in their order
};

/// By keys: PyTorch sorts integers in half the time of floating point numbers.
InOrder in_order(const Tensor& values, bool descending) {
  const auto [keys, places] = at::sort(
      keys_in_order(values, descending),
      /*stable=*/true,
      /*dim=*/0,
      /*descending=*/false);
  return {keys, values.index_select(0, places), places};
}

/// How many of the sorted rows each rank gets. Equal ones that several bounds
/// part go to several ranks, by their index.
std::vector<int64_t> rows_of_ranks(
    const Tensor& keys,
    const Tensor& indices,
    const Tensor& bounds,
    int64_t total) {
  const auto bound = host_numbers(bounds);
  const auto lower = host_numbers(at::searchsorted(keys, bounds));
  const auto upper =
      host_numbers(at::searchsorted(keys, bounds, false, /*right=*/true));
  std::vector<Tensor> equal_before;
  const auto count = static_cast<int64_t>(bound.size());
  for (int64_t first = 0, last = 0; first < count; first = last) {
    while (last < count && bound[last] == bound[first]) {
      ++last;
    }
    for (int64_t i = first; i < last; ++i) {
      const double share = static_cast<double>(i - first + 1) /
          static_cast<double>(last - first + 1);
      equal_before.push_back(
          at::searchsorted(
              indices.slice(0, lower[i], upper[i]),
              static_cast<int64_t>(static_cast<double>(total) * share)));
    }
  }
  const auto before = host_numbers(at::stack(equal_before));
  std::vector<int64_t> rows;
  int64_t begin = 0;
  for (int64_t i = 0; i <= count; ++i) {
    const int64_t end = i < count ? lower[i] + before[i] : keys.numel();
    rows.push_back(end - begin);
    begin = end;
  }
  return rows;
}

/// What belongs between a rank's bounds, in order, on that rank.
Sorted sort_between_bounds(
    const Tensor& own,
    const Sequence& sequence,
    bool descending) {
  const auto mine = in_order(own, descending);
  const auto indices =
      mine.places + sequence.layout->interval(sequence.dim).begin;
  const Route route(
      rows_of_ranks(
          mine.keys,
          indices,
          bounds_between_ranks(mine.keys, sequence.group),
          sequence.layout->size(sequence.dim)),
      indices.options(),
      sequence.group);
  // Of equal ones those of the ranks before come first.
  const auto all = in_order(route.send(mine.values), descending);
  return {all.values, route.send(indices).index_select(0, all.places)};
}

/// Communication: eight exchanges; values and indices travel twice.
Sorted sort_sequence(
    const Tensor& self,
    const Sequence& sequence,
    bool descending) {
  const auto& [layout, dim, group] = sequence;
  const auto own = local_of(self, layout).tensor;
  const auto found = sort_between_bounds(own.flatten(), sequence, descending);
  const auto between = with_partition(
      layout, dim, Partition(gather_number(std::get<0>(found).numel(), group)));
  const auto in_pieces = [&](const Tensor& rows) {
    return wrap(
        redistribute_local(
            rows.view(between->local_sizes()), between, sequence.layout),
        sequence.layout);
  };
  return {in_pieces(std::get<0>(found)), in_pieces(std::get<1>(found))};
}

Decision sort_rule(Call& call) {
  const auto& self = call.operand(0).tensor;
  call.set_output_sizes({self.sizes().vec(), self.sizes().vec()});
  auto decision = along_dim_rule(call);
  decision.strides_of = strides_of_first;
  return decision;
}

Sorted sort_kernel(
    const Tensor& self,
    std::optional<bool> stable,
    int64_t dim,
    bool descending) {
  const CommScope scope(at::_ops::sort_stable::name);
  const auto sequence =
      find_sequence(self, at::maybe_wrap_dim(dim, self.dim()));
  if (sequence) {
    return sort_sequence(self, *sequence, descending);
  }
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::sort", "stable");
  torch::jit::Stack stack{self, stable, dim, descending};
  run_rule(op, sort_rule, &stack);
  return {stack[0].toTensor(), stack[1].toTensor()};
}

Sorted default_sort_kernel(const Tensor& self, int64_t dim, bool descending) {
  return at::sort(self, /*stable=*/false, dim, descending);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("sort", default_sort_kernel);
  m.impl("sort.stable", sort_kernel);
}

} // namespace shardtensor::detail
