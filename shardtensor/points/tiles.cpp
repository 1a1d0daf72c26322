#include "shardtensor/points/tiles.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

namespace shardtensor::detail {
namespace {

using at::Tensor;

constexpr int64_t kTile = int64_t{1} << 24; // squared distances at once
constexpr double kNoSquare = std::numeric_limits<double>::infinity();

/// (queries, points), dim by dim as the note says.
Tensor squares_between(const Tensor& queries, const Tensor& points) {
  Tensor sum;
  for (int64_t dim = 0; dim < queries.size(1); ++dim) {
    const auto away =
        points.select(1, dim).sub(queries.select(1, dim).unsqueeze(1));
    const auto square = away.mul(away);
    sum = dim == 0 ? square : sum.add_(square);
  }
  return sum;
}

Nearest gathered(const Nearest& from, const Tensor& places) {
  return {from.squares.gather(1, places), from.rows.gather(1, places)};
}

/// The first k by (square, row); equal squares stand by row afterwards.
Nearest first_of(const Nearest& few, int64_t k) {
  const auto by_row = gathered(few, few.rows.argsort(true, 1, false));
  const auto order = by_row.squares.argsort(true, 1, false);
  return gathered(by_row, order.narrow(1, 0, k));
}

/// The best k of many.
Nearest best_of(const Nearest& many, int64_t k) {
  const auto [squares, places] = many.squares.topk(k, 1, /*largest=*/false);
  const auto last = squares.narrow(1, k - 1, 1);
  const auto below = squares.lt(last);
  const auto rows =
      many.rows.gather(1, places).masked_fill(~below, Nearest::kNoRow);
  const auto ties =
      many.rows.masked_fill(many.squares.ne(last), Nearest::kNoRow);
  const auto first_ties = std::get<0>(ties.topk(k, 1, /*largest=*/false));
  const auto of_ties = at::where(
      first_ties.eq(Nearest::kNoRow),
      at::full({}, kNoSquare, squares.options()),
      last);
  return first_of(
      {at::cat({squares.masked_fill(~below, kNoSquare), of_ties}, 1),
       at::cat({rows, first_ties}, 1)},
      k);
}

/// Rows of x in stable order of `by`.
std::vector<Tensor> sorted(const std::vector<Tensor>& x, size_t by) {
  const auto order = x[by].argsort(/*stable=*/true, 0, false);
  std::vector<Tensor> result;
  for (const auto& each : x) {
    result.push_back(each.index_select(0, order));
  }
  return result;
}

} // namespace

TileSearch::TileSearch(
    const Tensor& queries,
    std::optional<int64_t> most,
    std::optional<double> radius)
    : queries_(queries), most_(most) {
  if (radius) {
    // Squared in the points' dtype.
    limit_ = at::full({}, *radius, queries.options()).square();
  }
  if (most) {
    nearest_ = Nearest::none(queries, *most);
  }
}

void TileSearch::meet(const Tensor& points, int64_t first_row) {
  const int64_t all = points.size(0);
  const int64_t width = std::clamp<int64_t>(all, 1, kTile);
  const int64_t height = std::max<int64_t>(kTile / width, 1);
  for (int64_t q = 0; q < queries_.size(0); q += height) {
    const auto queries =
        queries_.narrow(0, q, std::min(height, queries_.size(0) - q));
    for (int64_t p = 0; p < all; p += width) {
      const auto tile = points.narrow(0, p, std::min(width, all - p));
      const auto rows =
          at::arange(tile.size(0), points.options().dtype(at::kLong))
              .add(first_row + p);
      const auto squares = squares_between(queries, tile);
      if (most_) {
        take_nearest(q, squares, rows);
      } else {
        take_pairs(q, squares, rows);
      }
    }
  }
}

void TileSearch::take_nearest(
    int64_t first_query,
    const Tensor& squares,
    const Tensor& rows) {
  Nearest found{squares, rows.expand_as(squares)};
  if (limit_.defined()) {
    const auto outside = squares.gt(limit_);
    found.squares = squares.masked_fill(outside, kNoSquare);
    found.rows = found.rows.masked_fill(outside, Nearest::kNoRow);
  }
  const auto own = [&](const Tensor& x) {
    return x.narrow(0, first_query, squares.size(0));
  };
  const auto best = best_of(
      {at::cat({own(nearest_.squares), found.squares}, 1),
       at::cat({own(nearest_.rows), found.rows}, 1)},
      *most_);
  own(nearest_.squares).copy_(best.squares);
  own(nearest_.rows).copy_(best.rows);
}

void TileSearch::take_pairs(
    int64_t first_query,
    const Tensor& squares,
    const Tensor& rows) {
  const auto inside = squares.le(limit_);
  const auto places = inside.nonzero();
  queries_of_pairs_.push_back(places.select(1, 0).add(first_query));
  rows_of_pairs_.push_back(rows.index_select(0, places.select(1, 1)));
  squares_of_pairs_.push_back(squares.masked_select(inside));
}

Pairs TileSearch::pairs() const {
  const auto none = at::empty({0}, queries_.options().dtype(at::kLong));
  const auto join = [](const std::vector<Tensor>& parts, const Tensor& empty) {
    return parts.empty() ? empty : at::cat(parts);
  };
  std::vector<Tensor> all{
      join(rows_of_pairs_, none),
      join(squares_of_pairs_, at::empty({0}, queries_.options())),
      join(queries_of_pairs_, none)};
  for (size_t by = 0; by < all.size(); ++by) {
    all = sorted(all, by);
  }
  return {at::bincount(all[2], {}, queries_.size(0)), all[0], all[1]};
}

} // namespace shardtensor::detail
