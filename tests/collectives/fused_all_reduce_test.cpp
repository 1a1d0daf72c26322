#include "shardtensor/collectives/fused_all_reduce.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "../comm/thread_ranks.h"
#include "shardtensor/collectives/shared_parameters.h"

namespace shardtensor {
namespace {

using testing::run_on_mesh;

class FusedAllReduce : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    FusedAllReduce,
    testing::each_backend(),
    testing::backend_name);

TEST_P(FusedAllReduce, ReducesManyTensors) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const int64_t own = mesh->position() + 1; // 1, 2, 3
    const auto number = at::full({}, own, at::kDouble);
    const auto half = at::full({2, 2}, own, at::kHalf);
    const auto sum =
        fused_all_reduce({number, half}, Reduce::Sum, mesh->group());
    EXPECT_TRUE(at::equal(sum[0], at::full({}, 6, at::kDouble)));
    EXPECT_TRUE(at::equal(sum[1], at::full({2, 2}, 6, at::kHalf)));
    const auto most = fused_all_reduce({number}, Reduce::Max, mesh->group());
    EXPECT_TRUE(at::equal(most[0], at::full({}, 3, at::kDouble)));
    const auto whole = at::full({1}, own * own, at::kLong); // 14 in all
    const auto mean = fused_all_reduce({whole}, Reduce::Avg, mesh->group());
    EXPECT_TRUE(at::equal(mean[0], at::full({1}, 4, at::kLong)));
    EXPECT_TRUE(fused_all_reduce({}, Reduce::Sum, mesh->group()).empty());
    // Sums that their dtypes do not have.
    const auto byte = at::full({}, 90 + own, at::kChar);
    const auto alike = at::ones({}, at::kBool);
    const auto one = at::full({}, own == 1, at::kBool);
    const auto means =
        fused_all_reduce({byte, alike, one}, Reduce::Avg, mesh->group());
    EXPECT_TRUE(at::equal(means[0], at::full({}, 92, at::kChar)));
    EXPECT_TRUE(means[1].item<bool>());
    EXPECT_FALSE(means[2].item<bool>());
  });
}

TEST_P(FusedAllReduce, RefusesAProductAndUnsaidDtypes) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto number = at::ones({1});
    const auto count = at::ones({1}, at::kLong);
    const auto& group = mesh->group();
    EXPECT_THROW(
        fused_all_reduce({number}, Reduce::Prod, group), c10::ValueError);
    EXPECT_THROW(
        fused_all_reduce({number, count}, Reduce::Sum, group), c10::ValueError);
    const auto said =
        fused_all_reduce({number, count}, Reduce::Sum, group, at::kDouble);
    EXPECT_TRUE(at::equal(said[1], at::full({1}, 2, at::kLong)));
  });
}

TEST_P(FusedAllReduce, OfALossIsOnOneRank) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const auto loss = at::full({1}, mesh->position(), at::kDouble);
    const auto mean = reduce_loss(loss, 2, true, mesh->group());
    const auto sum = reduce_loss(loss, 0, false, mesh->group());
    EXPECT_EQ(mean.item<double>(), mesh->position() == 2 ? 1.0 : 0.0);
    EXPECT_EQ(sum.item<double>(), mesh->position() == 0 ? 3.0 : 0.0);
    EXPECT_THROW(reduce_loss(loss, 3, true, mesh->group()), c10::ValueError);
    EXPECT_THROW(
        reduce_loss(at::ones({2}), 0, true, mesh->group()), c10::ValueError);
  });
}

TEST_P(FusedAllReduce, GradientsOfASharedModuleAreSums) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    torch::nn::Linear layer(2, 1);
    const auto x = at::full({1, 2}, mesh->position() + 1.0);
    const auto gradient = [&] {
      layer->zero_grad();
      layer->forward(x).sum().backward();
      return layer->weight.grad();
    };
    mark_module_as_shared(*layer, mesh->group());
    EXPECT_TRUE(at::equal(gradient(), at::full({1, 2}, 3.0)));
    EXPECT_THROW(mark_module_as_shared(*layer, mesh->group()), c10::Error);
    unmark_module_as_shared(*layer);
    EXPECT_TRUE(at::equal(gradient(), x));
    EXPECT_THROW(unmark_module_as_shared(*layer), c10::Error);
  });
}

TEST_P(FusedAllReduce, AParameterOfTwoNamesIsSharedOnce) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    torch::nn::Linear layer(2, 1);
    layer->register_parameter("tied", layer->weight);
    const auto gradient = [&] {
      layer->zero_grad();
      layer->weight.sum().backward();
      return layer->weight.grad();
    };
    mark_module_as_shared(*layer, mesh->group());
    EXPECT_TRUE(at::equal(gradient(), at::full({1, 2}, 2.0)));
    unmark_module_as_shared(*layer);
    EXPECT_TRUE(at::equal(gradient(), at::ones({1, 2})));
  });
}

} // namespace
} // namespace shardtensor
