#include "shardtensor/dispatch/arguments/index_bounds.h"

#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include <ATen/ops/aminmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/comm/own_operator.h"
#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/tensor/shown_elements.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor::detail {
namespace {

struct Bounds {
  int64_t low;
  int64_t high;
};

/// The lowest index times -1, and the highest.
at::Tensor extremes_of(const at::Tensor& index) {
  if (index.sym_numel().guard_int(__FILE__, __LINE__) == 0) { // in graphs, too
    return index.new_full(
        {2},
        std::numeric_limits<int64_t>::min(),
        index.options().dtype(at::kLong));
  }
  const auto [low, high] = at::aminmax(index.to(at::kLong));
  return at::stack({low.neg(), high});
}

Bounds to_bounds(const at::Tensor& extremes) {
  const auto numbers = host_numbers(extremes);
  return {-numbers[0], numbers[1]};
}

/// Those on all ranks. A step meets an index in forward and again in backward.
KnownOfShown<Bounds, 8>& known_bounds() {
  static auto& known = *new KnownOfShown<Bounds, 8>();
  return known;
}

/// Communication: one all-reduce, for an index that is not known.
Bounds bounds_on_all_ranks(const std::string& op, const at::Tensor& index) {
  const auto own = local_of(index);
  const auto axes = own.spec->sharded_axes();
  if (axes.empty()) {
    return to_bounds(extremes_of(own.tensor));
  }
  auto shown = shown_elements(index);
  if (const auto found = known_bounds().find(shown)) {
    return *found;
  }
  const CommScope scope(op.c_str());
  const auto bounds = to_bounds(all_reduce(
      extremes_of(own.tensor), Reduce::Max, *own.spec->mesh(), axes));
  known_bounds().add(std::move(shown), bounds);
  return bounds;
}

std::optional<int64_t> outside_of(
    const Bounds& bounds,
    int64_t lowest,
    int64_t extent) {
  if (bounds.low >= lowest && bounds.high < extent) {
    return std::nullopt;
  }
  return bounds.low < lowest ? bounds.low : bounds.high;
}

bool has_values(const at::Tensor& index) {
  return !has_no_values(
             is_shard_tensor(index) ? impl_of(index)->local() : index) &&
      index.numel() > 0 &&
      at::isIntegralType(index.scalar_type(), /*includeBool=*/false);
}

std::string out_of_bounds(
    const std::string& op,
    int64_t index,
    int64_t dim,
    int64_t extent) {
  return c10::str(
      op,
      ": index ",
      index,
      " is out of bounds for dimension ",
      dim,
      " with size ",
      extent);
}

// ---- in graphs --------------------------------------------------------------

// Where an index has no values yet the check is an operator of the graph, which
// is kept and ordered as all messages are.

/// `extremes` over the ranks of the group, which all raise where they leave
/// [lowest, extent).
at::Tensor check_bounds_kernel(
    const at::Tensor& extremes,
    int64_t lowest,
    int64_t extent,
    int64_t dim,
    std::string op,
    std::string group) {
  const CommScope scope(op.c_str());
  const auto all = all_reduce(extremes, Reduce::Max, group);
  const auto outside = outside_of(to_bounds(all), lowest, extent);
  TORCH_CHECK_INDEX(!outside, out_of_bounds(op, *outside, dim, extent));
  return all.is_same(extremes) ? all.clone() : all;
}

at::Tensor check_bounds_meta(
    const at::Tensor& extremes,
    int64_t /*lowest*/,
    int64_t /*extent*/,
    int64_t /*dim*/,
    std::string /*op*/,
    std::string /*group*/) {
  return at::empty_like(extremes);
}

bool is_cut_in_graph(const at::Tensor& index) {
  return is_shard_tensor(index) && is_traced(impl_of(index)->local()) &&
      spec(index)->is_sharded() &&
      c10::multiply_integers(spec(index)->sizes()) > 0;
}

void check_in_graph(
    const std::string& op,
    const at::Tensor& index,
    int64_t lowest,
    int64_t dim,
    int64_t extent) {
  static const auto check = find_own_operator<decltype(check_bounds_kernel)>(
      "shardtensor::check_bounds");
  const auto own = local_of(index);
  const auto& mesh = *own.spec->mesh();
  auto axes = own.spec->sharded_axes();
  auto extremes = extremes_of(own.tensor);
  const bool of_all = static_cast<int64_t>(axes.size()) == mesh.axes();
  const auto group = of_all ? mesh.group() : mesh.group(axes.back());
  axes.pop_back();
  if (!of_all) {
    extremes = all_reduce(extremes, Reduce::Max, mesh, axes);
  }
  check.call(extremes, lowest, extent, dim, op, group);
}

} // namespace

