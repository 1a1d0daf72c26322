#include "shardtensor/rules/spectra/plan.h"

#include <chrono>

#include <gtest/gtest.h>

#include "../../layout/support.h"

namespace shardtensor::testing {

using namespace detail;
namespace {

using Dims = std::vector<int64_t>;

SpecPtr cut(
    const Dims& shape,
    const Dims& sizes,
    const Dims& dims,
    const ShardSpec::Partitions& partitions = {}) {
  std::vector<Placement> placements;
  for (const int64_t dim : dims) {
    placements.push_back(Placement::shard(dim));
  }
  return make_spec(mesh_of(shape), sizes, placements, partitions);
}

/// The moves of a plan that begins at `from`.
int64_t moves(const TransformPlan& plan, const SpecPtr& from) {
  int64_t count = 0;
  auto at = from;
  for (const auto& step : plan.steps) {
    count += step.layout != at;
    at = step.result;
  }
  return count;
}

TransformPlan there(const SpecPtr& signal) {
  const auto last = signal->dim() - 1;
  return plan_transform(
      signal, {{last - 1, last}, Lines::FromReal, signal->size(last) / 2 + 1});
}

TransformPlan back(const SpecPtr& spectrum, const SpecPtr& home) {
  const auto last = home->dim() - 1;
  return plan_transform(
      spectrum, {{last - 1, last}, Lines::ToReal, home->size(last)}, home);
}

TEST(PlanTransform, MovesOncePerCutDimThereAndOnceBack) {
  const ShardSpec::Partitions uneven{{}, {}, Partition({11, 5}), {}};
  for (const auto& [home, moved] :
       {std::pair(cut({2}, {4, 3, 16, 32}, {2}), 1),
        std::pair(cut({2}, {4, 3, 16, 32}, {2}, uneven), 1),
        std::pair(cut({2}, {4, 3, 16, 32}, {3}), 1),
        std::pair(cut({2}, {4, 3, 16, 32}, {0}), 0),
        std::pair(cut({2, 2}, {4, 3, 16, 32}, {2, 3}), 2),
        std::pair(cut({2, 2}, {4, 3, 16, 32}, {3, 2}), 2),
        std::pair(cut({2, 2}, {4, 3, 16, 32}, {0, 2}), 1)}) {
    const auto forward = there(home);
    EXPECT_EQ(moves(forward, home), moved) << *home;
    const auto inverse = back(forward.result(), home);
    EXPECT_EQ(moves(inverse, forward.result()), moved) << *home;
    EXPECT_EQ(inverse.result(), home);
    EXPECT_FALSE(forward.gathered || inverse.gathered);
  }
}

TEST(PlanTransform, PrefersWhatIsDoneThenSamplesToChannels) {
  const auto by_rows = there(cut({2}, {4, 32, 16, 32}, {2}));
  EXPECT_EQ(by_rows.result()->placement(0), Placement::shard(3));
  const auto by_columns = there(cut({2}, {4, 32, 16, 32}, {3}));
  EXPECT_EQ(by_columns.result()->placement(0), Placement::shard(0));
  const auto one_sample = there(cut({2}, {1, 32, 16, 32}, {3}));
  EXPECT_EQ(one_sample.result()->placement(0), Placement::shard(1));
  // A tenth of the ranks would work: channels after all.
  const auto few_modes = there(cut({16}, {1, 32, 64, 32}, {2}));
  EXPECT_EQ(few_modes.result()->placement(0), Placement::shard(1));
}

TEST(PlanTransform, ScattersSumsWhereTheSignalBelongs) {
  const auto sum = make_spec(mesh_of({2}), {3, 16, 17}, {Placement::partial()});
  const auto home = cut({2}, {3, 16, 32}, {1});
  const auto plan = plan_transform(sum, {{2}, Lines::ToReal, 32}, home);
  EXPECT_EQ(moves(plan, sum), 1);
  EXPECT_EQ(plan.result(), home);
  // Nothing else to cut: every rank transforms its terms.
  const auto line = make_spec(mesh_of({2}), {17}, {Placement::partial()});
  const auto kept = plan_transform(line, {{0}, Lines::Complex});
  EXPECT_EQ(kept.result(), line);
  EXPECT_FALSE(kept.gathered);
}

TEST(PlanTransform, SaysThatALineHasNoOtherDim) {
  const auto line = cut({2}, {16}, {0});
  EXPECT_EQ(
      plan_transform(line, {{0}, Lines::Complex}).gathered, replicated(line));
}

TEST(PlanTransform, CostsTheRanksNotTheirPairs) {
  const auto home = cut({128, 128}, {2, 64, 16384, 16384}, {2, 3});
  const auto begin = std::chrono::steady_clock::now();
  const auto forward = there(home);
  back(forward.result(), home);
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - begin;
  EXPECT_LT(seconds.count(), 0.3);
}

} // namespace
} // namespace shardtensor::testing
