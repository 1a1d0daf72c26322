#include "shardtensor/rules/points/neighbour_call.h"

#include <cmath>
#include <limits>
#include <numeric>

#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>

#include "shardtensor/comm/check.h"
#include "shardtensor/comm/check_mode.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/rules/points/finite.h"
#include "shardtensor/rules/points/nearest_op.h"
#include "shardtensor/rules/points/rows_of_cloud.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

void check_operands(
    const char* op,
    const Tensor& points,
    const Tensor& queries) {
  const int64_t dims = points.dim();
  TORCH_CHECK_VALUE(
      (dims == 2 || dims == 3) && queries.dim() == dims &&
          points.size(-1) == queries.size(-1) && points.size(-1) > 0 &&
          (dims == 2 || points.size(0) == queries.size(0)),
      op,
      ": expected points ([B,] N, D) and queries ([B,] M, D), got ",
      points.sizes(),
      " and ",
      queries.sizes());
  TORCH_CHECK_VALUE(
      points.size(-2) <= std::numeric_limits<int32_t>::max(),
      op,
      ": expected fewer than 2^31 points, got ",
      points.size(-2));
  TORCH_CHECK_TYPE(
      (points.scalar_type() == at::kFloat ||
       points.scalar_type() == at::kDouble) &&
          points.scalar_type() == queries.scalar_type(),
      op,
      ": expected points and queries of one dtype, float32 or float64, got ",
      points.scalar_type(),
      " and ",
      queries.scalar_type());
  TORCH_CHECK_VALUE(
      points.device() == queries.device(),
      op,
      ": expected points and queries on one device, got ",
      points.device(),
      " and ",
      queries.device());
}

/// The layout of what has the first dims of `spec`, up to its rows, and whole
/// ones behind them.
SpecPtr with_tail(const SpecPtr& spec, const Tensor& like) {
  const int64_t rows = spec->dim() - 1;
  std::vector<int64_t> sizes(
      spec->sizes().begin(), spec->sizes().begin() + rows);
  std::vector<int64_t> from(rows);
  std::iota(from.begin(), from.end(), 0);
  for (int64_t dim = rows; dim < like.dim(); ++dim) {
    sizes.push_back(like.size(dim));
    from.push_back(-1);
  }
  return with_dims(spec, sizes, from);
}

} // namespace

void check_k(const char* op, int64_t k, const Tensor& points) {
  TORCH_CHECK_VALUE(
      k >= 1 && k <= points.size(-2),
      op,
      ": k is ",
      k,
      ", expected 1 <= k <= ",
      points.size(-2),
      ", the number of points");
}

void check_radius(const char* op, double radius) {
  TORCH_CHECK_VALUE(
      radius >= 0 && std::isfinite(radius),
      op,
      ": radius is ",
      radius,
      ", expected a finite number >= 0");
}

void check_max_points(const char* op, int64_t max_points) {
  TORCH_CHECK_VALUE(
      max_points >= 1,
      op,
      ": max_points is ",
      max_points,
      ", expected at least 1");
}

void check_finite(const LocalCall& call) {
  check_finite(
      call.op, call.points, call.queries, call.mesh ? call.mesh->group() : "");
}

NeighbourCall::NeighbourCall(
    const char* op,
    const Tensor& points,
    const Tensor& queries,
    bool whole_queries)
    : batched_(points.dim() == 3) {
  local_.op = op;
  check_operands(op, points, queries);
  if (layout_of(points) || layout_of(queries)) {
    lay_out(points, queries, whole_queries);
  } else {
    local_.points = points;
    local_.queries = queries;
    local_.cloud.rows = {{0, points.size(-2)}};
  }
  if (!batched_) {
    local_.points = local_.points.unsqueeze(0);
    local_.queries = local_.queries.unsqueeze(0);
  }
}

void NeighbourCall::lay_out(
    const Tensor& points,
    const Tensor& queries,
    bool whole_queries) {
  local_.mesh = common_mesh(local_.op, {points, queries});
  const auto cloud = promote_operand(points, local_.mesh, local_.op);
  const auto from = promote_operand(queries, local_.mesh, local_.op);
  const auto layouts =
      plan_points(spec_inside(cloud), spec_inside(from), whole_queries);
  local_.points =
      to_local(redistribute(cloud, layouts.points), layouts.point_terms);
  local_.queries = to_local(redistribute(from, layouts.queries));
  local_.cloud = layouts.cloud;
  layout_ = layouts.queries;
  given_ = without_partial(spec_inside(from));
  points_ = layouts.points;
  point_terms_ = layouts.point_terms;
}

