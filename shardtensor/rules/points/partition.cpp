#include "shardtensor/rules/points/partition.h"

#include <limits>

#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/collectives/route.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/layout/cut_by_all.h"
#include "shardtensor/points/curve.h"
#include "shardtensor/rules/points/bisection.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr auto kPartitionOp = "partition_points";

void check_arguments(
    const Tensor& points,
    const std::string& method,
    const OptionalTensor& weights,
    const OptionalTensor& owners) {
  TORCH_CHECK_VALUE(
      method == "rcb" || method == "hilbert" || method == "given",
      "partition_points: expected method 'rcb', 'hilbert' or 'given', got '",
      method,
      "'");
  TORCH_CHECK_VALUE(
      points.dim() == 2 && points.size(1) > 0,
      "partition_points: expected points (N, D), got ",
      points.sizes());
  TORCH_CHECK_TYPE(
      points.scalar_type() == at::kFloat || points.scalar_type() == at::kDouble,
      "partition_points: expected points of float32 or float64, got ",
      points.scalar_type());
  TORCH_CHECK_VALUE(
      (method == "given") == owners.has_value(),
      "partition_points: expected owners with method 'given' and no other, got ",
      owners ? "some" : "none",
      " with '",
      method,
      "'");
  for (const auto* each : {&weights, &owners}) {
    TORCH_CHECK_VALUE(
        !*each || ((*each)->dim() == 1 && (*each)->size(0) == points.size(0)),
        "partition_points: expected ",
        points.size(0),
        each == &weights ? " weights, got " : " owners, got ",
        (*each)->sizes());
  }
  TORCH_CHECK_TYPE(
      !owners || owners->scalar_type() == at::kLong,
      "partition_points: expected owners of int64, got ",
      owners ? owners->scalar_type() : at::kLong);
}

/// Points stay on their device; who gets them is found on the host.
class Partitioner {
 public:
  explicit Partitioner(const Tensor& points)
      : mesh_(spec_inside(points)->mesh()),
        layout_(cut_by_all(spec_inside(points), 0)),
        points_(to_local(redistribute(points, layout_))),
        rows_(value_inside(
            at::arange(points_.size(0), at::kLong)
                .add(layout_->interval(0).begin))) {}

  std::tuple<Tensor, Tensor> run(
      const std::string& method,
      const OptionalTensor& weights,
      const OptionalTensor& owners) {
    Tensor codes;
    Tensor given;
    {
      const OutsideTransforms of_all_levels;
      const auto weight = weights_of(weights);
      const bool is_given = method == "given";
      given = is_given ? beside(*owners) : Tensor();
      check_values(weight, given);
      codes = is_given ? rows_ : hilbert_codes_of_all();
      given = is_given ? given : owners_by(method, codes, weight);
    }
    return send(given, codes);
  }

 private:
  Tensor beside(const Tensor& x) const {
    const auto layout =
        cut_by_all(mesh_, {layout_->size(0)}, 0, layout_->partition(0));
    const auto whole =
        promote_operand(value_inside(x).detach(), mesh_, kPartitionOp);
    return to_local(redistribute(whole, layout)).cpu().contiguous();
  }

  Tensor points_on_host() const {
    return value_inside(points_).detach().cpu().to(at::kDouble).contiguous();
  }

  Tensor weights_of(const OptionalTensor& weights) const {
    return weights ? beside(*weights).to(at::kDouble)
                   : at::ones({rows_.numel()}, at::kDouble);
  }

  /// Raises on every rank if it must on one.
  void check_values(const Tensor& weights, const Tensor& owners) const {
    const auto finite =
        at::isfinite(value_inside(points_).detach()).all().cpu();
    const auto weighs = at::isfinite(weights).logical_and(weights.ge(0)).all();
    const auto on_mesh = owners.defined()
        ? owners.ge(0).logical_and(owners.lt(mesh_->ranks())).all()
        : at::ones({}, at::kBool);
    const auto found = at::stack(
        {finite.logical_not(),
         weighs.logical_not(),
         on_mesh.logical_not(),
         weights.gt(0).any()});
    const auto all =
        reduce_numbers(found.to(at::kInt), Reduce::Max, mesh_->group());
    const auto is_found = [&](int64_t i) {
      return all.select(0, i).item<int64_t>() != 0;
    };
    TORCH_CHECK_VALUE(
        !is_found(0),
        "partition_points: expected finite coordinates, got NaN or infinite "
        "ones");
    TORCH_CHECK_VALUE(
        !is_found(1),
        "partition_points: expected finite weights >= 0, got others");
    TORCH_CHECK_VALUE(
        !is_found(2),
        "partition_points: expected owners in [0, ",
        mesh_->ranks(),
        "), the positions in the mesh, got others");
    const auto count = layout_->size(0);
    TORCH_CHECK_VALUE(
        is_found(3) || count == 0 || owners.defined(),
        "partition_points: expected a weight > 0, got ",
        count,
        " of 0");
  }

  Tensor hilbert_codes_of_all() const {
    const auto points = points_on_host();
    const int64_t dims = points.size(1);
    const auto lowest = at::full(
        {1, dims}, -std::numeric_limits<double>::infinity(), at::kDouble);
    const auto high = at::amax(at::cat({points, lowest}), {0});
    const auto low = at::amax(at::cat({points.neg(), lowest}), {0});
    const auto corners =
        reduce_numbers(at::stack({low, high}), Reduce::Max, mesh_->group());
    return hilbert_codes(
        points,
        corners.select(0, 0).neg().contiguous(),
        corners.select(0, 1).contiguous());
  }

  Tensor owners_by(
      const std::string& method,
      const Tensor& codes,
      const Tensor& weights) const {
    return bisect(
        {points_on_host(),
         method == "hilbert" ? codes : Tensor(),
         rows_,
         weights},
        *mesh_);
  }

  std::tuple<Tensor, Tensor> send(const Tensor& owners, const Tensor& codes) {
    const auto device = points_.device();
    const Route route(owners.to(device), mesh_->group());
    const auto places = route.send(at::stack({codes, rows_}, 1).to(device));
    const auto points = route.send(points_);
    const auto own = along(places);
    const Partition pieces(gather_number(own.numel(), mesh_->group()));
    auto sizes = layout_->sizes();
    const auto rows = places.select(1, 1).index_select(0, own);
    return {
        from_local(
            points.index_select(0, own), cut_by_all(mesh_, sizes, 0, pieces)),
        from_local(rows, cut_by_all(mesh_, {sizes[0]}, 0, pieces))};
  }

  /// The order of (code, row).
  static Tensor along(const Tensor& places) {
    const auto by_row = places.select(1, 1).argsort(true, 0, false);
    const auto codes = places.select(1, 0).index_select(0, by_row);
    return by_row.index_select(0, codes.argsort(true, 0, false));
  }

  MeshPtr mesh_;
  SpecPtr layout_;
  Tensor points_;
  Tensor rows_; // of the whole cloud
};

std::tuple<Tensor, Tensor> partition_points_function(
    const Tensor& points,
    std::string method,
    const OptionalTensor& weights,
    const OptionalTensor& owners) {
  const CommScope scope("shardtensor::partition_points");
  check_arguments(points, method, weights, owners);
  return Partitioner(points).run(method, weights, owners);
}

TORCH_LIBRARY_IMPL(shardtensor, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("partition_points", partition_points_function);
}

} // namespace

std::tuple<Tensor, Tensor> partition_points(
    const Tensor& points,
    const std::string& method,
    const OptionalTensor& weights,
    const OptionalTensor& owners) {
  return partition_points_function(points, method, weights, owners);
}

} // namespace shardtensor
