#include "shardtensor/rules/norm_cells.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "shardtensor/rules/norm_passes.h"

namespace shardtensor {
namespace {

using Dims = std::vector<int64_t>;

/// Cells longer than one run, their length no multiple of the lanes.
at::Tensor images(at::ScalarType dtype, double mean = 0) {
  at::manual_seed(3);
  return at::randn({2, 3, 61, 67}, dtype) + mean;
}

at::Tensor per_channel_numbers(at::ScalarType dtype) {
  return at::linspace(-1, 2, 6, dtype).view({2, 3, 1, 1});
}

void expect_close(
    const at::Tensor& actual,
    const at::Tensor& expected,
    double relative) {
  const auto wanted = expected.to(actual.scalar_type());
  ASSERT_EQ(actual.sizes(), wanted.sizes());
  EXPECT_TRUE(at::allclose(actual, wanted, relative, relative))
      << (actual - wanted).abs().max();
}

TEST(NormCells, AreTheLastDimsSideBySide) {
  const auto x = at::zeros({2, 3, 20, 30});
  EXPECT_EQ(cell_dims({x}, {2, 3}), Dims({2, 3}));
  EXPECT_EQ(cell_dims({x}, {0, 2, 3}), Dims({2, 3}));
  EXPECT_EQ(cell_dims({x}, {0, 1, 2, 3}), Dims({0, 1, 2, 3}));
  EXPECT_EQ(cell_dims({x.narrow(1, 0, 2)}, {0, 1, 2, 3}), Dims({1, 2, 3}));
  EXPECT_EQ(cell_dims({x, at::zeros({2, 3, 20, 30})}, {2, 3}), Dims({2, 3}));
}

TEST(NormCells, LeaveOtherTensorsToPyTorch) {
  const auto x = at::zeros({2, 3, 20, 30});
  const auto none = std::nullopt;
  EXPECT_EQ(cell_dims({x}, {0, 1}), none);
  EXPECT_EQ(cell_dims({x}, {3}), none); // short
  EXPECT_EQ(cell_dims({x.to(at::kBFloat16)}, {2, 3}), none);
  EXPECT_EQ(cell_dims({x.transpose(2, 3)}, {2, 3}), none);
  EXPECT_EQ(cell_dims({x.to(at::MemoryFormat::ChannelsLast)}, {2, 3}), none);
  EXPECT_EQ(cell_dims({x, at::zeros({}).expand_as(x)}, {2, 3}), none);
  EXPECT_EQ(cell_dims({x, x.to(at::kDouble)}, {2, 3}), none);
}

TEST(NormCells, MomentsHoldForALargeMean) {
  const auto x = images(at::kFloat, /*mean=*/4000);
  const auto exact = x.to(at::kDouble);
  const auto mean = exact.mean({2, 3}, true);
  const auto moments = cell_moments(x, {2, 3});
  expect_close(moments.mean, mean, 1e-7);
  expect_close(
      moments.squares, (exact - mean).square().sum({2, 3}, true), 1e-5);
}

TEST(NormCells, MomentsOfAStatisticMergeItsCells) {
  const auto x = images(at::kDouble, /*mean=*/-3);
  const auto mean = x.mean({0, 2, 3}, true);
  const auto moments = own_moments(x, {0, 2, 3});
  expect_close(moments.mean, mean, 1e-13);
  expect_close(
      moments.squares, (x - mean).square().sum({0, 2, 3}, true), 1e-13);
  expect_close(
      own_squares(x, {0, 2, 3}), x.square().sum({0, 2, 3}, true), 1e-13);
}

TEST(NormCells, SumsAndSumsTimesDeviations) {
  const auto x = images(at::kDouble);
  const auto y = images(at::kDouble, /*mean=*/2).flip(0).contiguous();
  const auto mean = per_channel_numbers(at::kDouble);
  const auto sums = cell_sums(x, mean, y, {2, 3});
  expect_close(sums.values, y.sum({2, 3}, true), 1e-13);
  expect_close(sums.products, (y * (x - mean)).sum({2, 3}, true), 1e-13);
}

TEST(NormCells, ScaleAndCombine) {
  const auto x = images(at::kDouble);
  const auto y = x.flip(3).contiguous();
  const auto mean = per_channel_numbers(at::kDouble);
  const auto scale = mean.exp();
  const auto bias = at::linspace(0, 1, 3, at::kFloat).view({1, 3, 1, 1});
  expect_close(
      scale_cells(x, mean, scale, bias, {2, 3}),
      (x - mean) * scale + bias,
      1e-13);
  expect_close(scale_cells(x, {}, scale, {}, {2, 3}), x * scale, 1e-13);
  expect_close(
      combine_cells(x, mean, scale, y, mean, bias, {2, 3}),
      (x - mean) * scale + y * mean + bias,
      1e-13);
}

TEST(NormCells, ReadPartsOfATensor) {
  const auto x = images(at::kFloat).narrow(1, 1, 2);
  const auto scale = at::arange(1, 3, at::kFloat).view({1, 2, 1, 1});
  const auto moments = cell_moments(x, {2, 3});
  expect_close(moments.mean, x.mean({2, 3}, true), 1e-6);
  expect_close(scale_cells(x, {}, scale, {}, {2, 3}), x * scale, 1e-7);
}

} // namespace
} // namespace shardtensor
