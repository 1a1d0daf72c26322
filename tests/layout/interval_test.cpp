#include "shardtensor/layout/interval.h"

#include <sstream>

#include <gtest/gtest.h>

#include "support.h"

namespace shardtensor {
namespace {

using namespace testing;

TEST(Interval, IntersectionIsWhatBothContain) {
  // All pairs of intervals of [0, 6), empty ones too, row by row.
  for (int64_t a = 0; a < 6; ++a) {
    for (int64_t b = a; b < 6; ++b) {
      for (int64_t c = 0; c < 6; ++c) {
        for (int64_t d = c; d < 6; ++d) {
          const Interval common = intersect({a, b}, {c, d});
          ASSERT_GE(common.extent(), 0);
          for (int64_t row = 0; row < 6; ++row) {
            const bool in_both = a <= row && row < b && c <= row && row < d;
            const bool in_common = common.begin <= row && row < common.end;
            ASSERT_EQ(in_common, in_both);
          }
        }
      }
    }
  }
}

TEST(Interval, IntersectionOfStrangersIsEmpty) {
  EXPECT_EQ(intersect(Interval{2, 7}, Interval{5, 9}), (Interval{5, 7}));
  EXPECT_EQ(intersect(Interval{5, 9}, Interval{0, 2}), (Interval{5, 5}));
  EXPECT_TRUE(intersect(Interval{0, 2}, Interval{2, 4}).empty());
}

TEST(Interval, ShiftsAndPrints) {
  EXPECT_EQ((Interval{2, 7}.shifted(-3)), (Interval{-1, 4}));
  EXPECT_EQ(printed(Interval{2, 7}), "[2, 7)");
}

TEST(Box, IntersectsDimByDim) {
  const Box common = intersect(Box{{0, 4}, {3, 5}}, Box{{2, 6}, {0, 4}});
  EXPECT_EQ(common, (Box{{2, 4}, {3, 4}}));
  EXPECT_EQ(numel(common), 2);
  EXPECT_EQ(extents(common), (std::vector<int64_t>{2, 1}));
}

TEST(Box, CountsElements) {
  EXPECT_EQ(numel(Box{}), 1); // a number
  EXPECT_EQ(numel(Box{{1, 4}, {0, 5}}), 15);
  EXPECT_EQ(numel(Box{{1, 4}, {2, 2}}), 0);
}

TEST(Box, RefusesAnotherNumberOfDims) {
  expect_error<c10::ValueError>(
      [] { intersect(Box{{0, 1}}, Box{}); },
      "intersect: boxes of 1 and 0 dims, expected as many in both");
}

} // namespace
} // namespace shardtensor
