#include "shardtensor/rules/points/query_set.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/zeros_like.h>

#include "shardtensor/points/curve.h"

namespace shardtensor::detail {
namespace {

/// A radius is compared by its square, in the points' dtype.
at::Tensor limits_of(const at::Tensor& queries, std::optional<double> radius) {
  if (!radius) {
    return {};
  }
  const auto limit = at::full({queries.size(0)}, *radius, queries.options());
  return limit.square();
}

at::Tensor inverse(const at::Tensor& order) {
  const auto places = at::arange(order.numel(), order.options());
  return at::empty_like(order).index_copy_(0, order, places);
}

/// Queries that came with their limits.
OrderedQueries without_order(const at::Tensor& rows) {
  const int64_t dims = rows.size(1) - 1;
  return {
      rows.narrow(1, 0, dims).contiguous(),
      {},
      rows.select(1, dims).contiguous()};
}

at::Tensor bytes_of(const at::Tensor& x) {
  return x.view({-1}).view(at::kByte);
}

} // namespace

QuerySet::QuerySet(const at::Tensor& queries, const Wanted& wanted)
    : wanted_(wanted) {
  if (wanted.most) {
    nearest_ = Nearest::none(queries, *wanted.most);
  }
  for (int64_t i = 0; i < queries.size(0); ++i) {
    const auto given = queries.select(0, i);
    const auto order = hilbert_order(given);
    Entry entry;
    entry.queries = {
        given.index_select(0, order), order, limits_of(given, wanted.radius)};
    if (wanted.most) {
      entry.nearest = {
          nearest_.squares.select(0, i), nearest_.rows.select(0, i)};
    }
    entries_.push_back(std::move(entry));
  }
}

void QuerySet::meet(const Trees& trees) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    auto& entry = entries_[i];
    if (wanted_.most) {
      search_nearest(trees[i], entry.queries, entry.nearest);
    } else {
      entry.pairs.push_back(search_within(trees[i], entry.queries));
    }
  }
}

OrderedQueries QuerySet::open_queries(int64_t entry) const {
  const auto& own = entries_[entry];
  auto queries = own.queries;
  if (wanted_.most) {
    const auto last = own.nearest.squares.select(1, *wanted_.most - 1)
                          .index_select(0, queries.order);
    queries.limits =
        queries.limits.defined() ? at::minimum(last, queries.limits) : last;
  }
  return queries;
}

void QuerySet::take(
    int64_t entry,
    const at::Tensor& places,
    const Nearest& found) {
  const auto& own = entries_[entry];
  merge_nearest(own.nearest, own.queries.order.index_select(0, places), found);
}

void QuerySet::take(
    int64_t entry,
    const at::Tensor& places,
    const Pairs& found) {
  auto& pairs = entries_[entry].pairs;
  auto all = found;
  all.counts =
      at::zeros_like(pairs.front().counts).index_copy_(0, places, found.counts);
  pairs.push_back(std::move(all));
}

Neighbours QuerySet::neighbours() const {
  Neighbours result{nearest_, {}};
  if (!wanted_.most) {
    for (const auto& entry : entries_) {
      result.pairs.push_back(pairs(entry));
    }
  }
  return result;
}

Pairs QuerySet::pairs(const Entry& entry) {
  const auto joined = join_pairs(entry.pairs);
  const auto begins = joined.counts.cumsum(0).sub(joined.counts);
  const auto from = inverse(entry.queries.order);
  const auto counts = joined.counts.index_select(0, from);
  // Pair i of the queries in their own order is pair i + shift.
  const auto shift =
      begins.index_select(0, from).sub(counts.cumsum(0).sub(counts));
  const auto places = at::repeat_interleave(shift, counts)
                          .add(at::arange(joined.rows.numel(), from.options()));
  return {
      counts,
      joined.rows.index_select(0, places),
      joined.squares.index_select(0, places)};
}

Trees make_trees(const at::Tensor& points, int64_t first_row) {
  Trees trees;
  for (const auto& entry : points.unbind(0)) {
    trees.emplace_back(order_as_tree(entry), first_row);
  }
  return trees;
}

Trees make_trees(const at::Tensor& points, const at::Tensor& rows) {
  Trees trees;
  for (const auto& entry : points.unbind(0)) {
    auto ordered = order_as_tree(entry);
    ordered.rows = rows.index_select(0, ordered.rows);
    trees.emplace_back(ordered);
  }
  return trees;
}

at::Tensor pack_trees(const at::Tensor& points) {
  std::vector<at::Tensor> parts{
      at::empty({0}, points.options().dtype(at::kByte))};
  std::vector<at::Tensor> rows;
  for (const auto& entry : points.unbind(0)) {
    const auto ordered = order_as_tree(entry);
    parts.push_back(bytes_of(ordered.points));
    rows.push_back(bytes_of(ordered.rows));
  }
  parts.insert(parts.end(), rows.begin(), rows.end());
  return at::cat(parts);
}

int64_t packed_bytes(const at::Tensor& like, int64_t points) {
  const auto row_bytes = static_cast<int64_t>(sizeof(int32_t));
  return like.size(0) * points *
      (like.size(2) * like.element_size() + row_bytes);
}

Trees unpack_trees(
    const at::Tensor& bytes,
    const at::Tensor& like,
    int64_t points,
    int64_t first_row) {
  const int64_t batch = like.size(0);
  const auto coordinates =
      at::empty({batch, points, like.size(2)}, like.options());
  const auto rows = at::empty({batch, points}, like.options().dtype(at::kInt));
  const int64_t middle = coordinates.numel() * coordinates.element_size();
  bytes_of(coordinates).copy_(bytes.narrow(0, 0, middle));
  bytes_of(rows).copy_(bytes.narrow(0, middle, bytes.numel() - middle));
  Trees trees;
  for (int64_t entry = 0; entry < batch; ++entry) {
    trees.emplace_back(
        OrderedPoints{coordinates.select(0, entry), rows.select(0, entry)},
        first_row);
  }
  return trees;
}

Nearest nearest_in(
    const PointTree& tree,
    const at::Tensor& with_limits,
    int64_t most) {
  const auto queries = without_order(with_limits);
  const auto found = Nearest::none(queries.points, most);
  search_nearest(tree, queries, found);
  return found;
}

Pairs pairs_in(const PointTree& tree, const at::Tensor& with_limits) {
  return search_within(tree, without_order(with_limits));
}

} // namespace shardtensor::detail
