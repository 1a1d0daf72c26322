#include <functional>

#include <ATen/ops/allclose.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/var.h>
#include <gtest/gtest.h>

#include "shardtensor/layout/plans/merge_plan.h"
#include "shardtensor/tensor/shard_tensor.h"

#include "../comm/late_backend.h"
#include "../comm/thread_ranks.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Function = std::function<Tensor(const Tensor&)>;

const Function kFunctions[] = {
    [](const Tensor& x) { return x.amax({2}); },
    [](const Tensor& x) { return x.argmax(2); },
    [](const Tensor& x) { return x.var(2, false); },
    [](const Tensor& x) { return at::logsumexp(x, {2}); },
    [](const Tensor& x) { return at::softmax(x, 2); },
    [](const Tensor& x) { return at::group_norm(x, 2); }};

class MergeTerms : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    MergeTerms,
    testing::each_backend(),
    testing::backend_name);

/// More than are merged in one step; all axes cut dim 2, some pieces are empty.
TEST_P(MergeTerms, OfManyRanksAreThoseOfOneDevice) {
  const auto x = at::arange(2 * 4 * 45, at::kDouble).sin().view({2, 4, 45});
  for (const auto& shape : {std::vector<int64_t>{kMostTerms + 3}, {4, 5}}) {
    testing::run_on_mesh(shape, [&](const MeshPtr& mesh) {
      const auto spec = make_spec(
          mesh,
          x.sizes().vec(),
          std::vector<Placement>(mesh->axes(), Placement::shard(2)));
      const auto rows = spec->interval(2, mesh->position());
      const auto own =
          from_local(x.narrow(2, rows.begin, rows.extent()).contiguous(), spec);
      for (const auto& function : kFunctions) {
        const auto result = full_tensor(function(own));
        EXPECT_TRUE(at::allclose(result, function(x), 1e-12, 1e-12));
      }
    });
  }
}

/// The ranks along one axis, and all of them.
TEST(QueuedTerms, ComeByOneCall) {
  testing::use_backend(testing::RankBackend::Late);
  const auto x = at::arange(2 * 4 * 9, at::kDouble).sin().view({2, 4, 9});
  for (const int64_t first : {0, 2}) {
    testing::reset_late_counts();
    testing::run_on_mesh({2, 2}, [&](const MeshPtr& mesh) {
      const auto spec = make_spec(
          mesh, {2, 4, 9}, {Placement::shard(first), Placement::shard(2)});
      Tensor own = x;
      for (const int64_t dim : spec->sharded_dims()) {
        const auto rows = spec->interval(dim, mesh->position());
        own = own.narrow(dim, rows.begin, rows.extent());
      }
      const auto largest = from_local(own.contiguous(), spec).amax({2});
      const auto expected = x.amax({2}).narrow(
          0, first == 0 ? mesh->coordinate(0) : 0, first == 0 ? 1 : 2);
      EXPECT_TRUE(at::allclose(to_local(largest), expected));
    });
    EXPECT_EQ(testing::late_counts().gathers, 4);
    EXPECT_EQ(testing::late_counts().sends, 0);
  }
  testing::use_backend(testing::RankBackend::Threads);
}

} // namespace
} // namespace shardtensor::detail
