#include "shardtensor/rules/points/points.h"

#include <cmath>
#include <limits>
#include <numeric>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "shardtensor/comm/all_reduce.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/dispatch/promotion.h"
#include "shardtensor/rules/points/neighbours.h"
#include "shardtensor/rules/points/rows_of_cloud.h"
#include "shardtensor/tensor/terms.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;

// ---- what is asked for ------------------------------------------------------

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
  TORCH_CHECK_NOT_IMPLEMENTED(
      points.device().is_cpu() && queries.device().is_cpu(),
      op,
      ": expected points and queries on the CPU, got ",
      points.device(),
      " and ",
      queries.device());
}

void check_count(int64_t k, const Tensor& points) {
  TORCH_CHECK_VALUE(
      k >= 1 && k <= points.size(-2),
      "knn: k is ",
      k,
      ", expected 1 <= k <= ",
      points.size(-2),
      ", the number of points");
}

void check_radius(double radius, std::optional<int64_t> max_points) {
  TORCH_CHECK_VALUE(
      radius >= 0 && std::isfinite(radius),
      "radius_search: radius is ",
      radius,
      ", expected a finite number >= 0");
  TORCH_CHECK_VALUE(
      !max_points || *max_points >= 1,
      "radius_search: max_points is ",
      max_points.value_or(0),
      ", expected at least 1");
}

// ---- this rank's part -------------------------------------------------------

/// A call's operands on this rank, (B, N, D) and (B, M, D), and how they meet
/// the other ranks'.
struct LocalCall {
  const char* op;
  Tensor points;
  Tensor queries;
  CloudPieces cloud;
  MeshPtr mesh; // null for plain tensors
};

/// Raises on every rank if it must on one.
void check_finite(const LocalCall& call) {
  const auto finite = at::isfinite(call.points)
                          .all()
                          .logical_and(at::isfinite(call.queries).all());
  auto failed = finite.logical_not().to(at::kInt);
  if (call.mesh) {
    std::vector<int64_t> axes(call.mesh->axes());
    std::iota(axes.begin(), axes.end(), 0);
    failed = all_reduce(failed, Reduce::Max, *call.mesh, axes);
  }
  TORCH_CHECK_VALUE(
      failed.item<int64_t>() == 0,
      call.op,
      ": expected finite coordinates, got NaN or infinite ones");
}

Neighbours search(const LocalCall& call, const Wanted& wanted) {
  const at::NoGradGuard no_grad;
  check_finite(call);
  return find_neighbours(
      call.points.detach().contiguous(),
      call.queries.detach().contiguous(),
      wanted,
      call.cloud,
      point_transport());
}

/// The root, whose derivatives are zero at zero.
Tensor distances_of(const Tensor& squares) {
  const auto none = squares.eq(0);
  return squares.masked_fill(none, 1).sqrt().masked_fill(none, 0);
}

bool is_differentiated(const LocalCall& call) {
  return at::GradMode::is_enabled() &&
      (call.points.requires_grad() || call.queries.requires_grad());
}

/// What results of either kind are made from: neighbour i of the list belongs
/// to query queries[i] of batch entry entries[i].
struct List {
  Tensor entries;
  Tensor queries;
  Tensor rows; // -1: none
  Tensor squares;
};

/// In the shape of `rows`, with the coordinates as a last dim.
Tensor points_of(const LocalCall& call, const List& list) {
  auto sizes = list.rows.sizes().vec();
  sizes.push_back(call.points.size(2));
  const auto found = rows_of_cloud(
      call.points, list.entries.flatten(), list.rows.flatten(), call.cloud);
  return found.view(sizes);
}

