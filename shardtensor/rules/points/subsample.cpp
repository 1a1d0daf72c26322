#include "shardtensor/rules/points/subsample.h"

#include <cmath>

#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/dispatch/promotion.h"
#include "shardtensor/rules/points/finite.h"
#include "shardtensor/rules/points/unique_rows.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"

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
  TORCH_CHECK_VALUE(
      points.dim() == 2 && points.size(0) > 0 && points.size(1) > 0,
      "grid_subsample: expected points (N, D), at least one, got ",
      points.sizes());
  TORCH_CHECK_TYPE(
      points.scalar_type() == at::kFloat || points.scalar_type() == at::kDouble,
      "grid_subsample: expected points of float32 or float64, got ",
      points.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(
      points.device().is_cpu(),
      "grid_subsample: expected points on the CPU, got ",
      points.device());
  TORCH_CHECK_VALUE(
      std::isfinite(size) && size > 0,
      "grid_subsample: size is ",
      size,
      ", expected a finite number > 0");
  TORCH_CHECK_VALUE(
      !values || (values->dim() == 2 && values->size(0) == points.size(0)),
      "grid_subsample: expected values (N, C) of points ",
      points.sizes(),
      ", got ",
      values ? values->sizes() : at::IntArrayRef());
}

/// On the host of each rank.
Tensor on_all_ranks(const Tensor& x) {
  return is_shard_tensor(x) ? full_tensor(x) : x;
}

/// Each point's cube, row-major among those between the outermost points.
Tensor cube_keys(const Tensor& points, double size) {
  constexpr double kMostCubes = 4611686018427387904.0; // 2^62
  const auto low = on_all_ranks(at::amin(points, 0));
  const auto high = on_all_ranks(at::amax(points, 0));
  double cubes = 1;
  Tensor keys;
  for (int64_t dim = 0; dim < points.size(1); ++dim) {
    const double first = low[dim].item<double>();
    const auto last = (high[dim].item<double>() - first) / size;
    cubes *= std::floor(last) + 1;
    TORCH_CHECK_VALUE(
        cubes < kMostCubes,
        "grid_subsample: size is ",
        size,
        ", expected fewer than 2^62 cubes between the outermost points");
    const auto place = points.select(1, dim)
                           .to(at::kDouble)
                           .sub(first)
                           .div(size)
                           .floor()
                           .to(at::kLong);
    const auto extent = static_cast<int64_t>(std::floor(last)) + 1;
    keys = dim == 0 ? place : keys.mul(extent).add(place);
  }
  return keys;
}

/// The sum of the rows (N, C) of each cube.
Tensor sum_by_cube(const Tensor& rows, const UniqueRows& cubes) {
  return zero_rows(
             cubes.keys,
             rows.sizes().slice(1),
             is_shard_tensor(rows) ? to_local(rows.detach()).options()
                                   : rows.options())
      .index_add(0, cubes.inverse, rows);
}

} // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> grid_subsample(
    const Tensor& points,
    double size,
    const OptionalTensor& values) {
  const CommScope scope("shardtensor::grid_subsample");
  check_subsample(points, size, values);
  auto cloud = points;
  auto given = values ? *values : points.detach().narrow(1, 0, 0);
  if (is_shard_tensor(points) || is_shard_tensor(given)) {
    const auto mesh = common_mesh(kSubsampleOp, {points, given});
    cloud = cut_rows(promote_operand(points, mesh, kSubsampleOp));
    given = promote_operand(given, mesh, kSubsampleOp);
  }
  check_finite(kSubsampleOp, cloud);
  const auto cubes = unique_rows(cube_keys(cloud.detach(), size));
  const auto ones = at::ones_like(cubes.inverse).unsqueeze(1);
  const auto counts = sum_by_cube(ones, cubes);
  return {
      sum_by_cube(cloud, cubes).div(counts),
      sum_by_cube(given, cubes).div(counts),
      counts.squeeze(1),
      cubes.inverse};
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
