#include "shardtensor/rules/reduce/moments.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "shardtensor/layout/plans/merge_plan.h"

namespace shardtensor::detail {
namespace {

using Terms = std::vector<at::Tensor>; // mean, squares, count

/// A piece's row of x, in its dtype.
Terms term_of(const at::Tensor& row) {
  const auto [var, mean] = at::var_mean(row, at::IntArrayRef{0}, 0);
  const auto count = at::full({}, row.numel(), row.options());
  return {mean, var * row.numel(), count};
}

/// What each of the pieces, the rows of x, has after merging all terms.
std::vector<Terms> merge_rows(const at::Tensor& x) {
  const int64_t pieces = x.size(0);
  std::vector<Terms> terms;
  for (const auto& row : x.unbind(0)) {
    terms.push_back(term_of(row));
  }
  for (size_t step = 0; step < plan_merge(pieces, 0).size(); ++step) {
    std::vector<Terms> next;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const auto steps = plan_merge(pieces, piece);
      Terms stacked;
      for (size_t i = 0; i < 3; ++i) {
        Terms of_sources;
        for (const int64_t source : steps[step].sources) {
          of_sources.push_back(terms[source][i]);
        }
        stacked.push_back(at::stack(of_sources));
      }
      next.push_back(merge_stacked_moments(stacked));
    }
    terms = std::move(next);
  }
  return terms;
}

double error(const at::Tensor& actual, const at::Tensor& expected) {
  return (actual.to(at::kDouble) - expected).abs().item<double>();
}

TEST(MergeMoments, ManyRanksLoseNothingFarFromZero) {
  at::manual_seed(0);
  const auto x = at::randn({1000, 64}, at::kFloat) + 1000;
  const auto [wanted_var, wanted_mean] =
      at::var_mean(x.to(at::kDouble).flatten(), at::IntArrayRef{0}, 0);
  const auto all = merge_rows(x);
  EXPECT_EQ(all[0][2].item<double>(), x.numel());
  // The nearest fp32 number is up to 3e-5 away from the mean.
  EXPECT_LT(error(all[0][0], wanted_mean), 2e-4);
  EXPECT_LT(error(all[0][1] / x.numel(), wanted_var), 2e-6);
  // Sums of squares, which lose what the mean leaves of them.
  const auto naive = x.square().mean() - x.mean().square();
  EXPECT_GT(error(naive, wanted_var), 1e-3);
}

TEST(MergeMoments, EveryRankGetsTheSameBits) {
  at::manual_seed(0);
  const auto all = merge_rows(at::randn({300, 5}, at::kFloat) + 10);
  for (const Terms& terms : all) {
    for (size_t i = 0; i < 3; ++i) {
      ASSERT_TRUE(at::equal(terms[i], all[0][i]));
    }
  }
}

TEST(MergeMoments, RanksWithoutElementsCountForNothing) {
  const auto value = at::full({}, 3.0);
  const auto none = at::zeros({});
  const auto all = merge_stacked_moments(
      {at::stack({none, value}),
       at::stack({none, value}),
       at::stack({none, value})});
  EXPECT_EQ(all[0].item<double>(), 3);
  EXPECT_EQ(all[1].item<double>(), 3);
  EXPECT_EQ(all[2].item<double>(), 3);
}

} // namespace
} // namespace shardtensor::detail
