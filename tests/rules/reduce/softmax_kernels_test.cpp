#include "shardtensor/rules/reduce/softmax_kernels.h"

#include <limits>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

namespace shardtensor::detail {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Two ranks' halves of a row, by what each launch computes.
at::Tensor softmax_by_kernels(const at::Tensor& row) {
  const auto halves = row.view({2, -1});
  const auto own = halves.amax({1});
  const auto largest = own.max().item<double>();
  std::vector<at::Tensor> exponentials;
  double sum = 0;
  for (int64_t rank = 0; rank < 2; ++rank) {
    const auto m = own[rank].item<double>();
    auto y = at::empty_like(halves[rank]);
    for (int64_t i = 0; i < y.numel(); ++i) {
      y[i] = exponential_below(halves[rank][i].item<double>(), m);
    }
    sum += share_of_sum(y.sum().item<double>(), m, largest);
    exponentials.push_back(y);
  }
  for (int64_t rank = 0; rank < 2; ++rank) {
    exponentials[rank] *= share_of_all(own[rank].item<double>(), largest, sum);
  }
  return at::cat(exponentials);
}

TEST(SoftmaxKernelsOfGpus, GiveASoftmaxOnTheHost) {
  at::manual_seed(3);
  const auto row = at::randn({10}, at::kDouble) * 100;
  auto hidden = row.clone();
  hidden.narrow(0, 0, 5).fill_(-kInfinity); // of the first rank all
  const auto nothing = at::full({10}, -kInfinity, at::kDouble);
  auto unknown = row.clone();
  unknown[7] = NAN;
  auto endless = row.clone();
  endless[7] = kInfinity; // NaN on both ranks
  for (const auto& x : {row, hidden, nothing, unknown, endless}) {
    EXPECT_TRUE(
        at::allclose(softmax_by_kernels(x), x.softmax(0), 1e-12, 1e-12, true))
        << x;
  }
}

} // namespace
} // namespace shardtensor::detail
