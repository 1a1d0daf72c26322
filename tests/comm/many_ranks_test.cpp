#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

#include "shardtensor/comm/primitives/exchange_schedule.h"
#include "shardtensor/layout/plans/transfer.h"

// What one rank of thousands plans is as long as its own list of peers.

namespace shardtensor::detail {
namespace {

constexpr int64_t kRanks = 16384;
constexpr int64_t kMiddle = kRanks / 2 + 64; // on 128 x 128, too

MeshPtr mesh_of(std::vector<int64_t> shape) {
  Mesh::Options options;
  options.shape = std::move(shape);
  options.ranks.resize(kRanks);
  std::iota(options.ranks.begin(), options.ranks.end(), 0);
  options.position = kMiddle;
  return make_mesh(std::move(options));
}

/// Of fp32, over the whole mesh.
ExchangeSchedule schedule_of(const ExchangePlan& plan) {
  std::vector<int64_t> rank_of(kRanks);
  std::iota(rank_of.begin(), rank_of.end(), 0);
  return ExchangeSchedule(encode(plan, kMiddle, rank_of), 4, /*adds=*/false);
}

ExchangePlan plan_halo(const SpecPtr& spec) {
  const auto rows = [&](int64_t dim, int64_t position) {
    const Interval own = spec->interval(dim, position);
    RowSource result;
    for (int64_t row = own.begin - 1; row <= own.end; ++row) {
      result.push_back(row < spec->size(dim) ? row : -1);
    }
    return result;
  };
  return plan_gather_rows(spec, spec->sharded_dims(), rows, kMiddle);
}

TEST(ManyRanks, NeighboursAreAllThatAHaloNames) {
  const auto along_rows =
      make_spec(mesh_of({kRanks}), {4 * kRanks, 4}, {Placement::shard(0)});
  const auto tiles = make_spec(
      mesh_of({128, 128}),
      {512, 512},
      {Placement::shard(0), Placement::shard(1)});
  for (const auto& [spec, peers] : {std::pair(along_rows, 2), {tiles, 8}}) {
    const ExchangePlan plan = plan_halo(spec);
    EXPECT_EQ(plan.sends.size(), peers + 1);
    EXPECT_EQ(plan.receives.size(), peers + 1);
    EXPECT_EQ(plan.peers, peers + 1);
    const ExchangeSchedule schedule = schedule_of(plan);
    EXPECT_LT(schedule.integers.size(), 200);
    ASSERT_EQ(schedule.rounds.size(), 1);
    EXPECT_EQ(schedule.rounds[0].sends.splits.size(), peers);
    EXPECT_EQ(schedule.rounds[0].receives.splits.size(), peers);
    EXPECT_EQ(schedule.sent.size(), peers);
  }
}

TEST(ManyRanks, AllPairsTakeAPieceForEachRank) {
  const auto mesh = mesh_of({kRanks});
  const auto rows =
      make_spec(mesh, {2 * kRanks, kRanks}, {Placement::shard(0)});
  const auto columns = with_placements(rows, {Placement::shard(1)});
  const auto terms = with_placements(rows, {Placement::partial()});
  for (const auto& [from, to] :
       {std::pair(rows, replicated(rows)), {rows, columns}, {terms, rows}}) {
    const ExchangePlan plan = plan_redistribute(from, to, kMiddle);
    EXPECT_EQ(plan.sends.size(), kRanks);
    EXPECT_EQ(plan.receives.size(), kRanks);
    EXPECT_EQ(plan.peers, kRanks);
    EXPECT_LT(schedule_of(plan).integers.size(), 16 * kRanks);
  }
}

TEST(ManyRanks, CountsWhatMovesWithoutAllPairs) {
  const auto mesh = mesh_of({kRanks});
  const auto rows = make_spec(mesh, {2 * kRanks}, {Placement::shard(0)});
  const auto terms = with_placements(rows, {Placement::partial()});
  EXPECT_EQ(moved_elements(rows, replicated(rows)), 2 * kRanks * (kRanks - 1));
  EXPECT_EQ(moved_elements(terms, rows), 2 * kRanks * (kRanks - 1));
}

} // namespace
} // namespace shardtensor::detail
