#include "shardtensor/layout/plans/constant_layout.h"

#include <gtest/gtest.h>

#include "../support.h"

namespace shardtensor::testing {

using namespace detail;
namespace {

SpecPtr cut(
    const std::vector<int64_t>& shape,
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    const ShardSpec::Partitions& partitions = {}) {
  return make_spec(mesh_of(shape), sizes, placements, partitions);
}

const auto kWhole = ViewGeometry{{8, 9}, {9, 1}, 0};
const auto kRows = Placement::shard(0);
const auto kColumns = Placement::shard(1);

TEST(LayoutOfWritten, IsTheValuesForTheWholeTensor) {
  const auto value = cut({2}, {8, 9}, {kColumns}, {{}, Partition({7, 2})});
  EXPECT_EQ(layout_of_written({8, 9}, kWhole, value), value);
  const auto repeated =
      cut({2}, {8, 9}, {kRows}, {Partition({3, 1}, /*repeat=*/2), {}});
  EXPECT_EQ(layout_of_written({8, 9}, kWhole, repeated), repeated);
}

TEST(LayoutOfWritten, ScattersSumsAlongADimThatTheValueFills) {
  const auto sum = cut({2}, {8, 9}, {Placement::partial()});
  EXPECT_EQ(
      layout_of_written({8, 9}, kWhole, sum), cut({2}, {8, 9}, {kColumns}));
  const ViewGeometry corner{{8, 3}, {9, 1}, 0};
  const auto of_corner = cut({2}, {8, 3}, {Placement::partial()});
  EXPECT_EQ(
      layout_of_written({8, 9}, corner, of_corner), cut({2}, {8, 9}, {kRows}));
  const auto both = cut({2, 2}, {8, 9}, {kColumns, Placement::partial()});
  EXPECT_EQ(
      layout_of_written({8, 9}, kWhole, both),
      cut({2, 2}, {8, 9}, {kColumns, kRows}));
  const ViewGeometry one{{2, 2}, {9, 1}, 0};
  const auto inside = cut({2}, {2, 2}, {Placement::partial()});
  EXPECT_EQ(
      layout_of_written({8, 9}, one, inside),
      cut({2}, {8, 9}, {Placement::replicate()}));
  const ViewGeometry pairs{{4, 3, 2}, {18, 2, 1}, 0}; // of (4, 9, 2)
  const auto parts = cut({2}, {4, 3, 2}, {Placement::partial()});
  EXPECT_EQ(
      layout_of_written({4, 9, 2}, pairs, parts), cut({2}, {4, 9, 2}, {kRows}));
  const auto largest = cut({2}, {8, 9}, {Placement::partial(Reduce::Max)});
  EXPECT_EQ(layout_of_written({8, 9}, kWhole, largest), replicated(largest));
}

TEST(LayoutOfWritten, KeepsTheRowsOfASliceWhereTheyAre) {
  const ViewGeometry columns{{8, 6}, {9, 1}, 1}; // columns [1, 7)
  const auto by_rows = cut({2}, {8, 6}, {kRows}, {Partition({5, 3}), {}});
  EXPECT_EQ(
      layout_of_written({8, 9}, columns, by_rows)->partition(0),
      Partition({5, 3}));
  const auto by_columns = cut({2}, {8, 6}, {kColumns}, {{}, Partition({3, 3})});
  EXPECT_EQ(
      layout_of_written({8, 9}, columns, by_columns)->partition(1),
      Partition({4, 5}));
  const ViewGeometry every_second{{4, 9}, {18, 1}, 9}; // rows 1, 3, 5, 7
  const auto seconds = cut({2}, {4, 9}, {kRows}, {Partition({2, 2}), {}});
  EXPECT_EQ(
      layout_of_written({8, 9}, every_second, seconds)->partition(0),
      Partition({5, 3}));
}

TEST(LayoutOfWritten, IsEvenWhereASliceIsSmall) {
  const ViewGeometry corner{{2, 3}, {12, 1}, 0};
  const auto value =
      cut({2, 2}, {2, 3}, {kRows, kColumns}, {Partition({1, 1}), {}});
  EXPECT_EQ(
      layout_of_written({8, 12}, corner, value),
      cut({2, 2}, {8, 12}, {kRows, kColumns}));
}

TEST(LayoutOfWritten, FollowsDimsThatTheViewMoves) {
  const ViewGeometry transposed{{9, 8}, {1, 9}, 0};
  const auto value = cut({2}, {9, 8}, {kRows}, {Partition({4, 5}), {}});
  EXPECT_EQ(
      layout_of_written({8, 9}, transposed, value),
      cut({2}, {8, 9}, {kColumns}, {{}, Partition({4, 5})}));
  const ViewGeometry row{{9}, {1}, 18}; // x[2]
  const auto of_row = cut({2}, {9}, {kRows}, {Partition({4, 5})});
  EXPECT_EQ(
      layout_of_written({8, 9}, row, of_row),
      cut({2}, {8, 9}, {kColumns}, {{}, Partition({4, 5})}));
}

TEST(LayoutOfWritten, LeavesWholeWhatTheValueDoesNotCut) {
  const auto whole = cut({2}, {8, 9}, {Placement::replicate()});
  // A value of one column, cut there; merged dims; rows of an expanded dim.
  EXPECT_EQ(
      layout_of_written({8, 9}, kWhole, cut({2}, {8, 1}, {kColumns})), whole);
  EXPECT_EQ(
      layout_of_written({8, 9}, {{72}, {1}, 0}, cut({2}, {72}, {kRows})),
      whole);
  EXPECT_EQ(
      layout_of_written({8, 9}, {{4, 9}, {0, 1}, 0}, cut({2}, {4, 9}, {kRows})),
      whole);
  // Dims of the value before the view's first, of one row.
  EXPECT_EQ(
      layout_of_written({8, 9}, kWhole, cut({2}, {1, 8, 9}, {kRows})), whole);
}

TEST(LayoutOfWritten, TakesTensorsWithoutElements) {
  const ViewGeometry none{{0, 9}, {9, 1}, 0};
  EXPECT_EQ(
      layout_of_written({8, 9}, none, cut({2}, {0, 9}, {kColumns})),
      cut({2}, {8, 9}, {kColumns}));
  EXPECT_EQ(
      layout_of_written({0, 9}, none, cut({2}, {0, 9}, {kRows}))->sizes(),
      (std::vector<int64_t>{0, 9}));
}

} // namespace
} // namespace shardtensor::testing
