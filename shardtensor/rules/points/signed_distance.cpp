#include "shardtensor/rules/points/signed_distance.h"

#include <cmath>
#include <limits>
#include <numeric>

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_cross.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "shardtensor/comm/primitives/all_reduce.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/points/surface.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;

constexpr auto kSurfaceOp = "signed_distance_field";

// ---- what is given ----------------------------------------------------------

void check_surface_shapes(
    const Tensor& vertices,
    const Tensor& faces,
    const Tensor& points) {
  TORCH_CHECK_VALUE(
      vertices.dim() == 2 && vertices.size(1) == 3,
      kSurfaceOp,
      ": expected mesh_vertices (V, 3), got ",
      vertices.sizes());
  TORCH_CHECK_VALUE(
      (faces.dim() == 2 && faces.size(1) == 3) ||
          (faces.dim() == 1 && faces.size(0) % 3 == 0),
      kSurfaceOp,
      ": expected mesh_indices (F, 3) or (3 F), got ",
      faces.sizes());
  TORCH_CHECK_VALUE(
      points.dim() >= 1 && points.size(-1) == 3,
      kSurfaceOp,
      ": expected input_points (..., 3), got ",
      points.sizes());
}

void check_surface_kinds(
    const Tensor& vertices,
    const Tensor& faces,
    const Tensor& points,
    double max_dist) {
  TORCH_CHECK_TYPE(
      (vertices.scalar_type() == at::kFloat ||
       vertices.scalar_type() == at::kDouble) &&
          vertices.scalar_type() == points.scalar_type(),
      kSurfaceOp,
      ": expected vertices and points of one dtype, float32 or float64, got ",
      vertices.scalar_type(),
      " and ",
      points.scalar_type());
  TORCH_CHECK_TYPE(
      faces.scalar_type() == at::kLong || faces.scalar_type() == at::kInt,
      kSurfaceOp,
      ": expected mesh_indices of int32 or int64, got ",
      faces.scalar_type());
  TORCH_CHECK_VALUE(
      vertices.device() == points.device() && faces.device() == points.device(),
      kSurfaceOp,
      ": expected vertices, indices and points on one device, got ",
      vertices.device(),
      ", ",
      faces.device(),
      " and ",
      points.device());
  TORCH_CHECK_VALUE(
      max_dist >= 0,
      kSurfaceOp,
      ": max_dist is ",
      max_dist,
      ", expected a number >= 0");
}

/// A call's operands on this rank: vertices (V, 3) and faces (F, 3), all of
/// them, and points (Q, 3).
struct SurfaceCall {
  Tensor vertices;
  Tensor faces;
  Tensor points;
  MeshPtr mesh; // null for plain tensors
  SpecPtr layout; // of the points
};

/// Whole, on every rank; ranks compute terms of its gradient where they have
/// different points.
Tensor whole_surface(
    const Tensor& given,
    const MeshPtr& mesh,
    const ShardSpec& points) {
  const auto tensor = promote_operand(given, mesh, kSurfaceOp);
  const auto layout = replicated(spec_inside(tensor));
  auto terms = layout->placements();
  for (const int64_t axis : points.sharded_axes()) {
    terms[axis] = Placement::partial();
  }
  return to_local(redistribute(tensor, layout), with_placements(layout, terms));
}

SurfaceCall surface_call(
    const Tensor& vertices,
    const Tensor& faces,
    const Tensor& points) {
  SurfaceCall call{vertices, faces, points, nullptr, nullptr};
  if (layout_of(vertices) || layout_of(faces) || layout_of(points)) {
    call.mesh = common_mesh(kSurfaceOp, {vertices, faces, points});
    const auto given = promote_operand(points, call.mesh, kSurfaceOp);
    call.layout =
        without_shard(without_partial(spec_inside(given)), points.dim() - 1);
    call.points = to_local(redistribute(given, call.layout));
    call.vertices = whole_surface(vertices, call.mesh, *call.layout);
    call.faces = whole_surface(faces, call.mesh, *call.layout);
  }
  call.points = call.points.reshape({-1, 3});
  call.faces = call.faces.reshape({-1, 3}).to(at::kLong).contiguous();
  return call;
}

/// What is searched, which has no derivative.
SurfaceCall values_of(const SurfaceCall& call) {
  const OutsideTransforms of_all_levels;
  return {
      value_inside(call.vertices).detach(),
      value_inside(call.faces),
      value_inside(call.points).detach(),
      call.mesh,
      call.layout};
}

/// The same on all ranks: all have the surface, and they agree on the points.
void check_surface(const SurfaceCall& call) {
  const OutsideTransforms of_all_levels;
  const auto vertices = call.vertices.size(0);
  const auto outside = call.faces.lt(0).logical_or(call.faces.ge(vertices));
  TORCH_CHECK_INDEX(
      !outside.any().item<bool>(),
      kSurfaceOp,
      ": mesh_indices has ",
      call.faces.masked_select(outside).numel() > 0
          ? call.faces.masked_select(outside)[0].item<int64_t>()
          : 0,
      ", expected a row of ",
      vertices,
      " vertices");
  auto failed = at::isfinite(call.points)
                    .all()
                    .logical_and(at::isfinite(call.vertices).all())
                    .logical_not()
                    .to(at::kInt);
  if (call.mesh) {
    std::vector<int64_t> axes(call.mesh->axes());
    std::iota(axes.begin(), axes.end(), 0);
    failed = all_reduce(failed, Reduce::Max, *call.mesh, axes);
  }
  TORCH_CHECK_VALUE(
      failed.item<int64_t>() == 0,
      kSurfaceOp,
      ": expected finite coordinates, got NaN or infinite ones");
}

