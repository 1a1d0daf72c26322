#include "shardtensor/layout/partition.h"

#include <gtest/gtest.h>

#include "support.h"

namespace shardtensor {
namespace {

using namespace testing;

using Sizes = std::vector<int64_t>;

TEST(Partition, ChunksAsTorchDoes) {
  // torch.chunk(torch.empty(extent), pieces), with empty pieces at the end.
  EXPECT_EQ(Partition::chunked(10, 4).sizes(), (Sizes{3, 3, 3, 1}));
  EXPECT_EQ(Partition::chunked(5, 4).sizes(), (Sizes{2, 2, 1, 0}));
  EXPECT_EQ(Partition::chunked(6, 4).sizes(), (Sizes{2, 2, 2, 0}));
  EXPECT_EQ(Partition::chunked(3, 4).sizes(), (Sizes{1, 1, 1, 0}));
  EXPECT_EQ(Partition::chunked(8, 4).sizes(), (Sizes{2, 2, 2, 2}));
  EXPECT_EQ(Partition::chunked(0, 3).sizes(), (Sizes{0, 0, 0}));
  EXPECT_EQ(Partition::chunked(7, 1).sizes(), (Sizes{7}));
}

TEST(Partition, ChunksTileTheDimInEqualPieces) {
  for (int64_t extent = 0; extent < 30; ++extent) {
    for (int64_t pieces = 1; pieces < 9; ++pieces) {
      const Partition partition = Partition::chunked(extent, pieces);
      ASSERT_EQ(partition.pieces(), pieces);
      ASSERT_EQ(partition.extent(), extent);
      const int64_t full = (extent + pieces - 1) / pieces;
      for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t left = std::max<int64_t>(0, extent - piece * full);
        ASSERT_EQ(
            partition.interval(piece).extent(), std::min<int64_t>(full, left));
      }
    }
  }
}

TEST(Partition, ChunksOverSeveralAxesOneAfterTheOther) {
  // 10 -> 5, 5 -> (3, 2), (3, 2); over four ranks at once: 3, 3, 3, 1.
  EXPECT_EQ(Partition::chunked(10, Sizes{2, 2}).sizes(), (Sizes{3, 2, 3, 2}));
  EXPECT_EQ(
      Partition::chunked(7, Sizes{2, 3}).sizes(), (Sizes{2, 2, 0, 1, 1, 1}));
  EXPECT_EQ(Partition::chunked(7, Sizes{3}), Partition::chunked(7, 3));
  EXPECT_EQ(Partition::chunked(7, Sizes{}).sizes(), (Sizes{7}));
}

TEST(Partition, EachRowHasTheOwnerWhoseIntervalHoldsIt) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t repeat = 1 + trial % 3;
    const Partition partition =
        random_partition(random, 1 + trial % 11, 1 + trial % 5)
            .repeated(repeat);
    Sizes owned(partition.pieces(), 0);
    for (int64_t row = 0; row < partition.extent(); ++row) {
      const int64_t piece = partition.owner(row);
      const Interval interval = partition.interval(piece);
      const int64_t within = row % partition.period();
      ASSERT_LE(interval.begin, within);
      ASSERT_LT(within, interval.end);
      ++owned[piece];
    }
    for (int64_t piece = 0; piece < partition.pieces(); ++piece) {
      ASSERT_EQ(owned[piece], partition.local_extent(piece));
    }
  }
}

TEST(Partition, RepeatsWithItsPeriod) {
  const Partition partition({3, 2}, 2);
  EXPECT_EQ(partition, Partition({3, 2}).repeated(2));
  EXPECT_NE(partition, Partition({3, 2}));
  EXPECT_FALSE(partition.is_contiguous());
  EXPECT_EQ(partition.period(), 5);
  EXPECT_EQ(partition.extent(), 10);
  EXPECT_EQ(partition.interval(1), (Interval{3, 5}));
  EXPECT_EQ(partition.local_extent(0), 6);
  EXPECT_EQ(partition.owner(7), 0);
  EXPECT_EQ(partition.owner(9), 1);
  EXPECT_EQ(partition.repeated(3).repeat(), 6);
  EXPECT_EQ(partition.repeated(0).extent(), 0);
  EXPECT_EQ(partition.repeated(0).pieces(), 2);
}

