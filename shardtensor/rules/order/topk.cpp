#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/topk_ops.h>
#include <torch/library.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/dispatch/along_dim.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/layout/global_rows.h"
#include "shardtensor/tensor/order_keys.h"
#include "shardtensor/tensor/redistribute.h"

// The largest along a dim that is cut are among the largest of its pieces, of
// which each rank gets all. Which of equal elements are chosen, and in what
// order, PyTorch leaves open, and one device's choice depends on all elements:
// where there are any, the dim is made whole, as in other layouts.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Largest = std::tuple<Tensor, Tensor>; // values, indices

/// Fewer elements are moved: that is one exchange, not two.
constexpr int64_t kFewestSearched = 1 << 13;
/// Among these many times as many elements PyTorch's CPU kernel chooses in
/// order, whether `sorted` or not.
constexpr int64_t kInOrder = 64;

/// No other dim is cut, or ranks would see other elements, and equal ones of
/// which the others don't know.
bool is_cut_alone(const ShardSpec& spec, int64_t dim) {
  return !spec.is_whole(dim) && !spec.has_partial() &&
      std::ranges::all_of(spec.placements(), [&](const Placement& placement) {
        return !placement.is_shard() || placement.dim == dim;
      });
}

bool is_among_pieces(const Tensor& self, int64_t k, int64_t dim) {
  const auto& given = *spec(self);
  return is_cut_alone(given, dim) && self.numel() >= kFewestSearched && k > 0 &&
      kInOrder * k <= self.size(dim) &&
      2 * (k + 1) * given.partition(dim).pieces() <= self.size(dim) &&
      has_order_keys(self.scalar_type()) &&
      !has_no_values(impl_of(self)->local());
}

/// The own piece's largest, with indices into the whole dim; each rank's count
/// follows from the layout.
struct Candidates {
  Tensor values;
  Tensor indices;
  SpecPtr layout;
};

Candidates candidates_of(
    const Tensor& self,
    int64_t count,
    int64_t dim,
    bool largest) {
  const auto own = local_of(self).tensor;
  const auto& given = spec(self);
  const auto [values, rows] =
      own.topk(std::min(count, own.size(dim)), dim, largest);
  const auto& pieces = given->partition(dim);
  std::vector<int64_t> counts;
  for (int64_t piece = 0; piece < pieces.pieces(); ++piece) {
    counts.push_back(std::min(count, pieces.local_extent(piece)));
  }
  return {
      values,
      global_rows(rows, *given, dim, given->mesh()->position()),
      with_partition(given, dim, Partition(counts))};
}

bool has_equal_neighbours(const Tensor& values, int64_t dim) {
  const auto keys = sort_keys(values);
  const auto count = keys.size(dim) - 1;
  return keys.narrow(dim, 0, count)
      .eq(keys.narrow(dim, 1, count))
      .any()
      .item<bool>();
}

/// None where equal elements are to choose from: one more is looked at.
/// Communication: two exchanges of ranks * (k + 1) elements in each row.
std::optional<Largest> largest_among_pieces(
    const Tensor& self,
    int64_t k,
    int64_t dim,
    bool largest) {
  const auto found = candidates_of(self, k + 1, dim, largest);
  const auto whole = without_shard(found.layout, dim);
  const auto all = [&](const Tensor& own) {
    return redistribute_local(own, found.layout, whole);
  };
  const auto [values, places] = all(found.values).topk(k + 1, dim, largest);
  if (has_equal_neighbours(values, dim)) {
    return {};
  }
  const auto indices = all(found.indices).gather(dim, places);
  auto sizes = self.sizes().vec();
  sizes[dim] = k;
  const auto layout = with_sizes(whole, std::move(sizes));
  const auto chosen = [&](const Tensor& rows) {
    return wrap(rows.narrow(dim, 0, k).contiguous(), layout);
  };
  return Largest{chosen(values), chosen(indices)};
}

Largest topk_kernel(
    const Tensor& self,
    int64_t k,
    int64_t dim,
    bool largest,
    bool sorted) {
  const CommScope scope(at::_ops::topk::name);
  const auto wrapped = at::maybe_wrap_dim(dim, self.dim());
  if (self.dim() > 0 && is_among_pieces(self, k, wrapped)) {
    if (auto found = largest_among_pieces(self, k, wrapped, largest)) {
      return *std::move(found);
    }
  }
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::topk", "");
  constexpr auto& rule = rule_with_strides<along_dim_rule, row_major_strides>;
  torch::jit::Stack stack{self, k, dim, largest, sorted};
  run_rule(op, rule, &stack);
  return {stack[0].toTensor(), stack[1].toTensor()};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("topk", topk_kernel);
}

} // namespace shardtensor::detail
