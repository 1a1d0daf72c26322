#include "shardtensor/halo/halo_padding.h"

#include <numeric>

#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "../comm/thread_ranks.h"

namespace shardtensor {
namespace {

using testing::run_on_mesh;

class HaloPadding : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    HaloPadding,
    testing::each_backend(),
    testing::backend_name);

struct Case {
  std::vector<int64_t> sizes; // rows of each rank
  int64_t width;
  int64_t edge_padding;
};

const Case kCases[] = {
    {{4}, 2, 1},
    {{2, 3}, 1, 1},
    {{3, 2, 4}, 2, 0},
    {{3, 1, 4}, 1, 3},
    {{2, 2}, 0, 1}};

TEST_P(HaloPadding, PutsThePieceBetweenItsNeighboursRows) {
  for (const auto& [sizes, width, edge] : kCases) {
    const int64_t ranks = sizes.size();
    run_on_mesh({ranks}, [&](const MeshPtr& mesh) {
      const int64_t rank = mesh->position();
      const auto begin =
          std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
      const auto rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
      const auto all = at::arange(rows * 6, at::kDouble).view({2, rows, 3});
      const auto x =
          all.narrow(1, begin, sizes[rank]).clone().set_requires_grad(true);
      const auto y = halo_padding(x, -2, width, edge, mesh->group());

      const int64_t before = rank == 0 ? edge : width;
      const int64_t after = rank == ranks - 1 ? edge : width;
      const auto padded = at::constant_pad_nd(all, {0, 0, edge, edge});
      const auto expected =
          padded.narrow(1, begin + edge - before, before + sizes[rank] + after);
      EXPECT_TRUE(at::equal(y, expected));

      // A row counts once here and once for each neighbour that saw it.
      auto count = at::ones_like(x).detach();
      if (rank > 0) {
        count.narrow(1, 0, width).add_(1);
      }
      if (rank < ranks - 1) {
        count.narrow(1, sizes[rank] - width, width).add_(1);
      }
      const auto gradient =
          torch::autograd::grad({y}, {x}, {at::ones_like(y)})[0];
      EXPECT_TRUE(at::equal(gradient, count));
    });
  }
}

TEST_P(HaloPadding, RefusesFewerRowsThanTheWidth) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto x = at::ones({2, 3});
    EXPECT_THROW(halo_padding(x, 0, 3, 0, mesh->group()), c10::ValueError);
    EXPECT_THROW(halo_padding(x, 0, -1, 0, mesh->group()), c10::ValueError);
    EXPECT_THROW(halo_padding(x, 0, 1, -1, mesh->group()), c10::ValueError);
    const auto less = mesh->position() == 0 ? x : x.narrow(0, 0, 1);
    EXPECT_THROW(halo_padding(less, 0, 2, 0, mesh->group()), c10::ValueError);
  });
}

} // namespace
} // namespace shardtensor
