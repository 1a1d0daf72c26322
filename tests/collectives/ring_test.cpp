#include "shardtensor/collectives/ring.h"

#include <stdexcept>

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/real.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "../comm/thread_ranks.h"
#include "shardtensor/comm/primitives/all_reduce.h"

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
    for (const auto& sizes : {piece_sizes(ranks), piece_sizes(0)}) {
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
        ring_tour(piece(rank), sizes, mesh->group(), stops);
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
}

TEST(RingTour, RaisesOnEveryRankWhatAStopRaisesOnOne) {
  for (const bool returns : {false, true}) {
    run_on_mesh({3}, [&](const MeshPtr& mesh) {
      const int64_t rank = mesh->position();
      RingStops stops;
      stops.own = [&] { TORCH_CHECK_INDEX(rank != 1, "no such row"); };
      stops.other = [](int64_t, const at::Tensor& block) { return block; };
      if (returns) {
        stops.returned = [](const at::Tensor&) {};
      }
      try {
        ring_tour(piece(rank), piece_sizes(3), mesh->group(), stops);
        FAIL() << "no error";
      } catch (const c10::IndexError& error) {
        const std::string text = error.what_without_backtrace();
        EXPECT_EQ(text.substr(0, 11), "no such row");
        EXPECT_EQ(text.find("on rank 1") != text.npos, rank != 1) << text;
      }
      // Nothing is left under way.
      stops.own = nullptr;
      ring_tour(piece(rank), piece_sizes(3), mesh->group(), stops);
    });
  }
}

TEST(RingTour, RaisesWhatIsNoErrorOfTorchEither) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    RingStops stops;
    stops.own = [&] {
      if (mesh->position() == 0) {
        throw std::length_error("too long");
      }
    };
    stops.other = [](int64_t, const at::Tensor&) { return at::Tensor(); };
    const auto tour = [&] {
      ring_tour(piece(1), {{1, 2}, {1, 2}}, mesh->group(), stops);
    };
    if (mesh->position() == 0) {
      EXPECT_THROW(tour(), std::length_error);
    } else {
      EXPECT_THROW(tour(), c10::Error);
    }
  });
}

TEST(RingTour, RaisesOnEveryRankATermThatIsNotAsItsBlock) {
  const auto wrong = [](const at::Tensor& block, bool in_dtype) {
    return in_dtype ? block.to(at::kFloat) : block.flatten();
  };
  for (const bool in_dtype : {false, true}) {
    run_on_mesh({3}, [&](const MeshPtr& mesh) {
      const int64_t rank = mesh->position();
      RingStops stops;
      stops.other = [&](int64_t, const at::Tensor& block) {
        return rank == 1 ? wrong(block, in_dtype) : block;
      };
      stops.returned = [](const at::Tensor&) {};
      try {
        ring_tour(piece(rank), piece_sizes(3), mesh->group(), stops);
        FAIL() << "no error";
      } catch (const c10::ValueError& error) {
        const std::string text = error.what_without_backtrace();
        EXPECT_EQ(
            text.find(
                "ring_tour: expected a term as its block, [0, 2] of Double "
                "on cpu, got "),
            0)
            << text;
      }
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

at::Tensor pull(const at::Tensor& block, const std::vector<at::Tensor>& own) {
  return own[0].matmul(block.t()).tanh().matmul(block) * own[1];
}

TEST(RingSum, IsThatOfAllBlocksTogether) {
  for (const int64_t ranks : {1, 2, 3, 5}) {
    const auto every = at::rand({ranks * (ranks - 1) / 2, 2}, at::kDouble);
    const auto whole = every.clone().set_requires_grad(true);
    const auto own = (every * 2).set_requires_grad(true);
    const auto scale = at::ones({}, at::kDouble).set_requires_grad(true);
    const auto expected = pull(whole, {own, scale});
    expected.square().sum().backward();
    run_on_mesh({ranks}, [&](const MeshPtr& mesh) {
      const int64_t rank = mesh->position();
      const auto mine = [&](const at::Tensor& x) {
        return x.detach().narrow(0, rank * (rank - 1) / 2, rank).clone();
      };
      const auto block = mine(whole).set_requires_grad(true);
      const auto rows = mine(own).set_requires_grad(true);
      const auto factor = at::ones({}, at::kDouble).set_requires_grad(true);
      const auto sum = ring_sum(
          pull, block, {rows, factor}, piece_sizes(ranks), mesh->group());
      EXPECT_TRUE(at::allclose(sum, mine(expected)));
      const auto grads = torch::autograd::grad(
          {sum.square().sum()}, {block, rows, factor}, {}, true, true);
      EXPECT_TRUE(at::allclose(grads[0], mine(whole.grad())));
      EXPECT_TRUE(at::allclose(grads[1], mine(own.grad())));
      const auto factors =
          all_reduce(grads[2].detach(), Reduce::Sum, mesh->group());
      EXPECT_TRUE(at::allclose(factors, scale.grad()));
      EXPECT_THROW(grads[1].sum().backward(), c10::Error);
    });
  }
}

TEST(RingSum, TakesConjugatesAndATermThatIsTheBlock) {
  using Complex = c10::complex<double>;
  const auto same = [](const at::Tensor& block, const auto&) { return block; };
  for (const int64_t ranks : {1, 2, 3}) {
    run_on_mesh({ranks}, [&](const MeshPtr& mesh) {
      const auto rank = static_cast<double>(mesh->position());
      const auto all = static_cast<double>(ranks);
      const auto x = at::full({2}, Complex(1, rank), at::kComplexDouble)
                         .set_requires_grad(true);
      for (const auto& block : {x, x.conj()}) {
        const auto sum = ring_sum(same, block, {}, {}, mesh->group());
        const auto imaginary = (block.is_conj() ? -all : all) * (all - 1) / 2;
        EXPECT_TRUE(at::equal(sum, at::full_like(x, Complex(all, imaginary))));
        const auto grads = torch::autograd::grad({at::real(sum).sum()}, {x});
        EXPECT_TRUE(at::equal(grads[0], at::full_like(x, all)));
      }
    });
  }
}

TEST(RingSum, RefusesAGradientThatOneRankAloneRecords) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto own = at::ones({1, 2}, at::kDouble);
    const auto rows = own.clone().set_requires_grad(mesh->position() == 0);
    const auto sum = [&](const at::Tensor& x) {
      return ring_sum(pull, own, {x, own}, {{1, 2}, {1, 2}}, mesh->group());
    };
    try {
      sum(rows);
      FAIL() << "no error";
    } catch (const c10::ValueError& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_NE(text.find("[1, 2], recorded for backward"), text.npos) << text;
    }
    const at::NoGradGuard no_grad; // no backward, whatever requires a gradient
    EXPECT_EQ(sum(rows).sizes(), own.sizes());
  });
}

} // namespace
} // namespace shardtensor
