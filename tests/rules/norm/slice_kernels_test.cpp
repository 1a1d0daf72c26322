#include "shardtensor/rules/norm/slice_kernels.h"

#include <memory>
#include <numeric>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include "../../layout/support.h"
#include "batch_norm_kernels.h"
#include "shardtensor/rules/norm/passes.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using testing::mesh_of;
using Dims = std::vector<int64_t>;

void expect_near_to(
    const Tensor& actual,
    const Tensor& expected,
    double relative) {
  const auto wanted = expected.to(actual.scalar_type());
  ASSERT_EQ(actual.sizes(), wanted.sizes());
  EXPECT_TRUE(at::allclose(actual, wanted, relative, relative))
      << (actual - wanted).abs().max();
}

/// The CPU gets CUDA's kernels for a batch norm over processes, as long as a
/// test runs: norms take them as they do there.
class NormKernels : public ::testing::TestWithParam<at::MemoryFormat> {
 protected:
  NormKernels() {
    batch_norm_kernels::define(kernels_);
    at::manual_seed(3);
  }

  static Tensor numbers(at::IntArrayRef sizes, double mean = 0) {
    return (at::randn(sizes, at::kDouble) + mean).contiguous(GetParam());
  }

 private:
  torch::Library kernels_{
      torch::Library::IMPL,
      "aten",
      c10::DispatchKey::CPU,
      __FILE__,
      __LINE__};
};

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    NormKernels,
    ::testing::Values(
        at::MemoryFormat::Contiguous,
        at::MemoryFormat::ChannelsLast));

TEST(NormKernelsOfOtherDevices, AreNone) {
  EXPECT_FALSE(have_kernels(at::zeros({2, 3})));
}

// ---- which slices
// ------------------------------------------------------------

TEST_P(NormKernels, TakeWholeImages) {
  const auto x = numbers({2, 6, 20, 30});
  const bool last = GetParam() == at::MemoryFormat::ChannelsLast;
  const auto slices = find_slices({x.to(at::kHalf)}, {2, 3});
  ASSERT_TRUE(slices);
  EXPECT_EQ(slices->dims, Dims({2, 3}));
  EXPECT_EQ(slices->length, 600);
  EXPECT_EQ(slices->width, last ? 6 : 1);
  EXPECT_EQ(slices->order, last ? Dims({0, 2, 3, 1}) : Dims({0, 1, 2, 3}));
}

TEST_P(NormKernels, AreLeftWhereTheyAreSlow) {
  const auto part = numbers({2, 6, 20, 30}).narrow(2, 0, 10);
  EXPECT_FALSE(find_slices({part}, {2, 3})); // gaps
  const auto many = at::zeros({5000, 20});
  EXPECT_FALSE(find_slices({many}, {1})); // short slices
  EXPECT_TRUE(find_slices({many.narrow(0, 0, 4000)}, {1}));
  const auto one = at::zeros({200003}); // a prime number
  EXPECT_FALSE(find_slices({one}, {0})); // for one block of threads
  EXPECT_TRUE(find_slices({one.narrow(0, 0, 1 << 17)}, {0})); // not cut
  const auto sets = at::zeros({17, 8, 4}).transpose(1, 2);
  EXPECT_FALSE(find_slices({sets}, {2})); // a call for each sample
  EXPECT_TRUE(find_slices({sets.narrow(0, 0, 16)}, {2}));
}

// ---- one pass each ----------------------------------------------------------

TEST_P(NormKernels, MomentsOfLongSlicesAreMergedFromParts) {
  const auto exact = numbers({1, 3, 128, 256}, /*mean=*/4000);
  const auto x = exact.to(at::kFloat);
  const auto mean = x.to(at::kDouble).mean({2, 3}, true);
  const auto squares = (x.to(at::kDouble) - mean).square().sum({2, 3}, true);
  const auto moments = own_moments(x, {2, 3});
  EXPECT_EQ(moments.mean.scalar_type(), at::kFloat);
  expect_near_to(moments.mean, mean, 1e-6);
  expect_near_to(moments.squares, squares, 1e-4);
}

