#include "shardtensor/rules/points/subsample.h"

#include <algorithm>
#include <cmath>

#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/rules/points/finite.h"
#include "shardtensor/rules/points/unique_rows.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr auto kSubsampleOp = "grid_subsample";

void check_subsample(
    const Tensor& points,
    double size,
    const OptionalTensor& values) {
  const auto rank = static_cast<size_t>(std::max<int64_t>(points.dim() - 1, 0));
  TORCH_CHECK_VALUE(
      (points.dim() == 2 || points.dim() == 3) && points.numel() > 0,
      "grid_subsample: expected points ([B,] N, D), at least one, got ",
      points.sizes());
  TORCH_CHECK_TYPE(
      points.scalar_type() == at::kFloat || points.scalar_type() == at::kDouble,
      "grid_subsample: expected points of float32 or float64, got ",
      points.scalar_type());
  TORCH_CHECK_VALUE(
      std::isfinite(size) && size > 0,
      "grid_subsample: size is ",
      size,
      ", expected a finite number > 0");
  TORCH_CHECK_VALUE(
      !values ||
          (values->dim() == points.dim() &&
           values->sizes().slice(0, rank) == points.sizes().slice(0, rank)),
      "grid_subsample: expected values ([B,] N, C) of points ",
      points.sizes(),
      ", got ",
      values ? values->sizes() : at::IntArrayRef());
  TORCH_CHECK_VALUE(
      !values || values->device() == points.device(),
      "grid_subsample: expected points and values on one device, got ",
      points.device(),
      " and ",
      values->device());
}

/// Rows ([B,] N, ...) as (N, B, ...), cut along N if at all.
Tensor by_points(const Tensor& x) {
  return cut_rows(x.dim() == 3 ? x.transpose(0, 1) : x.unsqueeze(1));
}

/// Whole, on each rank.
Tensor on_all_ranks(const Tensor& x) {
  return layout_of(x) ? full_tensor(x) : x;
}

/// On the mesh of `other`, if it has one.
Tensor beside(const Tensor& x, const Tensor& other) {
  return layout_of(other) ? promote(x, spec_inside(other)->mesh()) : x;
}

struct Keys {
  Tensor all; // (N, B)
  int64_t of_entry; // how many each entry of the batch has
};

/// Each point's cube: those of an entry follow those of the entry before,
/// row-major among those between its outermost points.
Keys cube_keys(const Tensor& given, double size) {
  const OutsideTransforms of_all_levels;
  const auto points = value_inside(given).detach();
  constexpr double kMostCubes = 4611686018427387904.0; // 2^62
  const auto low = on_all_ranks(at::amin(points, 0)).to(at::kDouble);
  const auto high = on_all_ranks(at::amax(points, 0)).to(at::kDouble);
  // By a number a GPU would multiply by its inverse, another cube's edge.
  const auto edge = at::full({}, size, low.options());
  const auto last = high.sub(low).div(edge).amax(0).floor().cpu();
  const int64_t entries = points.size(1);
  TORCH_CHECK_VALUE(
      last.add(1).prod().item<double>() * static_cast<double>(entries) <
          kMostCubes,
      "grid_subsample: size is ",
      size,
      ", expected fewer than 2^62 cubes between the outermost points");
  const auto of_entries = at::arange(entries, low.options().dtype(at::kLong));
  Keys keys{beside(of_entries, points), 1};
  for (int64_t dim = 0; dim < points.size(2); ++dim) {
    const auto place = points.select(2, dim)
                           .to(at::kDouble)
                           .sub(beside(low.select(1, dim), points))
                           .div(edge)
                           .floor()
                           .to(at::kLong);
    const auto extent = last[dim].item<int64_t>() + 1;
    keys.all = keys.all.mul(extent).add(place);
    keys.of_entry *= extent;
  }
  return keys;
}

/// The sum of the rows (N, C) of each cube.
Tensor sum_by_cube(const Tensor& rows, const UniqueRows& cubes) {
  return zero_rows(
             cubes.keys,
             rows.sizes().slice(1),
             layout_of(rows) ? to_local(rows.detach()).options()
                             : rows.options())
      .index_add(0, cubes.inverse, rows);
}

} // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> grid_subsample(
    const Tensor& points,
    double size,
    const OptionalTensor& values) {
  const CommScope scope("shardtensor::grid_subsample");
  check_subsample(points, size, values);
  auto cloud = points;
  auto given = values ? *values : points.detach().narrow(-1, 0, 0);
  if (layout_of(points) || layout_of(given)) {
    const auto mesh = common_mesh(kSubsampleOp, {points, given});
    cloud = promote_operand(points, mesh, kSubsampleOp);
    given = promote_operand(given, mesh, kSubsampleOp);
  }
  cloud = by_points(cloud);
  check_finite(kSubsampleOp, cloud);
  const auto keys = cube_keys(cloud, size);
  const auto cubes = unique_rows(keys.all.flatten());
  const auto ones = at::ones_like(cubes.inverse).unsqueeze(1);
  const auto counts = sum_by_cube(ones, cubes);
  const auto mean = [&](const Tensor& rows) {
    return sum_by_cube(rows.flatten(0, 1), cubes).div(counts);
  };
  const auto of_points = cubes.inverse.view(keys.all.sizes());
  return {
      mean(cloud),
      mean(by_points(given)),
      counts.squeeze(1),
      points.dim() == 3 ? of_points.t() : of_points.squeeze(1),
      cubes.keys.div(keys.of_entry, "floor")};
}

namespace {

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("grid_subsample", grid_subsample);
}
TORCH_LIBRARY_IMPL(shardtensor, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("grid_subsample", grid_subsample);
}

} // namespace

} // namespace shardtensor
