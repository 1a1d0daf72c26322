#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cumsum.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "shardtensor/layout/plans/merge_plan.h"
#include "shardtensor/tensor/shard_tensor.h"

#include "../../comm/thread_ranks.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

class Cumsum : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    Cumsum,
    testing::each_backend(),
    testing::backend_name);

/// Pieces whose totals all ranks get, and more, whose totals are cut along
/// another dim, where there is one; some pieces are empty.
TEST_P(Cumsum, OfManyPiecesIsThatOfOneDevice) {
  const auto x = at::arange(2 * 45 * 24, at::kDouble).sin().view({2, 45, 24});
  const auto grad = x.cos();
  const auto expected = at::cumsum(x, 1);
  const auto expected_grad = at::cumsum(grad.flip(1), 1).flip(1);
  for (const auto& shape : {std::vector<int64_t>{kMostTerms + 4}, {3, 4}}) {
    testing::run_on_mesh(shape, [&](const MeshPtr& mesh) {
      const auto spec = make_spec(
          mesh,
          x.sizes().vec(),
          std::vector<Placement>(mesh->axes(), Placement::shard(1)));
      const auto rows = spec->interval(1, mesh->position());
      const auto own = [&](const Tensor& whole) {
        return from_local(
            whole.narrow(1, rows.begin, rows.extent()).contiguous(), spec);
      };
      auto leaf = own(x);
      leaf.requires_grad_();
      const auto result = at::cumsum(leaf, 1);
      EXPECT_EQ(shardtensor::spec(result), spec);
      const auto result_grad =
          torch::autograd::grad({result}, {leaf}, {own(grad)}).at(0);
      EXPECT_TRUE(
          at::allclose(full_tensor(result.detach()), expected, 1e-12, 1e-12));
      EXPECT_TRUE(
          at::allclose(full_tensor(result_grad), expected_grad, 1e-12, 1e-12));
    });
  }
}

} // namespace
} // namespace shardtensor::detail