// ---- from the nearest part to results ---------------------------------------

Tensor doubles(const Tensor& x) {
  return x.cpu().to(at::kDouble).contiguous();
}

/// On the host, where the tree is; what is found is where the points are.
NearestFaces search_surface(
    const SurfaceCall& call,
    double max_dist,
    SurfaceSign sign) {
  const OutsideTransforms of_all_levels;
  const auto found = Surface(doubles(call.vertices), call.faces.cpu())
                         .nearest(doubles(call.points), max_dist, sign);
  const auto device = call.points.device();
  return {
      found.faces.to(device), found.parts.to(device), found.signs.to(device)};
}

Tensor row_dot(const Tensor& a, const Tensor& b) {
  return a.mul(b).sum(-1, /*keepdim=*/true);
}

/// Where each query's nearest part, which stays the same, is nearest to it:
/// corner 0, or along edge 0, or on the plane of the face whose corners begin
/// with that part. In double, and by the normal: the area of a sliver that two
/// edges' products tell is a difference that may be none.
Tensor nearest_points(
    const Tensor& vertices,
    const Tensor& all_faces,
    const Tensor& points,
    const NearestFaces& found) {
  const auto first = found.parts.remainder(3).clamp_min(0);
  const auto faces = all_faces.index_select(0, found.faces.clamp_min(0));
  const auto corner = [&](int64_t i) {
    const auto place = first.add(i).remainder(3).unsqueeze(1);
    return vertices.index_select(0, faces.gather(1, place).squeeze(1));
  };
  const auto from = corner(0);
  const auto u = corner(1).sub(from);
  const auto normal = at::linalg_cross(u, corner(2).sub(from));
  const auto way = points.sub(from);
  const auto share = [&](const Tensor& is_part, const Tensor& along) {
    const auto square = at::where(is_part, row_dot(along, along), 1);
    return at::where(is_part, row_dot(way, along).div(square).mul(along), 0);
  };
  const auto inside = found.parts.eq(NearestFaces::kInside).unsqueeze(1);
  const auto on_edge = found.parts.ge(3).unsqueeze(1).logical_and(~inside);
  return at::where(
      inside, points.sub(share(inside, normal)), from.add(share(on_edge, u)));
}

/// The signed length of the way; its derivatives are zero at zero.
Tensor signed_distances_of(const Tensor& way, const Tensor& signs) {
  const auto squares = way.square().sum(-1);
  const auto none = squares.eq(0);
  return squares.masked_fill(none, 1).sqrt().masked_fill(none, 0).mul(
      signs.to(way.scalar_type()));
}

/// A result (Q, ...) of this rank, as the points came.
Tensor beside_points(
    const Tensor& local,
    const SurfaceCall& call,
    const Tensor& points) {
  auto lead = call.layout ? call.layout->local_sizes() : points.sizes().vec();
  lead.pop_back();
  for (int64_t dim = 1; dim < local.dim(); ++dim) {
    lead.push_back(local.size(dim));
  }
  const auto result = local.reshape(lead);
  if (!call.layout) {
    return result;
  }
  auto sizes = points.sizes().vec();
  std::vector<int64_t> from(sizes.size());
  std::iota(from.begin(), from.end(), 0);
  sizes.resize(lead.size());
  from.resize(lead.size());
  return from_local(result, with_dims(call.layout, sizes, from));
}

} // namespace

std::tuple<Tensor, Tensor, Tensor> signed_distance_field(
    const Tensor& mesh_vertices,
    const Tensor& mesh_indices,
    const Tensor& input_points,
    double max_dist,
    bool use_sign_winding_number) {
  const CommScope scope("shardtensor::signed_distance_field");
  check_surface_shapes(mesh_vertices, mesh_indices, input_points);
  check_surface_kinds(mesh_vertices, mesh_indices, input_points, max_dist);
  const auto call = surface_call(mesh_vertices, mesh_indices, input_points);
  const auto values = values_of(call);
  check_surface(values);
  const auto found = search_surface(
      values,
      max_dist,
      use_sign_winding_number ? SurfaceSign::Winding : SurfaceSign::Normal);
  if (call.faces.size(0) == 0) {
    const auto nothing = call.points.mul(std::nan(""));
    return {
        beside_points(nothing.sum(-1), call, input_points),
        beside_points(nothing, call, input_points),
        beside_points(found.faces, call, input_points)};
  }
  const auto none = found.faces.lt(0);
  const auto points = call.points.to(at::kDouble);
  const auto exact =
      nearest_points(call.vertices.to(at::kDouble), call.faces, points, found);
  const auto distances = signed_distances_of(points.sub(exact), found.signs)
                             .to(call.points.scalar_type());
  const auto nearest = exact.to(call.points.scalar_type());
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  return {
      beside_points(distances.masked_fill(none, kNan), call, input_points),
      beside_points(
          nearest.masked_fill(none.unsqueeze(1), kNan), call, input_points),
      beside_points(found.faces, call, input_points)};
}

namespace {

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("signed_distance_field", signed_distance_field);
}
TORCH_LIBRARY_IMPL(shardtensor, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("signed_distance_field", signed_distance_field);
}

} // namespace

} // namespace shardtensor
