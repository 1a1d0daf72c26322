#include "shardtensor/rules/norm/slices.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "shardtensor/rules/norm/passes.h"

namespace shardtensor::detail {
namespace {

using Dims = std::vector<int64_t>;

/// Slices longer than one run, their length no multiple of the lanes.
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

Dims slice_dims(const std::vector<at::Tensor>& tensors, const Dims& constant) {
  const auto slices = find_slices(tensors, constant);
  return slices ? slices->dims : Dims();
}

TEST(NormSlices, AreRunsSideBySide) {
  const auto x = at::zeros({2, 3, 20, 30});
  EXPECT_EQ(slice_dims({x}, {2, 3}), Dims({2, 3}));
  EXPECT_EQ(slice_dims({x}, {0, 2, 3}), Dims({2, 3}));
  EXPECT_EQ(slice_dims({x}, {0, 1, 2, 3}), Dims({0, 1, 2, 3}));
  EXPECT_EQ(slice_dims({x.narrow(1, 0, 2)}, {0, 1, 2, 3}), Dims({1, 2, 3}));
  EXPECT_EQ(slice_dims({x, at::zeros({2, 3, 20, 30})}, {2, 3}), Dims({2, 3}));
  EXPECT_EQ(slice_dims({x.transpose(2, 3)}, {2, 3}), Dims({2, 3}));
  EXPECT_EQ(slice_dims({x.narrow(0, 0, 1)}, {0, 2}), Dims()); // 20 are few
  EXPECT_EQ(find_slices({x}, {2, 3})->width, 1);
}

TEST(NormSlices, LieInterleavedWhereChannelsAreLast) {
  const auto x = at::zeros({2, 6, 20, 30}).to(at::MemoryFormat::ChannelsLast);
  const auto slices = find_slices({x}, {2, 3});
  ASSERT_TRUE(slices);
  EXPECT_EQ(slices->dims, Dims({2, 3}));
  EXPECT_EQ(slices->interleaved, Dims({1}));
  EXPECT_EQ(slices->length, 600);
  EXPECT_EQ(slices->width, 6);
  const auto groups = find_slices({x.unflatten(1, {2, 3})}, {2, 3, 4});
  ASSERT_TRUE(groups);
  EXPECT_EQ(groups->dims, Dims({3, 4}));
  EXPECT_EQ(groups->interleaved, Dims({1, 2}));
}

TEST(NormSlices, OfLargeImagesAreRows) {
  const auto x = at::zeros({1, 16, 80, 100}).to(at::MemoryFormat::ChannelsLast);
  EXPECT_EQ(slice_dims({x}, {0, 2, 3}), Dims({0, 3}));
}

TEST(NormSlices, LeaveOtherTensorsToPyTorch) {
  const auto x = at::zeros({2, 3, 20, 30});
  EXPECT_FALSE(find_slices({x}, {0, 1}));
  EXPECT_FALSE(find_slices({x}, {3})); // short
  EXPECT_FALSE(find_slices({x.to(at::kHalf)}, {2, 3}));
  EXPECT_FALSE(find_slices({x, at::zeros({}).expand_as(x)}, {2, 3}));
  EXPECT_FALSE(find_slices({x, x.to(at::kDouble)}, {2, 3}));
  EXPECT_FALSE(find_slices({x, x.to(at::MemoryFormat::ChannelsLast)}, {2, 3}));
}

class NormLoops : public ::testing::TestWithParam<at::MemoryFormat> {
 protected:
  at::Tensor laid_out(const at::Tensor& x) {
    return x.contiguous(GetParam());
  }
  Slices slices_of(const at::Tensor& x) {
    return find_slices({x}, {2, 3}).value();
  }
};

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    NormLoops,
    ::testing::Values(
        at::MemoryFormat::Contiguous,
        at::MemoryFormat::ChannelsLast));

TEST_P(NormLoops, MomentsHoldForALargeMean) {
  const auto x = laid_out(images(at::kFloat, /*mean=*/4000));
  const auto exact = x.to(at::kDouble);
  const auto mean = exact.mean({2, 3}, true);
  const auto moments = slice_moments(x, slices_of(x));
  expect_close(moments.mean, mean, 1e-7);
  expect_close(
      moments.squares, (exact - mean).square().sum({2, 3}, true), 1e-5);
}

TEST_P(NormLoops, MomentsOfAStatisticMergeItsSlices) {
  const auto x = laid_out(images(at::kDouble, /*mean=*/-3));
  const auto mean = x.mean({0, 2, 3}, true);
  const auto moments = own_moments(x, {0, 2, 3});
  expect_close(moments.mean, mean, 1e-13);
  expect_close(
      moments.squares, (x - mean).square().sum({0, 2, 3}, true), 1e-13);
  expect_close(
      own_squares(x, {0, 2, 3}), x.square().sum({0, 2, 3}, true), 1e-13);
}

TEST_P(NormLoops, SumsAndSumsTimesDeviations) {
  const auto x = laid_out(images(at::kDouble));
  const auto y = laid_out(images(at::kDouble, /*mean=*/2).flip(0));
  const auto mean = per_channel_numbers(at::kDouble);
  const auto sums = slice_sums(x, mean, y, slices_of(x));
  expect_close(sums.values, y.sum({2, 3}, true), 1e-13);
  expect_close(sums.products, (y * (x - mean)).sum({2, 3}, true), 1e-13);
}

TEST_P(NormLoops, ScaleAndCombine) {
  const auto x = laid_out(images(at::kDouble));
  const auto y = laid_out(x.flip(3));
  const auto slices = slices_of(x);
  const auto mean = per_channel_numbers(at::kDouble);
  const auto scale = mean.exp();
  const auto bias = at::linspace(0, 1, 3, at::kFloat).view({1, 3, 1, 1});
  expect_close(
      scale_slices(x, mean, scale, bias, slices),
      (x - mean) * scale + bias,
      1e-13);
  expect_close(scale_slices(x, {}, scale, {}, slices), x * scale, 1e-13);
  expect_close(
      combine_slices(x, mean, scale, y, mean, bias, slices),
      (x - mean) * scale + y * mean + bias,
      1e-13);
}

TEST_P(NormLoops, ReadPartsOfATensor) {
  const auto x = laid_out(images(at::kFloat)).narrow(0, 1, 1);
  const auto slices = slices_of(x);
  const auto scale = at::arange(1, 4, at::kFloat).view({1, 3, 1, 1});
  const auto moments = slice_moments(x, slices);
  expect_close(moments.mean, x.mean({2, 3}, true), 1e-6);
  expect_close(scale_slices(x, {}, scale, {}, slices), x * scale, 1e-7);
}

TEST(NormSlices, ReadSomeChannelsOfATensor) {
  const auto x = images(at::kFloat).narrow(1, 1, 2);
  const auto moments = slice_moments(x, find_slices({x}, {2, 3}).value());
  expect_close(moments.mean, x.mean({2, 3}, true), 1e-6);
}

} // namespace
} // namespace shardtensor::detail
