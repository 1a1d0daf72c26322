#include "shardtensor/comm/ring.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "thread_ranks.h"

namespace shardtensor {
namespace {

using testing::run_on_mesh;

class RingStep : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    RingStep,
    testing::each_backend(),
    testing::backend_name);

/// The piece of a rank: as many rows as its number, every entry its number.
at::Tensor piece(int64_t rank) {
  return at::full({rank, 2}, rank, at::kDouble);
}

TEST_P(RingStep, BringsThePieceOfTheRankBefore) {
  for (const int64_t ranks : {1, 2, 3, 5}) {
    for (const int64_t step : {1, -1, 2, 0, -7}) {
      run_on_mesh({ranks}, [&](const MeshPtr& mesh) {
        const int64_t rank = mesh->position();
        const auto before = piece(((rank - step) % ranks + ranks) % ranks);
        const auto x = piece(rank).set_requires_grad(true);
        const auto y = ring_step(x, step, before.sizes(), mesh->group());
        EXPECT_TRUE(at::equal(y, before));
        // The gradient comes back from where the piece went.
        const auto gradient =
            torch::autograd::grad({y}, {x}, {y.detach() * y.detach()})[0];
        EXPECT_TRUE(at::equal(gradient, x * x));
      });
    }
  }
}

TEST_P(RingStep, RefusesAnotherShapeFromItself) {
  run_on_mesh({1}, [](const MeshPtr& mesh) {
    EXPECT_THROW(
        ring_step(at::ones({2, 3}), 1, {3, 2}, mesh->group()), c10::ValueError);
  });
}

std::vector<std::vector<int64_t>> piece_sizes(int64_t ranks) {
  std::vector<std::vector<int64_t>> sizes;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    sizes.push_back({rank, 2});
  }
  return sizes;
}

TEST(RingTour, MeetsEveryBlockOnceAndReturnsTerms) {
  for (const int64_t ranks : {1, 2, 3, 5}) {
    run_on_mesh({ranks}, [&](const MeshPtr& mesh) {
      const int64_t rank = mesh->position();
      std::vector<int64_t> owners;
      auto sum = at::zeros({rank, 2}, at::kDouble);
      RingStops stops;
      stops.own = [&] { owners.push_back(rank); };
      stops.other = [&](int64_t owner, const at::Tensor& block) {
        EXPECT_TRUE(at::equal(block, piece(owner)));
        owners.push_back(owner);
        return block * (rank + 1);
      };
      stops.returned = [&](const at::Tensor& term) { sum.add_(term); };
      bool finished = false;
      stops.own_rest = [&] { finished = true; };
      ring_tour(piece(rank), piece_sizes(ranks), mesh->group(), stops);
      ASSERT_EQ(static_cast<int64_t>(owners.size()), ranks);
      for (int64_t stop = 0; stop < ranks; ++stop) {
        EXPECT_EQ(owners[stop], (rank - stop + ranks) % ranks);
      }
      // Every other rank r made r + 1 times this block.
      const int64_t factor = ranks * (ranks + 1) / 2 - (rank + 1);
      EXPECT_TRUE(at::equal(sum, piece(rank) * factor));
      EXPECT_TRUE(finished);
    });
  }
}

TEST(RingTour, RefusesAnotherBlockThanPromised) {
  run_on_mesh({1}, [](const MeshPtr& mesh) {
    EXPECT_THROW(
        ring_tour(at::ones({2, 3}), {{3, 2}}, mesh->group(), {}),
        c10::ValueError);
  });
}

} // namespace
} // namespace shardtensor