Tensor distances_of(const LocalCall& call, const List& list, Tensor found) {
  if (!is_differentiated(call)) {
    return list.squares.sqrt();
  }
  if (!found.defined()) {
    found = points_of(call, list);
  }
  const auto places =
      list.entries.mul(call.queries.size(1)).add(list.queries).flatten();
  const auto from =
      call.queries.flatten(0, 1).index_select(0, places).view(found.sizes());
  const auto squares = found.sub(from).square().sum(-1);
  return distances_of(squares.masked_fill(list.rows.lt(0), 0));
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

List list_of(const std::vector<Pairs>& pairs, const Tensor& queries) {
  const auto options = queries.options().dtype(at::kLong);
  const auto none = at::zeros({0}, options);
  std::vector<Tensor> entries{none};
  std::vector<Tensor> places{none};
  std::vector<Tensor> rows{none};
  std::vector<Tensor> squares{at::zeros({0}, queries.options())};
  for (size_t i = 0; i < pairs.size(); ++i) {
    const auto& own = pairs[i];
    entries.push_back(
        at::zeros({own.rows.numel()}, options).add_(static_cast<int64_t>(i)));
    places.push_back(
        at::repeat_interleave(
            at::arange(own.counts.numel(), options), own.counts));
    rows.push_back(own.rows);
    squares.push_back(own.squares);
  }
  return {at::cat(entries), at::cat(places), at::cat(rows), at::cat(squares)};
}

/// Points, then distances, as asked for.
struct Extras {
  bool distances = false;
  bool points = false;
};
std::vector<Tensor> extras_of(
    const LocalCall& call,
    const List& list,
    const Extras& extras) {
  std::vector<Tensor> results;
  if (extras.points) {
    results.push_back(points_of(call, list));
  }
  if (extras.distances) {
    results.push_back(
        distances_of(call, list, extras.points ? results.front() : Tensor()));
  }
  return results;
}

// ---- layouts ----------------------------------------------------------------

/// A call with its layouts; on plain tensors there are none.
struct Operands {
  Operands(
      const char* op,
      const Tensor& points,
      const Tensor& queries,
      bool whole_queries) {
    call.op = op;
    check_operands(op, points, queries);
    batched = points.dim() == 3;
    if (is_shard_tensor(points) || is_shard_tensor(queries)) {
      lay_out(points, queries, whole_queries);
    } else {
      call.points = points;
      call.queries = queries;
      call.cloud.rows = {{0, points.size(-2)}};
    }
    if (!batched) {
      call.points = call.points.unsqueeze(0);
      call.queries = call.queries.unsqueeze(0);
    }
  }

  /// A result of this rank ([B,] M, ...), as the queries lie.
  Tensor beside_queries(Tensor local) const {
    if (!batched) {
      local = local.squeeze(0);
    }
    return call.mesh ? like_queries(local) : local;
  }

  /// A list that stands query by query, along its dim `dim`.
  Tensor as_list(const Tensor& local, int64_t dim, const SpecPtr& wanted)
      const {
    return wanted ? from_local(local, with_list(local, dim, wanted)) : local;
  }

  LocalCall call;
  bool batched = false;
  SpecPtr layout; // of the queries for the search
  SpecPtr given; // as the queries came

 private:
  void lay_out(
      const Tensor& points,
      const Tensor& queries,
      bool whole_queries) {
    call.mesh = common_mesh(call.op, {points, queries});
    const auto cloud = promote_operand(points, call.mesh, call.op);
    const auto from = promote_operand(queries, call.mesh, call.op);
    const auto layouts = plan_points(spec(cloud), spec(from), whole_queries);
    call.points =
        to_local(redistribute(cloud, layouts.points), layouts.point_terms);
    call.queries = to_local(redistribute(from, layouts.queries));
    call.cloud = layouts.cloud;
    layout = layouts.queries;
    given = without_partial(spec(from));
  }

  /// Dims behind the rows are whole.
  SpecPtr with_tail(const SpecPtr& queries, const Tensor& local) const {
    const int64_t rows = queries->dim() - 1;
    std::vector<int64_t> sizes(
        queries->sizes().begin(), queries->sizes().begin() + rows);
    std::vector<int64_t> from(rows);
    std::iota(from.begin(), from.end(), 0);
    for (int64_t dim = rows; dim < local.dim(); ++dim) {
      sizes.push_back(local.size(dim));
      from.push_back(-1);
    }
    return with_dims(queries, sizes, from);
  }

  Tensor like_queries(const Tensor& local) const {
    const auto result = from_local(local, with_tail(layout, local));
    return redistribute(result, with_tail(given, local));
  }

  static SpecPtr with_list(
      const Tensor& local,
      int64_t dim,
      const SpecPtr& first_dim) {
    auto sizes = local.sizes().vec();
    std::vector<int64_t> from(sizes.size(), -1);
    sizes[dim] = first_dim->size(0);
    from[dim] = 0;
    return with_dims(first_dim, sizes, from);
  }
};

/// The layout of a list whose part on this rank has `count` entries: cut by
/// the axes that cut the queries. Communication: one exchange of a number.
SpecPtr list_layout(const Operands& operands, int64_t count) {
  if (!operands.layout) {
    return nullptr;
  }
  const auto& queries = operands.layout;
  const auto options = at::TensorOptions(at::kLong);
  const auto axes = queries->sharded_axes();
  const auto mesh = queries->mesh();
  const auto terms = gather_terms(
      at::zeros({}, options).fill_(count), make_replicated(mesh, {}), axes);
  std::vector<int64_t> pieces;
  int64_t all = 0;
  const auto flat = terms.flatten();
  for (int64_t i = 0; i < flat.numel(); ++i) {
    pieces.push_back(flat.const_data_ptr<int64_t>()[i]);
    all += pieces.back();
  }
  std::vector<Placement> placements(mesh->axes());
  ShardSpec::Partitions partitions(1);
  for (const int64_t axis : axes) {
    placements[axis] = Placement::shard(0);
  }
  if (!axes.empty()) {
    partitions[0] = Partition(pieces);
  }
  return make_spec(mesh, {all}, placements, partitions);
}

/// From rows of this rank's piece to rows of the whole.
Tensor shifted(const Operands& operands, const Tensor& rows, int64_t dim) {
  const auto& layout = operands.layout;
  return layout && layout->is_sharded(dim)
      ? rows.add(layout->interval(dim).begin)
      : rows;
}

/// (2, pairs), or (3, pairs) with the batch entry.
Tensor pair_indices(const Operands& operands, const List& list) {
  const int64_t rows_dim = operands.batched ? 1 : 0;
  std::vector<Tensor> indices{
      shifted(operands, list.queries, rows_dim), list.rows};
  if (operands.batched) {
    indices.insert(indices.begin(), shifted(operands, list.entries, 0));
  }
  return at::stack(indices);
}

std::vector<Tensor> padded_search(
    const Operands& operands,
    const Wanted& wanted,
    const Extras& extras) {
  const bool may_have_none = wanted.radius.has_value();
  const auto list =
      list_of(search(operands.call, wanted).nearest, may_have_none);
  std::vector<Tensor> results{
      may_have_none ? list.rows.clamp_min(0) : list.rows};
  for (const auto& extra : extras_of(operands.call, list, extras)) {
    results.push_back(extra);
  }
  for (auto& result : results) {
    result = operands.beside_queries(result);
  }
  return results;
}

std::vector<Tensor> ragged_search(
    const Operands& operands,
    const Wanted& wanted,
    const Extras& extras) {
  const auto& call = operands.call;
  const auto list = list_of(search(call, wanted).pairs, call.queries);
  const auto layout = list_layout(operands, list.rows.numel());
  std::vector<Tensor> results{
      operands.as_list(pair_indices(operands, list), 1, layout)};
  for (const auto& extra : extras_of(call, list, extras)) {
    results.push_back(operands.as_list(extra, 0, layout));
  }
  return results;
}

// ---- the operators ----------------------------------------------------------

std::tuple<Tensor, Tensor> knn_function(
    const Tensor& points,
    const Tensor& queries,
    int64_t k) {
  const CommScope scope("shardtensor::knn");
  const Operands operands("knn", points, queries, false);
  check_count(k, points);
  const auto found = padded_search(operands, {k, std::nullopt}, {true, false});
  return {found[0], found[1]};
}

std::vector<Tensor> radius_search_function(
    const Tensor& points,
    const Tensor& queries,
    double radius,
    std::optional<int64_t> max_points,
    bool return_dists,
    bool return_points) {
  const CommScope scope("shardtensor::radius_search");
  const Operands operands(
      "radius_search", points, queries, !max_points.has_value());
  check_radius(radius, max_points);
  const Wanted wanted{max_points, radius};
  const Extras extras{return_dists, return_points};
  return max_points ? padded_search(operands, wanted, extras)
                    : ragged_search(operands, wanted, extras);
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("knn", knn_function);
  m.impl("radius_search", radius_search_function);
}
TORCH_LIBRARY_IMPL(shardtensor, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("knn", knn_function);
  m.impl("radius_search", radius_search_function);
}

} // namespace

std::tuple<Tensor, Tensor> knn(
    const Tensor& points,
    const Tensor& queries,
    int64_t k) {
  return knn_function(points, queries, k);
}

std::vector<Tensor> radius_search(
    const Tensor& points,
    const Tensor& queries,
    double radius,
    std::optional<int64_t> max_points,
    bool return_dists,
    bool return_points) {
  return radius_search_function(
      points, queries, radius, max_points, return_dists, return_points);
}

} // namespace shardtensor
