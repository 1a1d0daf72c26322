#include "shardtensor/collectives/parallel_regions.h"

#include <numeric>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "../comm/gradient.h"
#include "../comm/thread_ranks.h"

namespace shardtensor {
namespace {

using testing::gradient;
using testing::run_on_mesh;

using Sizes = std::vector<int64_t>;

class ParallelRegions : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    ParallelRegions,
    testing::each_backend(),
    testing::backend_name);

/// The same on all ranks.
at::Tensor numbers(int64_t rows) {
  return at::arange(1, rows * 6 + 1, at::kDouble).view({2, rows, 3}) / 8;
}

/// Of (y ** 3).sum(): its gradient for x, and that of the gradient's square.
std::pair<at::Tensor, at::Tensor> derivatives(
    const at::Tensor& y,
    const at::Tensor& x) {
  const auto first = gradient(
      (y * y * y).sum(), x, at::ones({}, at::kDouble), /*create_graph=*/true);
  const auto penalty = (first * first).sum();
  return {first, gradient(penalty, x, at::ones({}, at::kDouble))};
}

TEST_P(ParallelRegions, SumWhatRanksShareOnOneOfBothWays) {
  for (const int64_t ranks : {1, 2, 3}) {
    run_on_mesh({ranks}, [&](const MeshPtr& mesh) {
      const auto x = numbers(2).set_requires_grad(true);
      const auto y = copy_to_parallel_region(x, mesh->group());
      EXPECT_TRUE(at::equal(y, x));
      EXPECT_EQ(y.data_ptr(), x.data_ptr());
      const auto gy = at::full_like(x, mesh->position() + 1);
      EXPECT_TRUE(
          at::equal(
              gradient(y, x, gy), at::full_like(x, ranks * (ranks + 1) / 2)));

      const auto sum = reduce_from_parallel_region(x, mesh->group());
      EXPECT_TRUE(at::equal(sum, x * ranks));
      EXPECT_NE(sum.data_ptr(), x.data_ptr());
      EXPECT_TRUE(at::equal(gradient(sum, x, gy), gy));

      // Per rank a loss (x / ranks) ** 3, counted by all: 3 x**2 / ranks**2.
      const auto [first, second] =
          derivatives(copy_to_parallel_region(x, mesh->group()) / ranks, x);
      const auto square = ranks * ranks;
      EXPECT_TRUE(at::allclose(first, 3 * x * x / square));
      EXPECT_TRUE(at::allclose(second, 36 * x * x * x / (square * square)));
    });
  }
}

TEST_P(ParallelRegions, CutAndJoinRowsOfAnySizes) {
  const std::vector<Sizes> all{{4}, {3, 1}, {0, 4}, {2, 0, 3}, {0, 0, 0}};
  for (const auto& sizes : all) {
    run_on_mesh({int64_t(sizes.size())}, [&](const MeshPtr& mesh) {
      const int64_t rank = mesh->position();
      const auto rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
      const auto begin =
          std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
      for (const int64_t dim : {1, -2}) {
        const auto x = numbers(rows).set_requires_grad(true);
        const auto piece = x.narrow(1, begin, sizes[rank]);
        const auto y = scatter_to_parallel_region(x, dim, sizes, mesh->group());
        EXPECT_TRUE(at::equal(y, piece));
        const auto [first, second] = derivatives(y, x);
        EXPECT_TRUE(at::allclose(first, 3 * x * x));
        EXPECT_TRUE(at::allclose(second, 36 * x * x * x));

        const auto own = piece.detach().clone().set_requires_grad(true);
        const auto whole =
            gather_from_parallel_region(own, dim, sizes, mesh->group());
        EXPECT_TRUE(at::equal(whole, x));
        const auto [own_first, own_second] = derivatives(whole, own);
        EXPECT_TRUE(at::allclose(own_first, 3 * own * own));
        EXPECT_TRUE(at::allclose(own_second, 36 * own * own * own));
      }
    });
  }
}

TEST_P(ParallelRegions, RefuseWhatDoesNotFit) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto& group = mesh->group();
    const auto x = at::ones({2, 3});
    const auto other = at::ones({2 + mesh->position(), 3});
    EXPECT_THROW(copy_to_parallel_region(other, group), c10::ValueError);
    EXPECT_THROW(reduce_from_parallel_region(other, group), c10::ValueError);
    EXPECT_THROW(
        scatter_to_parallel_region(x, 2, {1, 1}, group), c10::IndexError);
    EXPECT_THROW(
        scatter_to_parallel_region(x, 0, {1, 2}, group), c10::ValueError);
    EXPECT_THROW(
        gather_from_parallel_region(x, 0, {2}, group), c10::ValueError);
    EXPECT_THROW(
        gather_from_parallel_region(x, 0, {2, 1}, group), c10::ValueError);
  });
}

} // namespace
} // namespace shardtensor