TEST(Partition, ScalesItsCutPoints) {
  EXPECT_EQ(Partition({3, 0, 2}).scaled(4).sizes(), (Sizes{12, 0, 8}));
  EXPECT_EQ(Partition({3, 2}, 2).scaled(2), Partition({6, 4}, 2));
  EXPECT_EQ(Partition({3, 2}).scaled(0).sizes(), (Sizes{0, 0}));
  EXPECT_TRUE(Partition({3, 2}).scaled(0).has_empty_piece());
}

TEST(Partition, Prints) {
  EXPECT_EQ(printed(Partition({6, 0, 4})), "[6, 0, 4]");
  EXPECT_EQ(printed(Partition({3, 2}, 2)), "2 x [3, 2]");
}

TEST(Partition, RefusesWhatIsNoPartition) {
  expect_error<c10::ValueError>(
      [] { Partition(Sizes{}); },
      "Partition: no sizes, expected one per piece");
  expect_error<c10::ValueError>(
      [] { Partition(Sizes{3, -1}); },
      "Partition: size -1 in [3, -1], expected at least 0");
  expect_error<c10::ValueError>(
      [] { Partition(Sizes{3}, 0); },
      "Partition: repeat 0, expected at least 1");
  expect_error<c10::ValueError>(
      [] { Partition::chunked(-2, 3); },
      "Partition: extent -2, expected at least 0");
  expect_error<c10::ValueError>(
      [] { Partition::chunked(2, 0); },
      "Partition: 0 pieces, expected at least 1");
  expect_error<c10::ValueError>(
      [] { Partition::chunked(2, Sizes{2, 0}); },
      "Partition: 0 pieces, expected at least 1");
  expect_error<c10::ValueError>(
      [] { Partition::chunked(-2, Sizes{}); },
      "Partition: extent -2, expected at least 0");
  expect_error<c10::ValueError>(
      [] { Partition(Sizes{3}).scaled(-1); },
      "Partition: scaled by -1, expected at least 0");
  expect_error<c10::ValueError>(
      [] { Partition(Sizes{3}).repeated(-1); },
      "Partition: repeated -1 times, expected at least 0");
}

TEST(Partition, KnowsWhetherAPieceIsEmpty) {
  EXPECT_FALSE(Partition({3, 2}).has_empty_piece());
  EXPECT_FALSE(Partition({3, 2}, 2).has_empty_piece());
  for (const Sizes& sizes :
       {Sizes{0}, Sizes{0, 3}, Sizes{3, 0, 2}, Sizes{3, 0}}) {
    EXPECT_TRUE(Partition(sizes).has_empty_piece());
  }
  EXPECT_TRUE(Partition({3, 2}).repeated(0).has_empty_piece());
}

TEST(Partition, RefusesRowsOutside) {
  for (int64_t row : {int64_t{-1}, int64_t{5}}) {
    expect_error<c10::IndexError>(
        [&] { Partition({3, 2}).owner(row); },
        "Partition: row " + std::to_string(row) + ", expected 0 <= row < 5");
  }
  const auto no_piece = "Partition: piece 2, expected 0 <= piece < 2";
  expect_error<c10::IndexError>(
      [] { Partition({3, 2}).interval(2); }, no_piece);
  expect_error<c10::IndexError>(
      [] { Partition({3, 2}).global_row(2, 0); }, no_piece);
  expect_error<c10::IndexError>(
      [] { Partition({3, 2}).local_extent(-1); },
      "Partition: piece -1, expected 0 <= piece < 2");
}

} // namespace
} // namespace shardtensor
