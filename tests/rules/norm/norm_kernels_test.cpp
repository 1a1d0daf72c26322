#include "shardtensor/rules/norm/norm_kernels.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

namespace shardtensor::detail {
namespace {

/// A norm of ten numbers, with what its kernels are given.
struct TenNumbers {
  TenNumbers() {
    at::manual_seed(3);
    x = at::randn({10}, at::kDouble).set_requires_grad(true);
    weight = at::randn({10}, at::kDouble);
    bias = at::randn({10}, at::kDouble);
    grad = at::randn({10}, at::kDouble);
    mean = x.mean().item<double>();
    const auto squares = (x - mean).square().sum().item<double>();
    rstd = norm_scale<double>(squares, 10, 1e-5);
  }
  at::Tensor gradient(const at::Tensor& result) const {
    return torch::autograd::grad({result}, {x}, {grad})[0];
  }
  /// The sums of `weighted` and of it times the normalized value.
  std::pair<double, double> sums(const at::Tensor& weighted) const {
    const auto normalized = (x.detach() - mean) * rstd;
    return {
        weighted.sum().item<double>(),
        (weighted * normalized).sum().item<double>()};
  }

  at::Tensor x, weight, bias, grad;
  double mean, rstd;
};

double at_place(const at::Tensor& tensor, int64_t place) {
  return tensor[place].item<double>();
}

TEST(NormKernelsOfGpus, GiveALayerNormOnTheHost) {
  const TenNumbers norm;
  const auto plain = at::layer_norm(norm.x, {10});
  const auto affine = at::layer_norm(norm.x, {10}, norm.weight, norm.bias);
  for (int64_t i = 0; i < 10; ++i) {
    const auto x = at_place(norm.x, i);
    EXPECT_NEAR(norm_plain(x, norm.mean, norm.rstd), at_place(plain, i), 1e-12);
    const auto value = norm_affine(
        x,
        norm.mean,
        norm.rstd,
        at_place(norm.weight, i),
        at_place(norm.bias, i));
    EXPECT_NEAR(value, at_place(affine, i), 1e-12);
  }
}

TEST(NormKernelsOfGpus, GiveItsGradientOnTheHost) {
  const TenNumbers norm;
  const auto plain = norm.gradient(at::layer_norm(norm.x, {10}));
  const auto affine =
      norm.gradient(at::layer_norm(norm.x, {10}, norm.weight, norm.bias));
  const auto [sum, product] = norm.sums(norm.grad);
  const auto [weighted_sum, weighted_product] =
      norm.sums(norm.grad * norm.weight);
  for (int64_t i = 0; i < 10; ++i) {
    const auto grad = at_place(norm.grad, i);
    const auto x = at_place(norm.x, i);
    EXPECT_NEAR(
        norm_gradient(grad, x, norm.mean, norm.rstd, sum, product, 10.0),
        at_place(plain, i),
        1e-12);
    const auto value = weighted_norm_gradient(
        grad,
        x,
        norm.mean,
        norm.rstd,
        at_place(norm.weight, i),
        weighted_sum,
        weighted_product,
        10.0);
    EXPECT_NEAR(value, at_place(affine, i), 1e-12);
  }
}

} // namespace
} // namespace shardtensor::detail