Tensor NeighbourCall::beside_points(const Tensor& values) const {
  auto local = values;
  if (local_.mesh) {
    const auto given = promote_operand(values, local_.mesh, local_.op);
    local = to_local(
        redistribute(given, with_tail(points_, values)),
        with_tail(point_terms_, values));
  } else {
    TORCH_CHECK_VALUE(
        !layout_of(values),
        local_.op,
        ": expected points or queries to be ShardTensors where values are");
  }
  return batched_ ? local : local.unsqueeze(0);
}

Tensor NeighbourCall::beside_queries(Tensor local) const {
  if (!batched_) {
    local = local.squeeze(0);
  }
  if (!local_.mesh) {
    return local;
  }
  const auto result = from_local(local, with_tail(layout_, local));
  return redistribute(result, with_tail(given_, local));
}

void check_same_number(const LocalCall& call, const char* name, double number) {
  if (check_mode() && call.mesh && !is_traced(call.points)) {
    check_same_call(
        Group(call.mesh->group()),
        call.points,
        {c10::str(call.op, " with ", name, " ", number), "", {}, {}});
  }
}

Neighbours search(const LocalCall& call, const Wanted& wanted) {
  const at::NoGradGuard no_grad;
  if (is_transformed(call.points) || is_transformed(call.queries)) {
    if (wanted.most) {
      return {run_nearest(call, *wanted.most, wanted.radius), {}};
    }
    auto values = call;
    values.points = value_inside(call.points);
    values.queries = value_inside(call.queries);
    const OutsideTransforms of_all_levels;
    return search(values, wanted);
  }
  if (is_traced(call.points) || is_traced(call.queries)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        wanted.most,
        call.op,
        ": all pairs have no number that a compiler knows, expected max_points");
    return {run_nearest(call, *wanted.most, wanted.radius), {}};
  }
  check_same_number(call, "k", wanted.most.value_or(0));
  check_same_number(call, "radius", wanted.radius.value_or(0));
  check_finite(call);
  return find_neighbours(
      call.points.detach().contiguous(),
      call.queries.detach().contiguous(),
      wanted,
      call.cloud,
      point_transport());
}

/// (B, M, k): every slot is in the list.
List list_of(const Nearest& nearest, bool may_have_none) {
  const auto& rows = nearest.rows;
  const auto options = rows.options();
  List list{
      at::arange(rows.size(0), options).view({-1, 1, 1}).expand_as(rows),
      at::arange(rows.size(1), options).view({1, -1, 1}).expand_as(rows),
      rows,
      nearest.squares};
  if (may_have_none) {
    const auto none = rows.eq(Nearest::kNoRow);
    list.rows = rows.masked_fill(none, -1);
    list.squares = list.squares.masked_fill(none, 0);
  }
  return list;
}

bool is_differentiated(const Tensor& x) {
  return (at::GradMode::is_enabled() && x.requires_grad()) ||
      x._fw_grad(/*level=*/0).defined();
}

bool is_differentiated(const LocalCall& call) {
  return is_differentiated(call.points) || is_differentiated(call.queries);
}

Tensor values_of(
    const LocalCall& call,
    const Tensor& values,
    const List& list) {
  auto sizes = list.rows.sizes().vec();
  sizes.push_back(values.size(-1));
  const auto found = rows_of_cloud(
      values, list.entries.flatten(), list.rows.flatten(), call.cloud);
  return found.view(sizes);
}

Tensor squares_of(const LocalCall& call, const List& list, Tensor found) {
  if (!is_differentiated(call)) {
    return list.squares;
  }
  if (!found.defined()) {
    found = values_of(call, call.points, list);
  }
  const auto places =
      list.entries.mul(call.queries.size(1)).add(list.queries).flatten();
  const auto from =
      call.queries.flatten(0, 1).index_select(0, places).view(found.sizes());
  const auto squares = found.sub(from).square().sum(-1);
  return squares.masked_fill(list.rows.lt(0), 0);
}

} // namespace shardtensor::detail
