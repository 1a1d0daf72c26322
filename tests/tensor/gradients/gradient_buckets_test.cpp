#include <barrier>
#include <functional>

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "shardtensor/tensor/gradients/parameter_gradients.h"

#include "../../comm/late_backend.h"
#include "../../comm/thread_ranks.h"

namespace shardtensor {
namespace {

using at::Tensor;
using torch::autograd::backward;

constexpr int64_t kRanks = 2;
constexpr int64_t kWidth = 3;

Tensor numbers(double scale) {
  return (at::arange(kWidth * kWidth, at::kDouble) * scale)
      .cos()
      .view({kWidth, kWidth});
}

/// x times each weight, all shared by the ranks, of which each has an x.
struct Chain {
  explicit Chain(double own) : x(numbers(own)) {
    x.requires_grad_();
    for (auto& weight : weights) {
      weight.requires_grad_();
    }
  }

  void run(const MeshPtr& mesh, const std::function<void()>& at_end = {}) {
    Tensor y = x * 1; // a leaf would be reached before the first weight
    if (at_end) {
      y.register_hook([at_end](const Tensor&) { at_end(); });
    }
    for (const auto& weight : weights) {
      y = y.matmul(mesh ? shared_weights({weight}, mesh, {0})[0] : weight);
    }
    backward({y.sum()}, {});
  }

  Tensor x;
  std::vector<Tensor> weights{numbers(1.0), numbers(0.5)};
};

double own_scale(int64_t rank) {
  return 0.1 * static_cast<double>(rank + 1);
}

/// The sums of what the ranks' chains have.
std::vector<Tensor> expected_gradients() {
  Chain all(0);
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    all.x = numbers(own_scale(rank));
    all.run(nullptr);
  }
  return {all.weights[0].grad(), all.weights[1].grad()};
}

void expect_sums(const Chain& chain) {
  const auto expected = expected_gradients();
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(
        at::allclose(chain.weights[i].grad(), expected[i], 1e-12, 1e-12));
  }
}

class GradientBuckets : public testing::OnEachBackend {
 protected:
  void SetUp() override {
    OnEachBackend::SetUp();
    set_gradient_bucket_bytes(1);
    testing::reset_late_counts();
  }
  void TearDown() override {
    set_gradient_bucket_bytes(default_);
    OnEachBackend::TearDown();
  }

 private:
  int64_t default_ = gradient_bucket_bytes();
};
INSTANTIATE_TEST_SUITE_P(
    On,
    GradientBuckets,
    testing::each_backend(),
    testing::backend_name);

TEST_P(GradientBuckets, TravelBesideBackward) {
  std::barrier all(kRanks);
  testing::run_on_mesh({kRanks}, [&](const MeshPtr& mesh) {
    Chain chain(own_scale(mesh->position()));
    const int64_t before = testing::collectives_run();
    all.arrive_and_wait();
    chain.run(mesh, [&] {
      all.arrive_and_wait(); // each has gone through all weights
      EXPECT_EQ(testing::collectives_run() - before, 2 * kRanks);
      EXPECT_EQ(testing::late_counts().works, 0);
      EXPECT_FALSE(chain.weights[0].grad().defined());
      all.arrive_and_wait();
    });
    expect_sums(chain);
  });
  const bool late = GetParam() == testing::RankBackend::Late;
  EXPECT_EQ(testing::late_counts().works, late ? 2 * kRanks : 0);
}

TEST_P(GradientBuckets, OfAFailedBackwardAreGone) {
  testing::run_on_mesh({kRanks}, [](const MeshPtr& mesh) {
    Chain chain(own_scale(mesh->position()));
    const auto fail = [] { TORCH_CHECK_VALUE(false, "stop here"); };
    EXPECT_THROW(chain.run(mesh, fail), c10::ValueError);
    EXPECT_FALSE(chain.weights[0].grad().defined());
    chain.run(mesh);
    expect_sums(chain);
  });
  EXPECT_EQ(testing::late_counts().alive, 0);
}

TEST(GradientBucketBytes, ArePositive) {
  EXPECT_EQ(gradient_bucket_bytes(), int64_t{25} << 20);
  EXPECT_THROW(set_gradient_bucket_bytes(0), c10::ValueError);
}

} // namespace
} // namespace shardtensor
