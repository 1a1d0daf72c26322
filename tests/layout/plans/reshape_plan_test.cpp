#include "shardtensor/layout/plans/reshape_plan.h"

#include <gtest/gtest.h>

#include "../parts.h"

namespace shardtensor::detail {
namespace {

using namespace testing;

using Sizes = std::vector<int64_t>;

SpecPtr cut(const Sizes& sizes, int64_t dim, const Partition& partition) {
  ShardSpec::Partitions partitions(sizes.size());
  partitions[dim] = partition;
  return make_spec(
      mesh_of({partition.pieces()}),
      sizes,
      {Placement::shard(dim)},
      partitions);
}

// Sizes of the same number of elements, some with dims of size 1 and 0.
const std::vector<std::vector<Sizes>>& families() {
  static const std::vector<std::vector<Sizes>> all{
      {{24}, {4, 6}, {2, 12}, {2, 2, 6}, {6, 4}, {3, 8}, {1, 24}, {4, 1, 3, 2}},
      {{5, 6, 2}, {30, 2}, {5, 12}, {60}, {5, 3, 4}, {10, 6}, {5, 2, 3, 1, 2}},
      {{0, 4}, {4, 0}, {0}, {2, 0, 3}},
      {{1}, {}, {1, 1}},
  };
  return all;
}

/// A local reshape of every rank's piece gives the piece that the output's
/// layout promises.
void check_reshape(const SpecPtr& spec, const Sizes& sizes) {
  const auto plan = plan_reshape(spec, sizes);
  ASSERT_EQ(plan.output->sizes(), sizes);
  ASSERT_EQ(plan.wanted->sizes(), spec->sizes());
  const auto before = numbered(spec->sizes());
  for (int64_t position = 0; position < spec->mesh()->ranks(); ++position) {
    const auto local = part_of(before, *plan.wanted, position);
    const auto expected = part_of(before.view(sizes), *plan.output, position);
    ASSERT_TRUE(local.reshape(expected.sizes()).equal(expected))
        << *spec << " -> " << *plan.wanted << " -> " << *plan.output;
  }
}

TEST(ReshapePlan, EveryRankReshapesItsOwnPiece) {
  std::mt19937 random(1);
  for (const auto& family : families()) {
    for (const auto& from : family) {
      for (const auto& shape : mesh_shapes()) {
        const auto spec = random_spec(
            random,
            mesh_of(shape),
            from,
            random_placements(random, shape.size(), from.size(), true),
            true);
        for (const auto& to : family) {
          check_reshape(spec, to);
        }
      }
    }
  }
}

TEST(ReshapePlan, PartialAxesStay) {
  const auto spec = make_spec(
      mesh_of({2, 2}), {4, 6}, {Placement::partial(), Placement::shard(0)});
  const auto plan = plan_reshape(spec, {24});
  EXPECT_EQ(plan.wanted, spec);
  EXPECT_TRUE(plan.output->placement(0).is_partial());
  EXPECT_TRUE(plan.output->placement(1).is_shard(0));
}

TEST(ReshapePlan, MergingAndSplittingMovesNothing) {
  // The example of Note [Reshaping a partition].
  const auto matrix = cut({2, 6}, 1, Partition({4, 2}));
  const auto flat = plan_reshape(matrix, {12});
  EXPECT_EQ(flat.wanted, matrix);
  EXPECT_EQ(flat.output, cut({12}, 0, Partition({4, 2}, /*repeat=*/2)));
  const auto cube = plan_reshape(flat.output, {2, 3, 2});
  EXPECT_EQ(cube.wanted, flat.output);
  EXPECT_EQ(cube.output, cut({2, 3, 2}, 1, Partition({2, 1})));
  std::mt19937 random(2);
  for (int trial = 0; trial < 100; ++trial) {
    const auto spec = random_spec(
        random, mesh_of({3}), {4, 5, 3}, {Placement::shard(trial % 3)});
    const auto merged = plan_reshape(spec, {60});
    EXPECT_EQ(merged.wanted, spec);
    EXPECT_EQ(plan_reshape(merged.output, {4, 5, 3}).wanted, merged.output);
  }
}

TEST(ReshapePlan, ACutThatHasNoPlaceIsRounded) {
  // Cut after 3 rows of 8: as (4, 2) the nearest cut is after 2 or 4.
  const auto spec = cut({8}, 0, Partition({3, 5}));
  const auto plan = plan_reshape(spec, {4, 2});
  EXPECT_EQ(plan.output->partition(0).sizes(), (Sizes{2, 2}));
  EXPECT_EQ(plan.wanted->partition(0).sizes(), (Sizes{4, 4}));
}

// As many intervals as rows times ranks are more than there is memory for.
TEST(ReshapePlan, RowsOfManyRanksKeepTheirCut) {
  constexpr int64_t kRanks = 16384;
  Sizes pieces;
  int64_t rows = 0;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    pieces.push_back(rank % 2 == 0 ? 7 : 9);
    rows += pieces.back();
  }
  const auto plan =
      plan_reshape(cut({rows}, 0, Partition(pieces)), {rows / 2, 2});
  EXPECT_EQ(plan.output->sharded_dims(), Sizes{0});
  EXPECT_TRUE(plan.output->is_contiguous());
  EXPECT_EQ(plan.output->local_sizes(1), (Sizes{4, 2}));
}

TEST(ReshapePlan, CutsThatAreRepeatedKeepTheirRhythm) {
  const auto plan =
      plan_reshape(cut({30'000}, 0, Partition({51, 49}, 300)), {15'000, 2});
  EXPECT_EQ(plan.wanted, cut({30'000}, 0, Partition({52, 48}, 300)));
  EXPECT_EQ(plan.output, cut({15'000, 2}, 0, Partition({26, 24}, 300)));
}

TEST(ReshapePlan, CutsAreNotRepeatedFinerThanTheyWere) {
  const auto plan =
      plan_reshape(cut({30'000}, 0, Partition({75, 25}, 300)), {10'000, 3});
  EXPECT_TRUE(plan.wanted->is_contiguous());
}

} // namespace
} // namespace shardtensor::detail
