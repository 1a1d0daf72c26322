#include "shardtensor/halo/halo_exchange.h"

#include <random>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "../comm/thread_ranks.h"
#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "windows.h"

namespace shardtensor {
namespace {

using testing::run_on_mesh;

class HaloExchange : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    HaloExchange,
    testing::each_backend(),
    testing::backend_name);

class HaloTrim : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    HaloTrim,
    testing::each_backend(),
    testing::backend_name);

/// Every rank's part of `full`, cut along `dim`.
at::Tensor shard_of(
    const at::Tensor& full,
    int64_t dim,
    const Partition& partition,
    const MeshPtr& mesh) {
  ShardSpec::Partitions partitions(full.dim());
  partitions[dim] = partition;
  const auto rows = partition.interval(mesh->position());
  return from_local(
      full.narrow(dim, rows.begin, rows.extent()).contiguous(),
      make_spec(mesh, full.sizes().vec(), {Placement::shard(dim)}, partitions));
}

/// The sum over all ranks.
double total(const at::Tensor& term, const MeshPtr& mesh) {
  return all_reduce(term.detach().clone(), Reduce::Sum, mesh->group())
      .item<double>();
}

std::vector<Partition> cuts() {
  return {
      Partition({4, 3, 2}),
      Partition({0, 9, 0}),
      Partition({1, 0, 8}),
      Partition::chunked(9, 3)};
}

const Boundary kBoundaries[] = {
    Boundary::None,
    Boundary::Zeros,
    Boundary::Periodic,
    Boundary::Reflect,
    Boundary::Replicate};

TEST_P(HaloExchange, BringsTheRowsAroundEachShard) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const auto full = at::arange(10, kDouble);
    const auto x = shard_of(full, 0, Partition({6, 4, 0}), mesh);
    const auto rows = halo_exchange(x, {{0, 1, 1}}, Boundary::Periodic);
    const std::vector<std::vector<double>> expected{
        {9, 0, 1, 2, 3, 4, 5, 6}, {5, 6, 7, 8, 9, 0}, {9, 0}};
    const auto& own = expected[mesh->position()];
    ASSERT_EQ(rows.numel(), static_cast<int64_t>(own.size()));
    for (size_t i = 0; i < own.size(); ++i) {
      EXPECT_EQ(rows[static_cast<int64_t>(i)].item<double>(), own[i]);
    }
  });
}

TEST_P(HaloExchange, BackwardIsTheAdjoint) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    for (const auto& cut : cuts()) {
      for (const auto boundary : kBoundaries) {
        const auto x = shard_of(at::randn({2, 9}, kDouble), 1, cut, mesh)
                           .requires_grad_(true);
        const auto ax = halo_exchange(x, {{1, 2, 3}}, boundary);
        const auto y = at::rand_like(ax);
        const auto gradient = torch::autograd::grad({ax}, {x}, {y})[0];
        const double forward = total(ax.mul(y).sum(), mesh);
        const double backward =
            total(to_local(x).mul(to_local(gradient)).sum(), mesh);
        EXPECT_NEAR(forward, backward, 1e-10) << cut << to_string(boundary);
      }
    }
  });
}

TEST_P(HaloTrim, UndoesTheExchange) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    for (const auto& cut : cuts()) {
      for (const auto boundary : kBoundaries) {
        const auto x = shard_of(at::arange(9, kDouble), 0, cut, mesh);
        const auto rows = halo_exchange(x, {{0, 4, 1}}, boundary);
        const auto back = halo_trim(rows, spec(x), {{0, 4, 1}}, boundary);
        EXPECT_EQ(spec(back), spec(x));
        EXPECT_TRUE(to_local(back).equal(to_local(x)));
      }
    }
  });
}

TEST_P(HaloExchange, NamesWrongArguments) {
  run_on_mesh({1}, [](const MeshPtr& mesh) {
    const auto x = shard_of(at::arange(4, kDouble), 0, Partition({4}), mesh);
    EXPECT_THROW(halo_exchange(x, {{1, 1, 1}}), c10::IndexError);
    EXPECT_THROW(halo_exchange(x, {{0, -1, 1}}), c10::ValueError);
    EXPECT_THROW(halo_exchange(x, {{0, 1, 1}, {-1, 1, 1}}), c10::ValueError);
    EXPECT_THROW(
        halo_trim(
            at::arange(4, kDouble), spec(x), {{0, 1, 1}}, Boundary::Zeros),
        c10::ValueError);
    try {
      halo_exchange(at::arange(4, kDouble), {{0, 1, 1}});
      FAIL();
    } catch (const c10::TypeError& error) {
      EXPECT_STREQ(
          error.what_without_backtrace(),
          "shardtensor::halo_exchange: expected a ShardTensor, got a plain "
          "tensor of sizes [4] (the .data of a plain tensor cannot be set to a "
          "ShardTensor)");
    }
  });
}

TEST(Convolution, GivesTheWholeConvolutionOnRanks) {
  const auto full = at::randn({1, 2, 9, 5}, kDouble);
  const auto weight = at::randn({3, 2, 3, 3}, kDouble);
  const std::vector<int64_t> one{1, 1};
  const auto expected = at::conv2d(full, weight, {}, one, one);
  run_on_mesh({3}, [&](const MeshPtr& mesh) {
    for (const auto& cut : cuts()) {
      const auto x = shard_of(full, 2, cut, mesh);
      const auto y = at::conv2d(x, weight, {}, one, one);
      const auto rows = spec(y)->interval(2);
      EXPECT_EQ(spec(y)->partition(2), cut);
      EXPECT_TRUE(
          to_local(y).allclose(expected.narrow(2, rows.begin, rows.extent())));
    }
  });
}

} // namespace
} // namespace shardtensor
