#include "shardtensor/rules/points/interpolate.h"

#include <cmath>

#include <ATen/ops/where.h>
#include <torch/library.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/rules/points/neighbour_call.h"
#include "shardtensor/tensor/keys.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;

constexpr auto kInterpolateOp = "interpolate_neighbors";

void check_interpolation(
    const Tensor& points,
    const Tensor& values,
    int64_t k,
    double power) {
  TORCH_CHECK_VALUE(
      values.dim() == points.dim() &&
          values.sizes().slice(0, values.dim() - 1) ==
              points.sizes().slice(0, points.dim() - 1),
      kInterpolateOp,
      ": expected values ([B,] N, C) of points ([B,] N, D), got ",
      values.sizes(),
      " and ",
      points.sizes());
  TORCH_CHECK_TYPE(
      values.scalar_type() == points.scalar_type(),
      kInterpolateOp,
      ": expected values of the points' dtype, ",
      points.scalar_type(),
      ", got ",
      values.scalar_type());
  check_k(kInterpolateOp, k, points);
  TORCH_CHECK_VALUE(
      std::isfinite(power) && power > 0,
      kInterpolateOp,
      ": power is ",
      power,
      ", expected a finite number > 0");
}

/// Of squared distances (B, M, k), ascending: they sum to 1. Relative to the
/// nearest one's, so that none overflows.
Tensor weights_of(const Tensor& squares, double power) {
  const auto nearest = squares.narrow(2, 0, 1);
  const auto hits = nearest.eq(0); // a query at a point
  const auto safe = squares.masked_fill(squares.eq(0), 1);
  const auto ratios = nearest.masked_fill(hits, 1).div(safe);
  const auto own = squares.eq(0).to(squares.scalar_type());
  const auto weights = at::where(hits, own, ratios.pow(power / 2));
  return weights.div(weights.sum(-1, true));
}

} // namespace

Tensor interpolate_neighbors(
    const Tensor& points,
    const Tensor& values,
    const Tensor& queries,
    int64_t k,
    double power) {
  const CommScope scope("shardtensor::interpolate_neighbors");
  const NeighbourCall call(kInterpolateOp, points, queries);
  check_interpolation(points, values, k, power);
  const auto local = call.beside_points(values);
  const auto nearest = search(call.local(), {k, std::nullopt}).nearest;
  const auto list = list_of(nearest, /*may_have_none=*/false);
  const auto weights = weights_of(squares_of(call.local(), list), power);
  const auto shares = weights.unsqueeze(-1);
  // A point without weight does not count, whatever its value.
  const auto found =
      values_of(call.local(), local, list).masked_fill(shares.eq(0), 0);
  return call.beside_queries(found.mul(shares).sum(2));
}

namespace {

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("interpolate_neighbors", interpolate_neighbors);
}
TORCH_LIBRARY_IMPL(shardtensor, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("interpolate_neighbors", interpolate_neighbors);
}

} // namespace

} // namespace shardtensor