TEST_P(NormKernels, MomentsOfHalfAreInFloat) {
  const auto x = numbers({2, 3, 20, 30}, /*mean=*/9).to(at::kBFloat16);
  const auto wide = x.to(at::kDouble);
  const auto mean = wide.mean({0, 2, 3}, true);
  const auto moments = own_moments(x, {0, 2, 3});
  EXPECT_EQ(moments.mean.scalar_type(), at::kFloat);
  expect_near_to(moments.mean, mean, 1e-6);
  expect_near_to(
      moments.squares, (wide - mean).square().sum({0, 2, 3}, true), 1e-5);
  expect_near_to(
      own_squares(x, {0, 2, 3}), wide.square().sum({0, 2, 3}, true), 1e-5);
}

TEST_P(NormKernels, PassesOfSlices) {
  const auto x = numbers({2, 3, 61, 67}, /*mean=*/1);
  const auto y = numbers({2, 3, 61, 67});
  const auto slices = find_slices({x, y}, {2, 3}).value();
  const auto mean = at::linspace(-1, 2, 6, at::kDouble).view({2, 3, 1, 1});
  const auto scale = mean.exp();
  const auto bias = at::linspace(0, 1, 3, at::kFloat).view({1, 3, 1, 1});
  const auto sums = slice_sums(x, mean, y, slices);
  expect_near_to(sums.values, y.sum({2, 3}, true), 1e-12);
  expect_near_to(sums.products, (y * (x - mean)).sum({2, 3}, true), 1e-12);
  expect_near_to(
      scale_slices(x, mean, scale, bias, slices),
      (x - mean) * scale + bias,
      1e-13);
  expect_near_to(scale_slices(x, {}, scale, {}, slices), x * scale, 1e-13);
  EXPECT_EQ(scale_slices(x, {}, scale, {}, slices).strides(), x.strides());
  expect_near_to(
      combine_slices(x, mean, scale, y, mean, bias, slices),
      (x - mean) * scale + y * mean + bias,
      1e-13);
  EXPECT_EQ(
      combine_slices(x, mean, scale, y, mean, bias, slices).strides(),
      x.strides());
}

TEST_P(NormKernels, CombineWithFactorsOfAnySize) {
  const auto x = numbers({1, 8, 20, 30}).to(at::kFloat);
  const auto y = numbers({1, 8, 20, 30}).to(at::kFloat);
  const auto slices = find_slices({x, y}, {2, 3}).value();
  const auto row = [](std::vector<double> values) {
    return at::tensor(values).to(at::kFloat).view({1, 8, 1, 1});
  };
  const auto scale = row({1, -2, 1e-30, 0, 0, 1e10, 3, 1e-43});
  const auto factor = row({0, 1e-30, 0, 0, 5, 1e-15, -1e-12, 1e-44});
  const auto bias = row({0, 1, 1e-30, 0, 0, 1e10, -1, 0});
  const auto expected = (x * scale + y * factor + bias);
  const auto actual = combine_slices(x, {}, scale, y, factor, bias, slices);
  const auto largest = expected.abs().amax({2, 3}, true).clamp_min(1e-36);
  expect_near_to(actual / largest, expected / largest, 1e-6);
  EXPECT_TRUE(actual.select(1, 3).eq(0).all().item<bool>());
}

// ---- whole norms, against those of one device
// --------------------------------

/// Of a tensor on one rank whose norm is taken by our passes.
NormGeometry geometry(const Dims& statistics, const Dims& dims, int64_t count) {
  NormGeometry result;
  result.dims = dims;
  result.statistics =
      make_spec(mesh_of({1}), statistics, {Placement::replicate()});
  result.count = count;
  return result;
}

using Norm = std::function<Tensor(const std::vector<Tensor>&)>;

/// Values, gradients, and gradients of a function of the gradients.
std::vector<Tensor> all_orders(const Norm& norm, std::vector<Tensor> inputs) {
  for (auto& input : inputs) {
    input = input.detach().requires_grad_();
  }
  const auto y = norm(inputs);
  const auto loss = (y * y.sin()).sum();
  auto results = torch::autograd::grad({loss}, inputs, {}, std::nullopt, true);
  const auto once = torch::autograd::grad(
      {(norm(inputs).cos() * at::arange(y.numel()).view(y.sizes())).sum()},
      inputs);
  auto of_gradients = at::zeros({}, at::kDouble);
  for (const auto& gradient : results) {
    of_gradients = of_gradients + gradient.square().sum();
  }
  const auto twice = torch::autograd::grad({of_gradients}, inputs);
  results.insert(results.end(), once.begin(), once.end());
  results.insert(results.end(), twice.begin(), twice.end());
  results.push_back(y);
  return results;
}