std::optional<int64_t> find_outside(
    const std::string& op,
    const at::Tensor& index,
    int64_t lowest,
    int64_t extent) {
  if (is_transformed(index)) {
    const OutsideTransforms of_all_levels;
    return find_outside(op, values_inside(index), lowest, extent);
  }
  if (!has_values(index)) {
    return std::nullopt;
  }
  const auto bounds = is_shard_tensor(index) ? bounds_on_all_ranks(op, index)
                                             : to_bounds(extremes_of(index));
  return outside_of(bounds, lowest, extent);
}

void check_planned_index(
    const std::string& op,
    const at::Tensor& index,
    int64_t dim,
    int64_t extent,
    bool may_be_negative) {
  const auto outside =
      find_outside(op, index, may_be_negative ? -extent : 0, extent);
  TORCH_CHECK_INDEX(!outside, out_of_bounds(op, *outside, dim, extent));
}

std::vector<int64_t> check_planned_index_and_reduce(
    const std::string& op,
    const at::Tensor& index,
    int64_t extent,
    bool may_be_negative,
    const at::Tensor& numbers) {
  const auto own = local_of(index);
  auto shown = shown_elements(index);
  auto bounds = known_bounds().find(shown);
  auto given = numbers.to(at::kLong);
  if (!bounds) {
    given = at::cat({extremes_of(own.tensor), given});
  }
  const auto& mesh = *own.spec->mesh();
  std::vector<int64_t> axes(mesh.axes());
  std::iota(axes.begin(), axes.end(), 0);
  const CommScope scope(op.c_str());
  auto reduced = host_numbers(all_reduce(given, Reduce::Max, mesh, axes));
  if (!bounds) {
    bounds = Bounds{-reduced[0], reduced[1]};
    known_bounds().add(std::move(shown), *bounds);
    reduced.erase(reduced.begin(), reduced.begin() + 2);
  }
  const auto outside =
      outside_of(*bounds, may_be_negative ? -extent : 0, extent);
  TORCH_CHECK_INDEX(!outside, out_of_bounds(op, *outside, 0, extent));
  return reduced;
}

void check_index(
    const std::string& op,
    const at::Tensor& index,
    int64_t dim,
    int64_t extent,
    bool may_be_negative) {
  if (!index.is_cpu()) {
    return;
  }
  if (is_cut_in_graph(index)) {
    check_in_graph(op, index, may_be_negative ? -extent : 0, dim, extent);
  } else {
    check_planned_index(op, index, dim, extent, may_be_negative);
  }
}

void check_gather_index(
    const std::string& op,
    const at::Tensor& index,
    int64_t dim,
    int64_t extent) {
  if (!index.is_cpu()) {
    return;
  }
  if (is_cut_in_graph(index)) {
    check_in_graph(op, index, 0, dim, extent);
  } else {
    const auto outside = find_outside(op, index, 0, extent);
    TORCH_CHECK(!outside, out_of_bounds(op, *outside, dim, extent));
  }
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeExplicitAutograd, m) {
  m.impl("check_bounds", check_bounds_kernel);
}
TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("check_bounds", check_bounds_meta);
}

} // namespace shardtensor::detail
