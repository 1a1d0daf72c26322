#include "shardtensor/points/search.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "shardtensor/points/curve.h"

namespace shardtensor::detail {
namespace {

/// Dim by dim, as Note [Order of neighbours] says.
at::Tensor all_squares(const at::Tensor& points, const at::Tensor& queries) {
  auto sum = at::zeros({queries.size(0), points.size(0)}, points.options());
  for (int64_t dim = 0; dim < points.size(1); ++dim) {
    const auto away =
        points.select(1, dim) - queries.select(1, dim).unsqueeze(1);
    sum = sum + away * away;
  }
  return sum;
}

/// A stable sort keeps equal distances in the order of rows.
std::tuple<at::Tensor, at::Tensor> by_sorting(
    const at::Tensor& points,
    const at::Tensor& queries) {
  return at::sort(all_squares(points, queries), /*stable=*/true, 1, false);
}

PointTree tree_of(const at::Tensor& points, int64_t first_row = 0) {
  return PointTree(order_as_tree(points.contiguous()), first_row);
}

class Search : public ::testing::TestWithParam<std::tuple<int64_t, int64_t>> {
 protected:
  void SetUp() override {
    at::manual_seed(3);
    std::tie(dims, points) = GetParam();
  }
  /// Whole coordinates have ties and duplicates, others hardly any.
  std::vector<at::Tensor> clouds(int64_t count) const {
    return {
        at::randint(0, 5, {count, dims}, at::kDouble),
        at::randn({count, dims}, at::kDouble),
        at::randn({count, dims}, at::kFloat),
        at::ones({count, dims}, at::kFloat)};
  }
  int64_t dims = 0;
  int64_t points = 0;
};

TEST_P(Search, FindsTheNearestWithTiesByRow) {
  const auto queries = clouds(41);
  const auto all = clouds(points);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto [squares, rows] = by_sorting(all[i], queries[i]);
    for (const int64_t k : {int64_t{1}, int64_t{7}, points}) {
      const int64_t some = std::min(k, points);
      const auto best = Nearest::none(queries[i], some);
      search_nearest(tree_of(all[i]), {queries[i], {}, {}}, best);
      EXPECT_TRUE(at::equal(best.squares, squares.narrow(1, 0, some)));
      EXPECT_TRUE(at::equal(best.rows, rows.narrow(1, 0, some)));
    }
  }
}

TEST_P(Search, FindsTheSameInPieces) {
  const auto queries = clouds(41);
  const auto all = clouds(points);
  const int64_t k = std::min<int64_t>(6, points);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto whole = Nearest::none(queries[i], k);
    search_nearest(tree_of(all[i]), {queries[i], {}, {}}, whole);
    const auto best = Nearest::none(queries[i], k);
    const int64_t cut = points / 3;
    const auto rest = all[i].narrow(0, cut, points - cut);
    search_nearest(tree_of(rest, cut), {queries[i], {}, {}}, best);
    search_nearest(
        tree_of(all[i].narrow(0, 0, cut)), {queries[i], {}, {}}, best);
    EXPECT_TRUE(at::equal(best.rows, whole.rows));
    EXPECT_TRUE(at::equal(best.squares, whole.squares));
  }
}

TEST_P(Search, FindsAllWithinARadius) {
  const auto queries = clouds(41);
  const auto all = clouds(points);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto limits = at::full({41}, 2, queries[i].options());
    const auto [squares, rows] = by_sorting(all[i], queries[i]);
    const int64_t cut = points / 3;
    const auto rest = all[i].narrow(0, cut, points - cut);
    const auto pairs = join_pairs(
        {search_within(tree_of(rest, cut), {queries[i], {}, limits}),
         search_within(
             tree_of(all[i].narrow(0, 0, cut)), {queries[i], {}, limits})});
    const auto inside = squares.le(2);
    EXPECT_TRUE(at::equal(pairs.counts, inside.sum(1)));
    EXPECT_TRUE(at::equal(pairs.rows, rows.masked_select(inside)));
    EXPECT_TRUE(at::equal(pairs.squares, squares.masked_select(inside)));
  }
}

TEST_P(Search, StopsAtALimit) {
  const auto queries = clouds(41)[0];
  const auto all = clouds(points)[0];
  const int64_t k = std::min<int64_t>(6, points);
  const auto best = Nearest::none(queries, k);
  search_nearest(
      tree_of(all), {queries, {}, at::full({41}, 2, at::kDouble)}, best);
  const auto [squares, rows] = by_sorting(all, queries);
  const auto beyond = squares.narrow(1, 0, k).gt(2);
  EXPECT_TRUE(
      at::equal(
          best.rows,
          rows.narrow(1, 0, k).masked_fill(beyond, Nearest::kNoRow)));
}

INSTANTIATE_TEST_SUITE_P(
    Clouds,
    Search,
    ::testing::Combine(
        ::testing::Values(1, 2, 3, 7),
        ::testing::Values(0, 1, 32, 33, 500)));

TEST(HilbertOrder, KeepsNeighboursTogether) {
  const int64_t side = 16;
  const auto lines = at::arange(side, at::kDouble);
  const auto grid = at::cartesian_prod({lines, lines});
  const auto order = hilbert_order(grid);
  EXPECT_TRUE(
      at::equal(
          std::get<0>(at::sort(order)), at::arange(side * side, at::kLong)));
  // Through a full grid the curve goes from cell to next cell.
  const auto steps = grid.index({order}).diff(1, 0).abs().sum(1);
  EXPECT_TRUE(steps.eq(1).all().item<bool>()) << steps;
}

TEST(HilbertOrder, TakesAnyCloud) {
  for (const int64_t dims : {1, 2, 3, 16}) {
    EXPECT_EQ(hilbert_order(at::zeros({0, dims})).numel(), 0);
    const auto order = hilbert_order(at::ones({5, dims}));
    EXPECT_TRUE(at::equal(order, at::arange(5)));
  }
}

} // namespace
} // namespace shardtensor::detail