void expect_norms_equal(
    const Norm& ours,
    const Norm& native,
    const std::vector<Tensor>& inputs) {
  const auto actual = all_orders(ours, inputs);
  const auto expected = all_orders(native, inputs);
  for (size_t i = 0; i < expected.size(); ++i) {
    expect_near_to(actual[i], expected[i], 1e-8);
  }
}

TEST_P(NormKernels, MakeAGroupNorm) {
  const auto image = [](const Tensor& channels) {
    return channels.view({1, 2, 3, 1, 1});
  };
  const auto groups = geometry({2, 2}, {2, 3, 4}, 3 * 20 * 30);
  const auto ours = [&](const std::vector<Tensor>& in) {
    const auto x = in[0].unflatten(1, {2, 3});
    return normalize(
               x,
               image(in[1]),
               image(in[2]),
               norm_moments(x, groups),
               1e-5,
               groups)
        .flatten(1, 2);
  };
  const auto native = [](const std::vector<Tensor>& in) {
    return std::get<0>(
        at::native_group_norm(in[0], in[1], in[2], 2, 6, 600, 2, 1e-5));
  };
  auto weight = at::linspace(-1, 2, 6, at::kDouble);
  weight[3] = 0;
  expect_norms_equal(
      ours,
      native,
      {numbers({2, 6, 20, 30}, 2), weight, at::arange(6, at::kDouble)});
}

TEST_P(NormKernels, MakeABatchNorm) {
  const auto image = [](const Tensor& channels) {
    return channels.view({1, 5, 1, 1});
  };
  const auto batch = geometry({5}, {0, 2, 3}, 2 * 20 * 30);
  const auto ours = [&](const std::vector<Tensor>& in) {
    return normalize(
        in[0],
        image(in[1]),
        image(in[2]),
        norm_moments(in[0], batch),
        1e-5,
        batch);
  };
  const auto native = [](const std::vector<Tensor>& in) {
    return std::get<0>(
        at::native_batch_norm(in[0], in[1], in[2], {}, {}, true, 0.1, 1e-5));
  };
  expect_norms_equal(
      ours,
      native,
      {numbers({2, 5, 20, 30}, 2),
       at::linspace(-1, 2, 5, at::kDouble),
       at::arange(5, at::kDouble)});
}

TEST_P(NormKernels, MakeALayerNorm) {
  const auto rows = geometry({2, 5}, {2, 3}, 20 * 30);
  const auto ours = [&](const std::vector<Tensor>& in) {
    return normalize(
        in[0], in[1], in[2], norm_moments(in[0], rows), 1e-5, rows);
  };
  const auto native = [](const std::vector<Tensor>& in) {
    return std::get<0>(
        at::native_layer_norm(in[0], {20, 30}, in[1], in[2], 1e-5));
  };
  expect_norms_equal(
      ours,
      native,
      {numbers({2, 5, 20, 30}, 2),
       at::linspace(-1, 2, 600, at::kDouble).view({20, 30}),
       at::randn({20, 30}, at::kDouble)});
}

/// Large enough for the kernel of a gradient.
TEST_P(NormKernels, MakeTheGradientOfALargeImage) {
  const auto groups = geometry({1, 2}, {2, 3, 4}, int64_t{4} * 512 * 320);
  const auto weight = at::tensor({0.0, 1.0, -2.0, 0.5, 0.0, 1e-3, 1.0, 3.0});
  const auto gradient = [&](const Norm& norm) {
    at::manual_seed(5);
    const auto x = numbers({1, 8, 512, 320}, 1).requires_grad_();
    const auto grad = at::randn(x.sizes(), x.options()).contiguous(GetParam());
    return torch::autograd::grad({norm({x})}, {x}, {grad})[0];
  };
  const auto image = weight.to(at::kDouble).view({1, 2, 4, 1, 1});
  const auto actual = gradient([&](const std::vector<Tensor>& in) {
    const auto x = in[0].unflatten(1, {2, 4});
    return normalize(x, image, {}, norm_moments(x, groups), 1e-5, groups)
        .flatten(1, 2);
  });
  const auto expected = gradient([&](const std::vector<Tensor>& in) {
    return at::group_norm(in[0], 2, weight.to(at::kDouble), {}, 1e-5);
  });
  expect_near_to(actual, expected, 1e-12);
}

} // namespace
} // namespace shardtensor::detail
