#include "shardtensor/cells/corners.h"

#include <limits>
#include <numeric>
#include <string>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "shardtensor/collectives/route.h"
#include "shardtensor/collectives/unique_keys.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/layout/cut_by_all.h"
#include "shardtensor/rules/points/unique_rows.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;

void check_corners(const Tensor& corners) {
  const auto dtype = corners.scalar_type();
  TORCH_CHECK_VALUE(
      corners.dim() == 3 && (dtype == at::kFloat || dtype == at::kDouble) &&
          corners.size(2) > 0,
      "merge_corners: expected corners (C, corners, D) of float32 or float64, "
      "got ",
      corners.sizes(),
      " of ",
      dtype);
}

/// Equal numbers for equal coordinates; zero has one sign, and there is one
/// NaN.
Tensor keys_of(const Tensor& coordinates) {
  const bool wide = coordinates.scalar_type() == at::kDouble;
  return coordinates.add(0.0)
      .masked_fill(
          coordinates.isnan(), std::numeric_limits<double>::quiet_NaN())
      .contiguous()
      .view(wide ? at::kLong : at::kInt)
      .to(at::kLong);
}

/// Equal numbers for equal rows: coordinate after coordinate, so that a key
/// stays one number.
UniqueKeys number_rows(const Tensor& rows, const std::string& group) {
  auto numbers = unique_keys(keys_of(rows.select(1, 0)), group);
  for (int64_t dim = 1; dim < rows.size(1); ++dim) {
    const auto next = unique_keys(keys_of(rows.select(1, dim)), group);
    numbers =
        unique_keys(numbers.inverse.mul(next.all()).add(next.inverse), group);
  }
  return numbers;
}

/// The lowest of the values of each row number.
Tensor lowest(const Tensor& rows, const Tensor& values, int64_t count) {
  return at::full(
             {count}, std::numeric_limits<int64_t>::max(), values.options())
      .scatter_reduce_(0, rows, values, "amin");
}

/// Numbers of the rows, from `first`.
Tensor numbers_beside(const Tensor& rows, int64_t first) {
  return at::arange(
      first, first + rows.size(0), rows.options().dtype(at::kLong));
}

/// A rank's corners become its corners of cells and its points.
struct Merged {
  Tensor cells; // (own corners)
  Tensor points; // (own points, D)
  std::vector<int64_t> sizes; // points of each rank
};

Merged merge_alone(const Tensor& rows) {
  const auto numbers = number_rows(rows, "");
  const auto places = numbers_beside(rows, 0);
  const auto order =
      unique_keys(lowest(numbers.inverse, places, numbers.all()), "");
  return {
      order.inverse.index_select(0, numbers.inverse),
      rows.index_select(0, order.keys),
      order.sizes};
}

/// `corners`: how those of all ranks are cut.
Merged merge_together(
    const Tensor& rows,
    const Partition& corners,
    int64_t rank,
    const std::string& group) {
  const auto numbers = number_rows(rows, group);
  const Partition owned(numbers.sizes);
  const auto own = owned.interval(rank);
  const auto begin = corners.interval(rank).begin;
  // Each number once, with its first place here, to the rank that owns it.
  const auto [named, inverse, counts] =
      at::_unique2(numbers.inverse, /*sorted=*/true, /*return_inverse=*/true);
  const auto places = numbers_beside(rows, begin);
  const auto firsts = lowest(inverse, places, named.numel());
  const Route to_owners(pieces_of(named, owned), group);
  const auto come = to_owners.send(at::stack({named, firsts}, 1));
  const auto asked = come.select(1, 0).sub(own.begin);
  const auto first = lowest(asked, come.select(1, 1), own.extent());
  // Points stand in the order of their first places, of which the rank that
  // gets a point asks for its coordinates.
  const auto order = unique_keys(first, group);
  const auto point = to_owners.answer(order.inverse.index_select(0, asked));
  const Route to_corners(pieces_of(order.keys, corners), group);
  const auto wanted = to_corners.send(order.keys).sub(begin);
  return {
      point.index_select(0, inverse),
      to_corners.answer(rows.index_select(0, wanted)),
      order.sizes};
}

/// The corners of all ranks, from how their cells are cut.
Partition corners_of(const Partition& cells, int64_t each) {
  std::vector<int64_t> sizes;
  for (int64_t piece = 0; piece < cells.pieces(); ++piece) {
    sizes.push_back(cells.interval(piece).extent() * each);
  }
  return Partition(sizes);
}

} // namespace

std::tuple<Tensor, Tensor> merge_corners(const Tensor& all) {
  const CommScope scope("shardtensor::merge_corners");
  check_corners(all);
  const OutsideTransforms of_all_levels;
  const auto given = value_inside(all);
  const auto each = given.size(1);
  const auto dims = given.size(2);
  const auto rows_of = [&](const Tensor& corners) {
    return corners.reshape({-1, dims});
  };
  if (!layout_of(given)) {
    const auto merged = merge_alone(rows_of(given.detach()));
    return {merged.points, merged.cells.view({-1, each})};
  }
  auto corners = cut_rows(given.detach());
  corners = redistribute(corners, without_partial(spec_inside(corners)));
  const auto layout = spec_inside(corners);
  const auto& mesh = layout->mesh();
  const auto rows = rows_of(to_local(corners));
  const bool is_cut = layout->is_sharded();
  const auto merged = is_cut ? merge_together(
                                   rows,
                                   corners_of(layout->partition(0), each),
                                   mesh->position(),
                                   mesh->group())
                             : merge_alone(rows);
  const auto count =
      std::accumulate(merged.sizes.begin(), merged.sizes.end(), int64_t{0});
  const auto of_points = is_cut
      ? cut_by_all(mesh, {count, dims}, 0, Partition(merged.sizes))
      : make_spec(mesh, {count, dims}, layout->placements());
  return {
      from_local(merged.points, of_points),
      from_local(
          merged.cells.view({-1, each}),
          with_dims(layout, {given.size(0), each}, {0, -1}))};
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("merge_corners", merge_corners);
}
TORCH_LIBRARY_IMPL(shardtensor, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("merge_corners", merge_corners);
}

} // namespace shardtensor
