#include "shardtensor/points/tiles.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace shardtensor::detail {
namespace {

OrderedQueries all_of(const at::Tensor& queries, const at::Tensor& limits) {
  return {queries, {}, limits};
}

PointTree tree_in_leaves_of(const at::Tensor& points, int64_t first_row) {
  return PointTree(order_as_tree(points.contiguous()), first_row);
}

class Tiles : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    at::manual_seed(5);
  }
  /// Whole coordinates have ties and duplicates.
  static std::vector<at::Tensor> clouds(int64_t count) {
    return {
        at::randint(0, 3, {count, 3}, at::kFloat),
        at::randint(0, 3, {count, 3}, at::kDouble),
        at::randn({count, 3}, at::kFloat),
        at::ones({count, 3}, at::kFloat)};
  }
};

/// The last piece first, as rings may bring them.
template <class Meet>
void in_pieces(const at::Tensor& points, const Meet& meet) {
  const int64_t cut = points.size(0) / 3;
  meet(points.narrow(0, cut, points.size(0) - cut), cut);
  meet(points.narrow(0, 0, cut), int64_t{0});
}

TEST_P(Tiles, FindTheNearestThatATreeFinds) {
  const auto queries = clouds(23);
  const auto all = clouds(GetParam());
  for (size_t i = 0; i < all.size(); ++i) {
    for (const int64_t k : {1, 5, 40}) {
      for (const auto radius :
           {std::optional<double>(), std::optional<double>(1.0)}) {
        const auto expected = Nearest::none(queries[i], k);
        const auto limits =
            radius ? at::ones({23}, queries[i].options()) : at::Tensor();
        search_nearest(
            tree_in_leaves_of(all[i], 0), all_of(queries[i], limits), expected);
        TileSearch search(queries[i], k, radius);
        in_pieces(all[i], [&](const auto& piece, int64_t first) {
          search.meet(piece, first);
        });
        EXPECT_TRUE(at::equal(search.nearest().rows, expected.rows));
        EXPECT_TRUE(at::equal(search.nearest().squares, expected.squares));
      }
    }
  }
}

TEST_P(Tiles, FindThePairsThatATreeFinds) {
  const auto queries = clouds(23);
  const auto all = clouds(GetParam());
  for (size_t i = 0; i < all.size(); ++i) {
    const auto limits = at::ones({23}, queries[i].options());
    const auto expected = join_pairs({search_within(
        tree_in_leaves_of(all[i], 0), all_of(queries[i], limits))});
    TileSearch search(queries[i], std::nullopt, 1.0);
    in_pieces(all[i], [&](const auto& piece, int64_t first) {
      search.meet(piece, first);
    });
    const auto pairs = search.pairs();
    EXPECT_TRUE(at::equal(pairs.counts, expected.counts));
    EXPECT_TRUE(at::equal(pairs.rows, expected.rows));
    EXPECT_TRUE(at::equal(pairs.squares, expected.squares));
  }
}

INSTANTIATE_TEST_SUITE_P(Points, Tiles, ::testing::Values(0, 1, 4, 60));

} // namespace
} // namespace shardtensor::detail
