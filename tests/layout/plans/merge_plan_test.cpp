#include <algorithm>
#include <numeric>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "shardtensor/layout/plans/merge_plan.h"

namespace shardtensor::detail {
namespace {

using Plans = std::vector<std::vector<MergeStep>>; // of every piece

Plans plans_of(int64_t pieces, int64_t most_terms) {
  Plans plans;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    plans.push_back(plan_merge(pieces, piece, most_terms));
  }
  return plans;
}

/// Whose terms every piece has at the end, in the order of merging.
std::vector<std::vector<int64_t>> merged(const Plans& plans) {
  std::vector<std::vector<int64_t>> terms;
  for (size_t piece = 0; piece < plans.size(); ++piece) {
    terms.push_back({static_cast<int64_t>(piece)});
  }
  for (size_t step = 0; step < plans[0].size(); ++step) {
    auto next = terms;
    for (size_t piece = 0; piece < plans.size(); ++piece) {
      next[piece].clear();
      for (const int64_t source : plans[piece].at(step).sources) {
        const auto& more = terms.at(source);
        next[piece].insert(next[piece].end(), more.begin(), more.end());
      }
    }
    terms = std::move(next);
  }
  return terms;
}

void check(int64_t pieces, int64_t most_terms) {
  SCOPED_TRACE(::testing::Message() << pieces << " by " << most_terms);
  const Plans plans = plans_of(pieces, most_terms);
  std::vector<int64_t> all(pieces);
  std::iota(all.begin(), all.end(), 0);
  for (const auto& terms : merged(plans)) {
    ASSERT_EQ(terms, all);
  }
  for (size_t step = 0; step < plans[0].size(); ++step) {
    std::vector<std::vector<int64_t>> receivers(pieces);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const auto& sources = plans[piece][step].sources;
      ASSERT_LE(static_cast<int64_t>(sources.size()), most_terms);
      ASSERT_EQ(std::count(sources.begin(), sources.end(), piece), 1);
      for (const int64_t source : sources) {
        if (source != piece) {
          receivers[source].push_back(piece);
        }
      }
    }
    for (int64_t piece = 0; piece < pieces; ++piece) {
      ASSERT_EQ(plans[piece][step].receivers, receivers[piece]);
    }
  }
}

TEST(PlanMerge, GivesEveryPieceTheTermsOfAllInOneOrder) {
  for (const int64_t most_terms : {2, 3, 16}) {
    for (int64_t pieces = 1; pieces <= 40; ++pieces) {
      check(pieces, most_terms);
    }
    for (const int64_t pieces : {97, 256, 257, 1000}) {
      check(pieces, most_terms);
    }
  }
}

TEST(PlanMerge, TakesOneStepForFewPieces) {
  for (int64_t pieces = 1; pieces <= kMostTerms; ++pieces) {
    EXPECT_EQ(plan_merge(pieces, pieces / 2).size(), 1);
  }
  EXPECT_EQ(plan_merge(kMostTerms + 1, 0).size(), 2);
}

TEST(PlanMerge, FollowsTheExampleOfTheHeader) {
  EXPECT_EQ(
      plan_merge(4, 2, 2),
      (std::vector<MergeStep>{{{2, 3}, {3}}, {{0, 2}, {0}}}));
  EXPECT_EQ(
      plan_merge(4, 3, 2),
      (std::vector<MergeStep>{{{2, 3}, {2}}, {{1, 3}, {1}}}));
}

TEST(PlanMerge, HasFewPeersAmongThousands) {
  for (const int64_t pieces : {16384, 16381, 16385}) {
    for (const int64_t piece : {0, 1, 8191, 16380}) {
      const auto steps = plan_merge(pieces, piece);
      ASSERT_EQ(steps.size(), 4);
      for (const MergeStep& step : steps) {
        EXPECT_LE(step.sources.size(), kMostTerms);
        EXPECT_LE(step.receivers.size(), 2 * kMostTerms);
      }
    }
  }
}

TEST(PlanMerge, RefusesPiecesThatAreNoneAndTooFewTerms) {
  EXPECT_THROW(plan_merge(4, 4), c10::IndexError);
  EXPECT_THROW(plan_merge(4, -1), c10::IndexError);
  EXPECT_THROW(plan_merge(4, 0, 1), c10::ValueError);
}

} // namespace
} // namespace shardtensor::detail
