#include "shardtensor/points/boxes.h"

#include <limits>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "shardtensor/points/curve.h"

namespace shardtensor::detail {
namespace {

TEST(BoxOf, HoldsAllPoints) {
  at::manual_seed(5);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const int64_t dims : {1, 3, 7}) {
      const auto points = at::randn({50, dims}, dtype);
      const auto box = box_of(points);
      EXPECT_TRUE(at::equal(box.select(0, 0), points.amin(0)));
      EXPECT_TRUE(at::equal(box.select(0, 1), points.amax(0)));
    }
  }
}

TEST(BoxOf, IsTheWrongWayRoundWithoutPoints) {
  const auto box = box_of(at::zeros({0, 2}));
  EXPECT_TRUE(box.select(0, 0).isposinf().all().item<bool>());
  EXPECT_TRUE(box.select(0, 1).isneginf().all().item<bool>());
}

TEST(QueryBlocks, FindsTheQueriesThatReachABox) {
  at::manual_seed(6);
  for (const int64_t count : {0, 1, 64, 65, 1000}) {
    for (const int64_t dims : {1, 2, 3, 7}) {
      // Whole coordinates: some are as far away as their limit.
      const auto points = at::randint(0, 9, {count, dims}, at::kFloat);
      const auto queries = points.index_select(0, hilbert_order(points));
      auto limits = at::randint(0, 20, {count}, at::kFloat);
      limits.slice(0, 0, 1).fill_(std::numeric_limits<float>::infinity());
      const auto box = box_of(at::randint(6, 9, {4, dims}, at::kFloat));
      const auto below = box.select(0, 0) - queries;
      const auto above = queries - box.select(0, 1);
      const auto gaps = at::maximum(below, above).clamp_min(0).square().sum(1);
      const auto near = QueryBlocks({queries, {}, limits}).near(box);
      EXPECT_TRUE(at::equal(near, gaps.le(limits).nonzero().squeeze(1)));
    }
  }
}

} // namespace
} // namespace shardtensor::detail
