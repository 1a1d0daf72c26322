#include "shardtensor/rules/attention/merge.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "shardtensor/rules/attention/block.h"
#include "shardtensor/rules/attention/mask.h"

namespace shardtensor::detail {
namespace {

constexpr double kScale = 0.5;

/// PyTorch's attention to all keys at once.
at::Tensor whole(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const at::Tensor& mask) {
  return at::scaled_dot_product_attention(q, k, v, mask, 0, false, kScale);
}

/// The same, a part of the keys at a time.
Attended in_parts(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const at::Tensor& mask,
    const std::vector<int64_t>& parts) {
  Attended all{
      at::zeros({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options()),
      at::full({q.size(0), q.size(1), q.size(2)}, kUnseen, q.options())};
  int64_t first = 0;
  for (const int64_t rows : parts) {
    BlockOptions options{false, kScale, mask.narrow(3, first, rows)};
    options.hidden = hidden_rows(mask, q);
    const Keys keys{k.narrow(2, first, rows), v.narrow(2, first, rows)};
    merge(all, attend(q, keys, options));
    first += rows;
  }
  return all;
}

class MergeOfParts : public ::testing::TestWithParam<int64_t> {};

// 4 features take PyTorch's kernel, 3 the scores.
TEST_P(MergeOfParts, IsAttentionToAllKeys) {
  at::manual_seed(1);
  const auto q = at::randn({2, 3, 5, 4}, at::kDouble);
  const auto k = at::randn({2, 3, 7, 4}, at::kDouble);
  const auto v = at::randn({2, 3, 7, GetParam()}, at::kDouble);
  auto mask = at::randn({2, 1, 5, 7}, at::kDouble);
  mask.select(2, 0).fill_(kUnseen); // sees nothing
  mask.select(2, 1).narrow(1, 0, 1).narrow(1, 0, 1).fill_(kUnseen);
  mask.narrow(2, 2, 1).narrow(3, 0, 3).fill_(kUnseen); // nothing of part one
  mask.narrow(2, 3, 1).narrow(3, 3, 4).fill_(kUnseen); // of the others
  const auto expected = whole(q, k, v, mask);
  for (const auto& parts :
       std::vector<std::vector<int64_t>>{{7}, {3, 4}, {3, 1, 3}, {1, 6}}) {
    const auto actual = in_parts(q, k, v, mask, parts).output;
    EXPECT_TRUE(at::allclose(actual, expected)) << actual - expected;
    EXPECT_TRUE(actual.select(2, 0).eq(0).all().item<bool>());
  }
}

// See Note [Rows that hide all keys].
TEST_P(MergeOfParts, SeesKeysAlikeThatALargeNumberHides) {
  at::manual_seed(1);
  const auto q = at::randn({1, 1, 4, 4});
  const auto k = at::randn({1, 1, 7, 4});
  const auto v = at::randn({1, 1, 7, GetParam()});
  auto mask = at::randn({1, 1, 4, 7});
  mask.select(2, 0).fill_(-1e9);
  mask.select(2, 1).fill_(std::numeric_limits<float>::lowest());
  mask.select(2, 2).fill_(-1e9).narrow(2, 4, 3).fill_(-3e9); // four of seven
  const auto counts = at::tensor({7., 7., 4.}, at::kFloat);
  const auto expected = at::cat(
      {v.mean(2, true), v.mean(2, true), v.narrow(2, 0, 4).mean(2, true)}, 2);
  for (const auto& parts :
       std::vector<std::vector<int64_t>>{{7}, {3, 4}, {3, 1, 3}, {1, 6}}) {
    const auto actual = in_parts(q, k, v, mask, parts);
    EXPECT_TRUE(
        at::allclose(actual.output.narrow(2, 0, 3), expected, 1e-5, 1e-6))
        << actual.output - expected;
    EXPECT_TRUE(
        at::allclose(actual.log_sum.narrow(2, 0, 3).flatten().exp(), counts));
  }
}

TEST(HiddenRows, AreThoseWhoseKeysAreAllHiddenByNumbers) {
  const auto mask = at::tensor({-1e9, -2e9, -1e2, -1e9, kUnseen, kUnseen})
                        .view({1, 1, 3, 2})
                        .to(at::kFloat);
  const auto query = at::zeros({1, 1, 3, 4});
  const auto rows = hidden_rows(mask, query);
  EXPECT_TRUE(rows.origin.flatten().equal(at::tensor({-1e9F, 0.F, 0.F})));
  EXPECT_TRUE(rows.queries.equal(at::tensor({0}, at::kLong)));
  const auto of_keys = hidden_rows(mask.narrow(2, 0, 1), query);
  EXPECT_TRUE(of_keys.queries.equal(at::arange(3, at::kLong)));
  const auto seen = mask.clamp_min(-1e3);
  for (const auto& other : {seen, mask.gt(0), at::Tensor()}) {
    EXPECT_FALSE(hidden_rows(other, query).queries.defined());
  }
}

INSTANTIATE_TEST_SUITE_P(Features, MergeOfParts, ::testing::Values(4, 3));

TEST(Merge, WeighsByTheSumsOfExponentials) {
  const auto number = [](double x) { return at::full({1, 1, 1, 1}, x); };
  const auto log_sum = [](double x) {
    return at::full({1, 1, 1}, std::log(x));
  };
  const Attended all{number(1), log_sum(1)};
  merge(all, {number(3), log_sum(3)});
  EXPECT_NEAR(all.output.item<double>(), 2.5, 1e-6);
  EXPECT_NEAR(all.log_sum.item<double>(), std::log(4), 1e-6);
}

TEST(Merge, KeepsNumbersThatAreTooLargeToExponentiate) {
  const auto number = [](double x) { return at::full({1, 1, 1, 1}, x); };
  const auto log_sum = [](double x) { return at::full({1, 1, 1}, x); };
  const Attended all{number(1), log_sum(900)};
  merge(all, {number(3), log_sum(-900)});
  EXPECT_EQ(all.output.item<double>(), 1);
  merge(all, {number(5), log_sum(900)});
  EXPECT_NEAR(all.output.item<double>(), 3, 1e-6);
}

TEST(Merge, LeavesQueriesThatSeeNothingAtZero) {
  const auto unseen = at::full({1, 1, 2}, kUnseen);
  const Attended all{at::zeros({1, 1, 2, 3}), unseen.clone()};
  merge(all, {at::zeros({1, 1, 2, 3}), unseen});
  EXPECT_TRUE(all.output.eq(0).all().item<bool>());
  EXPECT_TRUE(all.log_sum.isneginf().all().item<bool>());
}

TEST(Merge, KeepsWhatIsNotANumber) {
  const Attended all{at::zeros({1, 1, 1, 2}), at::zeros({1, 1, 1})};
  merge(all, {at::full({1, 1, 1, 2}, NAN), at::full({1, 1, 1}, NAN)});
  EXPECT_TRUE(all.output.isnan().all().item<bool>());
}

} // namespace
} // namespace shardtensor::detail
