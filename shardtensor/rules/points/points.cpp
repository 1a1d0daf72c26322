#include "shardtensor/rules/points/points.h"

#include <numeric>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/comm/group.h"
#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/rules/points/neighbour_call.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/terms.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;

constexpr auto kKnnOp = "knn";
constexpr auto kRadiusOp = "radius_search";

// ---- results ----------------------------------------------------------------

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

/// (B, M): how many pairs each query has.
Tensor counts_of(const std::vector<Pairs>& pairs, const Tensor& queries) {
  std::vector<Tensor> counts{
      at::zeros({0}, queries.options().dtype(at::kLong))};
  for (const auto& own : pairs) {
    counts.push_back(own.counts);
  }
  return at::cat(counts).view({queries.size(0), queries.size(1)});
}

/// The root, whose derivatives are zero at zero.
Tensor distances_of(
    const LocalCall& call,
    const List& list,
    const Tensor& found) {
  const auto squares = squares_of(call, list, found);
  if (!is_differentiated(squares)) {
    return squares.sqrt();
  }
  const auto none = squares.eq(0);
  return squares.masked_fill(none, 1).sqrt().masked_fill(none, 0);
}

/// Points, then distances, then numbers of neighbours, as asked for.
struct Extras {
  bool distances = false;
  bool points = false;
  bool counts = false;
};
std::vector<Tensor> extras_of(
    const LocalCall& call,
    const List& list,
    const Extras& extras) {
  std::vector<Tensor> results;
  if (extras.points) {
    results.push_back(values_of(call, call.points, list));
  }
  if (extras.distances) {
    results.push_back(
        distances_of(call, list, extras.points ? results.front() : Tensor()));
  }
  return results;
}

/// The layout of a list whose part on this rank has `count` entries: cut by
/// the axes that cut the queries. Communication: one exchange of a number.
SpecPtr list_layout(const NeighbourCall& operands, int64_t count) {
  if (!operands.layout()) {
    return nullptr;
  }
  const OutsideTransforms of_all_levels;
  const auto& queries = operands.layout();
  const auto axes = queries->sharded_axes();
  const auto mesh = queries->mesh();
  std::vector<int64_t> pieces{count};
  if (!axes.empty()) {
    const auto options = at::TensorOptions(at::kLong).device(
        Group(mesh->group()).device_of_numbers());
    pieces = host_numbers(gather_terms(
        at::full({}, count, options), make_replicated(mesh, {}), axes));
  }
  const auto all = std::accumulate(pieces.begin(), pieces.end(), int64_t{0});
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

/// A list that stands query by query, along its dim `dim`.
Tensor as_list(const Tensor& local, int64_t dim, const SpecPtr& wanted) {
  if (!wanted) {
    return local;
  }
  auto sizes = local.sizes().vec();
  std::vector<int64_t> from(sizes.size(), -1);
  sizes[dim] = wanted->size(0);
  from[dim] = 0;
  return from_local(local, with_dims(wanted, sizes, from));
}

/// From rows of this rank's piece to rows of the whole.
Tensor shifted(const NeighbourCall& operands, const Tensor& rows, int64_t dim) {
  const auto& layout = operands.layout();
  return layout && layout->is_sharded(dim)
      ? rows.add(layout->interval(dim).begin)
      : rows;
}

/// (2, pairs), or (3, pairs) with the batch entry.
Tensor pair_indices(const NeighbourCall& operands, const List& list) {
  const int64_t rows_dim = operands.is_batched() ? 1 : 0;
  std::vector<Tensor> indices{
      shifted(operands, list.queries, rows_dim), list.rows};
  if (operands.is_batched()) {
    indices.insert(indices.begin(), shifted(operands, list.entries, 0));
  }
  return at::stack(indices);
}

std::vector<Tensor> padded_search(
    const NeighbourCall& operands,
    const Wanted& wanted,
    const Extras& extras) {
  const bool may_have_none = wanted.radius.has_value();
  const auto list =
      list_of(search(operands.local(), wanted).nearest, may_have_none);
  std::vector<Tensor> results{
      may_have_none ? list.rows.clamp_min(0) : list.rows};
  for (const auto& extra : extras_of(operands.local(), list, extras)) {
    results.push_back(extra);
  }
  if (extras.counts) {
    results.push_back(list.rows.ge(0).sum(-1));
  }
  for (auto& result : results) {
    result = operands.beside_queries(result);
  }
  return results;
}

std::vector<Tensor> ragged_search(
    const NeighbourCall& operands,
    const Wanted& wanted,
    const Extras& extras) {
  const auto& call = operands.local();
  const auto pairs = search(call, wanted).pairs;
  const auto list = list_of(pairs, call.queries);
  const auto layout = list_layout(operands, list.rows.numel());
  std::vector<Tensor> results{as_list(pair_indices(operands, list), 1, layout)};
  for (const auto& extra : extras_of(call, list, extras)) {
    results.push_back(as_list(extra, 0, layout));
  }
  if (extras.counts) {
    results.push_back(operands.beside_queries(counts_of(pairs, call.queries)));
  }
  return results;
}

} // namespace

std::tuple<Tensor, Tensor> knn(
    const Tensor& points,
    const Tensor& queries,
    int64_t k) {
  const CommScope scope("shardtensor::knn");
  const NeighbourCall operands(kKnnOp, points, queries);
  check_k(kKnnOp, k, points);
  const auto found = padded_search(
      operands, {k, std::nullopt}, {/*distances=*/true, false, false});
  return {found[0], found[1]};
}

std::vector<Tensor> radius_search(
    const Tensor& points,
    const Tensor& queries,
    double radius,
    std::optional<int64_t> max_points,
    bool return_dists,
    bool return_points,
    std::optional<at::ScalarType> index_dtype,
    bool return_counts) {
  const CommScope scope("shardtensor::radius_search");
  const NeighbourCall operands(
      kRadiusOp, points, queries, /*whole_queries=*/!max_points);
  check_radius(kRadiusOp, radius);
  check_max_points(kRadiusOp, max_points.value_or(1));
  const auto dtype = index_dtype.value_or(at::kLong);
  TORCH_CHECK_TYPE(
      dtype == at::kLong || dtype == at::kInt,
      kRadiusOp,
      ": index_dtype is ",
      dtype,
      ", expected int64 or int32");
  const Wanted wanted{max_points, radius};
  const Extras extras{return_dists, return_points, return_counts};
  auto found = max_points ? padded_search(operands, wanted, extras)
                          : ragged_search(operands, wanted, extras);
  found.front() = found.front().to(dtype);
  if (return_counts) {
    found.back() = found.back().to(dtype);
  }
  return found;
}

namespace {

void register_searches(torch::Library& m) {
  m.impl("knn", knn);
  m.impl("radius_search", radius_search);
}
TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  register_searches(m);
}
TORCH_LIBRARY_IMPL(shardtensor, SHARDTENSOR_FUNCTION_KEY, m) {
  register_searches(m);
}

} // namespace

} // namespace shardtensor
