#include <functional>
#include <numeric>
#include <string>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include "../comm/gradient.h"
#include "../comm/thread_ranks.h"
#include "shardtensor/collectives/collectives_v.h"
#include "shardtensor/collectives/ring.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/primitives/primitives.h"

namespace shardtensor {
namespace {

using testing::gradient;
using testing::run_on_mesh;

class AllGatherV : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    AllGatherV,
    testing::each_backend(),
    testing::backend_name);

class ReduceScatterV : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    ReduceScatterV,
    testing::each_backend(),
    testing::backend_name);

class AllToAllV : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    AllToAllV,
    testing::each_backend(),
    testing::backend_name);

class GatherV : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    GatherV,
    testing::each_backend(),
    testing::backend_name);

class ScatterV : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    ScatterV,
    testing::each_backend(),
    testing::backend_name);

class IndexedAllToAllV : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    IndexedAllToAllV,
    testing::each_backend(),
    testing::backend_name);

class Broadcast : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    Broadcast,
    testing::each_backend(),
    testing::backend_name);

using Sizes = std::vector<int64_t>;

int64_t sum(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

int64_t sum_before(const Sizes& sizes, int64_t rank) {
  return std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
}

/// Even, uneven, with empty ranks, one rank.
std::vector<Sizes> all_sizes() {
  return {{4}, {2, 2}, {3, 1}, {0, 4}, {1, 0, 3}, {0, 0, 5}, {2, 0, 0, 1}};
}

at::Tensor whole(int64_t rows) {
  return at::arange(rows * 6, at::kDouble).view({2, rows, 3});
}

TEST_P(AllGatherV, PutsUnevenShardsSideBySide) {
  for (const auto& sizes : all_sizes()) {
    run_on_mesh({int64_t(sizes.size())}, [&](const MeshPtr& mesh) {
      const int64_t rank = mesh->position();
      const auto all = whole(sum(sizes));
      const auto x = all.narrow(1, sum_before(sizes, rank), sizes[rank]);
      for (const int64_t dim : {1, -2}) {
        EXPECT_TRUE(at::equal(all_gather_v(x, dim, sizes, mesh->group()), all));
      }
    });
  }
}

TEST_P(AllGatherV, ItsGradientIsReduceScatterV) {
  for (const auto& sizes : all_sizes()) {
    run_on_mesh({int64_t(sizes.size())}, [&](const MeshPtr& mesh) {
      const auto& group = mesh->group();
      const auto x = at::randn({2, sizes[mesh->position()], 3}, at::kDouble)
                         .set_requires_grad(true);
      const auto gy = at::randn({2, sum(sizes), 3}, at::kDouble);
      EXPECT_TRUE(
          at::equal(
              gradient(all_gather_v(x, 1, sizes, group), x, gy),
              reduce_scatter_v(gy, 1, sizes, group)));
    });
  }
}

TEST_P(ReduceScatterV, GivesEachRankItsRowsOfTheSum) {
  for (const auto& sizes : all_sizes()) {
    run_on_mesh({int64_t(sizes.size())}, [&](const MeshPtr& mesh) {
      const int64_t rank = mesh->position();
      const auto factor = at::full({}, rank + 1, at::kDouble);
      const int64_t ranks = sizes.size();
      const auto total = at::full({}, ranks * (ranks + 1) / 2, at::kDouble);
      const auto all = whole(sum(sizes));
      EXPECT_TRUE(
          at::equal(
              reduce_scatter_v(all * factor, 1, sizes, mesh->group()),
              (all * total).narrow(1, sum_before(sizes, rank), sizes[rank])));
    });
  }
}

TEST_P(ReduceScatterV, ItsGradientIsAllGatherV) {
  for (const auto& sizes : all_sizes()) {
    run_on_mesh({int64_t(sizes.size())}, [&](const MeshPtr& mesh) {
      const auto& group = mesh->group();
      const auto x = whole(sum(sizes)).set_requires_grad(true);
      const auto gy = at::randn({2, sizes[mesh->position()], 3}, at::kDouble);
      EXPECT_TRUE(
          at::equal(
              gradient(reduce_scatter_v(x, 1, sizes, group), x, gy),
              all_gather_v(gy, 1, sizes, group)));
    });
  }
}

/// rows[i][j]: what rank i sends to rank j. Row k of rank i has the value
/// 100 * i + k.
at::Tensor sent_to(const std::vector<Sizes>& rows, int64_t rank) {
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t begin = 100 * int64_t(i) + sum_before(rows[i], rank);
    parts.push_back(at::arange(begin, begin + rows[i][rank], at::kDouble));
  }
  return at::cat(parts);
}

TEST_P(AllToAllV, MovesAnyNumberOfRowsBetweenAnyTwoRanks) {
  const std::vector<std::vector<Sizes>> tables{
      {{3}},
      {{1, 2}, {1, 0}},
      {{0, 0, 4}, {1, 1, 1}, {0, 2, 0}},
      {{0, 0, 0}, {0, 0, 0}, {5, 0, 0}}};
  for (const auto& rows : tables) {
    run_on_mesh({int64_t(rows.size())}, [&](const MeshPtr& mesh) {
      const int64_t rank = mesh->position();
      Sizes arrive;
      for (const auto& of_rank : rows) {
        arrive.push_back(of_rank[rank]);
      }
      const auto x =
          at::arange(100 * rank, 100 * rank + sum(rows[rank]), at::kDouble)
              .set_requires_grad(true);
      const auto y = all_to_all_v(x, 0, rows[rank], arrive, mesh->group());
      EXPECT_TRUE(at::equal(y, sent_to(rows, rank)));
      // A permutation's adjoint is its inverse.
      EXPECT_TRUE(at::equal(gradient(y, x, y.detach()), x));
    });
  }
}

TEST_P(GatherV, PutsUnevenShardsSideBySideOnOneRank) {
  for (const auto& sizes : all_sizes()) {
    const int64_t ranks = sizes.size();
    for (int64_t dst = 0; dst < ranks; ++dst) {
      run_on_mesh({ranks}, [&](const MeshPtr& mesh) {
        const int64_t rank = mesh->position();
        const auto all = whole(sum(sizes));
        const auto x = all.narrow(1, sum_before(sizes, rank), sizes[rank])
                           .clone()
                           .set_requires_grad(true);
        const auto y = gather_v(x, 1, sizes, dst, mesh->group());
        EXPECT_TRUE(at::equal(y, rank == dst ? all : at::zeros_like(all)));
        // Only dst's gradient counts.
        const auto factor = at::full({}, rank == dst ? 1 : 100, at::kDouble);
        EXPECT_TRUE(at::equal(gradient(y, x, all * factor), x));
      });
    }
  }
}

TEST_P(ScatterV, GivesEachRankItsRowsOfOneRank) {
  for (const auto& sizes : all_sizes()) {
    const int64_t ranks = sizes.size();
    for (int64_t src = 0; src < ranks; ++src) {
      run_on_mesh({ranks}, [&](const MeshPtr& mesh) {
        const int64_t rank = mesh->position();
        const auto all = whole(sum(sizes));
        // The others' extent in dim does not matter.
        const auto x = (rank == src ? all : at::ones({2, 7, 3}, at::kDouble))
                           .set_requires_grad(true);
        const auto y = scatter_v(x, 1, sizes, src, mesh->group());
        EXPECT_TRUE(
            at::equal(y, all.narrow(1, sum_before(sizes, rank), sizes[rank])));
        EXPECT_TRUE(
            at::equal(
                gradient(y, x, y.detach()),
                rank == src ? all : at::zeros_like(x)));
      });
    }
  }
}

TEST_P(IndexedAllToAllV, SendsChosenRowsAndAddsUpTheirGradients) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const bool is_first = mesh->position() == 0;
    const auto rows = [](Sizes numbers) {
      return at::tensor(numbers, at::kLong);
    };
    const auto x =
        at::tensor(
            is_first ? std::vector<double>{1, 2} : std::vector<double>{3})
            .set_requires_grad(true);
    const std::vector<at::Tensor> indices = is_first
        ? std::vector{rows({1}), rows({1, 0})}
        : std::vector{rows({0}), rows({})};
    const Sizes arrive = is_first ? Sizes{1, 1} : Sizes{2, 0};
    const auto y = indexed_all_to_all_v(x, 0, indices, arrive, mesh->group());
    const auto expected =
        at::tensor(std::vector<double>{2, is_first ? 3. : 1.});
    EXPECT_TRUE(at::equal(y, expected));
    // Rank 0's second row went to both ranks, its first to rank 1.
    const auto gy = at::tensor(
        is_first ? std::vector<double>{10, 20} : std::vector<double>{30, 40});
    const auto gx = at::tensor(
        is_first ? std::vector<double>{40, 40} : std::vector<double>{20});
    EXPECT_TRUE(at::equal(gradient(y, x, gy), gx));
  });
}

TEST_P(Broadcast, GivesAllRanksOneRanksTensor) {
  for (const int64_t ranks : {1, 2, 3}) {
    for (int64_t src = 0; src < ranks; ++src) {
      run_on_mesh({ranks}, [&](const MeshPtr& mesh) {
        const int64_t rank = mesh->position();
        const auto x = whole(2).add(100 * rank).set_requires_grad(true);
        const auto y = broadcast(x, src, mesh->group());
        EXPECT_TRUE(at::equal(y, whole(2).add(100 * src)));
        const auto gx = gradient(y, x, at::full_like(y, rank + 1));
        const int64_t all = ranks * (ranks + 1) / 2;
        EXPECT_TRUE(at::equal(gx, at::full_like(y, rank == src ? all : 0)));
      });
    }
  }
}

TEST(CollectivesV, RefuseSizesThatDoNotFit) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto& group = mesh->group();
    const auto x = at::ones({2, 3});
    EXPECT_THROW(all_gather_v(x, 0, {2, 2, 2}, group), c10::ValueError);
    EXPECT_THROW(all_gather_v(x, 0, {1, 1}, group), c10::ValueError);
    EXPECT_THROW(all_gather_v(x, 2, {2, 2}, group), c10::IndexError);
    EXPECT_THROW(reduce_scatter_v(x, 0, {2, 2}, group), c10::ValueError);
    EXPECT_THROW(gather_v(x, 0, {2, 2}, 2, group), c10::ValueError);
    EXPECT_THROW(gather_v(x, 0, {1, 1}, 0, group), c10::ValueError);
    EXPECT_THROW(scatter_v(x, 0, {1, 1}, -1, group), c10::ValueError);
    EXPECT_THROW(scatter_v(x, 0, {1}, 0, group), c10::ValueError);
    EXPECT_THROW(reduce_scatter_v(x, 0, {3, -1}, group), c10::ValueError);
    EXPECT_THROW(all_to_all_v(x, 0, {1, 2}, {1, 2}, group), c10::ValueError);
    EXPECT_THROW(broadcast(x, 2, group), c10::ValueError);
    const std::vector<at::Tensor> one{at::zeros({1}, at::kLong)};
    EXPECT_THROW(
        indexed_all_to_all_v(x, 0, one, {1, 1}, group), c10::ValueError);
    const Sizes mine = mesh->position() == 0 ? Sizes{2, 0} : Sizes{0, 2};
    const Sizes less = mesh->position() == 0 ? Sizes{1, 0} : Sizes{0, 1};
    EXPECT_THROW(all_to_all_v(x, 0, mine, less, group), c10::ValueError);
  });
}

/// What a call raises on each rank: its kind and its text.
using Call = std::function<void(int64_t rank, const std::string& group)>;

std::string error_of_call(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return std::string("ValueError: ") + error.what_without_backtrace();
  } catch (const c10::IndexError& error) {
    return std::string("IndexError: ") + error.what_without_backtrace();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

class OneError : public testing::OnEachBackend {
 protected:
  /// Every rank raises the same; `part` is in it.
  static void expect(const std::string& part, const Call& call) {
    for (const int64_t ranks : {2, 3}) {
      std::vector<std::string> texts(ranks);
      run_on_mesh({ranks}, [&](const MeshPtr& mesh) {
        texts[mesh->position()] =
            error_of_call([&] { call(mesh->position(), mesh->group()); });
      });
      EXPECT_NE(texts[0].find(part), std::string::npos) << texts[0];
      const auto group_begin = texts[0].find("group '");
      for (const auto& text : texts) {
        EXPECT_EQ(text.substr(0, group_begin), texts[0].substr(0, group_begin));
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(
    On,
    OneError,
    testing::each_backend(),
    testing::backend_name);

/// One row for each rank.
Sizes ones_for(const std::string& group) {
  return Sizes(detail::Group(group).ranks(), 1);
}

TEST_P(OneError, OfAnExtentThatIsWrongOnOneRank) {
  expect(
      "ValueError: all_gather_v: x has sizes [2, 3], expected 1 in dim 0 "
      "(on rank 1 of group",
      [](int64_t rank, const std::string& group) {
        all_gather_v(at::ones({1 + (rank == 1), 3}), 0, ones_for(group), group);
      });
}

TEST_P(OneError, OfADimThatOneRankLacks) {
  expect(
      "IndexError: Dimension out of range",
      [](int64_t rank, const std::string& group) {
        const auto x = rank == 0 ? at::ones({1}) : at::ones({1, 1});
        all_gather_v(x, 1, ones_for(group), group);
      });
}

TEST_P(OneError, OfSizesThatDiffer) {
  expect(
      "ValueError: shardtensor: the ranks of",
      [](int64_t rank, const std::string& group) {
        auto sizes = ones_for(group);
        sizes.front() += rank == 0 ? 1 : 0;
        const auto x = at::ones({sum(sizes)});
        reduce_scatter_v(x, 0, sizes, group);
      });
}

TEST_P(OneError, OfDtypesThatDiffer) {
  expect(
      "ValueError: shardtensor: the ranks of",
      [](int64_t rank, const std::string& group) {
        const auto dtype = rank == 0 ? at::kFloat : at::kHalf;
        broadcast(at::ones({2}, dtype), 0, group);
      });
}

TEST_P(OneError, OfSplitsThatDoNotMatch) {
  expect(
      "ValueError: shardtensor: the ranks of",
      [](int64_t rank, const std::string& group) {
        const auto one = ones_for(group);
        auto more = one;
        more[0] += rank == 1 ? 1 : 0;
        all_to_all_v(at::ones({sum(one)}), 0, one, more, group);
      });
}

TEST_P(OneError, OfAnIndexOutOfRange) {
  expect(
      "an index is 5, expected 0 or more and less than 2",
      [](int64_t rank, const std::string& group) {
        const auto one = ones_for(group);
        const auto index = at::full({1}, rank == 1 ? 5 : 0, at::kLong);
        const std::vector<at::Tensor> indices(one.size(), index);
        indexed_all_to_all_v(at::ones({2}), 0, indices, one, group);
      });
}

TEST_P(OneError, OfAnotherDestinationOrSource) {
  expect(
      "ValueError: shardtensor: the ranks of",
      [](int64_t rank, const std::string& group) {
        gather_v(at::ones({1}), 0, ones_for(group), rank == 1, group);
      });
  expect(
      "ValueError: scatter_v: src is 7",
      [](int64_t rank, const std::string& group) {
        const auto one = ones_for(group);
        scatter_v(at::ones({sum(one)}), 0, one, rank == 1 ? 7 : 0, group);
      });
}

TEST_P(OneError, OfAnotherOperator) {
  expect(
      "ValueError: shardtensor: the ranks of",
      [](int64_t rank, const std::string& group) {
        if (rank == 0) {
          broadcast(at::ones({1}), 0, group);
        } else {
          all_gather_v(at::ones({1}), 0, ones_for(group), group);
        }
      });
}

TEST_P(OneError, OfAPieceOfTheRingThatHasOtherSizes) {
  expect(
      "ValueError: shardtensor: the ranks of",
      [](int64_t rank, const std::string& group) {
        const Sizes sizes = rank == 1 ? Sizes{3, 2} : Sizes{2, 3};
        ring_step(at::ones({2, 3}), 1, sizes, group);
      });
}

TEST_P(OneError, OfATourWhoseSizesDiffer) {
  expect(
      "ValueError: ring_tour: expected a block of sizes [3, 2], as `sizes` say "
      "of this rank, got [2, 3]",
      [](int64_t rank, const std::string& group) {
        std::vector<std::vector<int64_t>> sizes(ones_for(group).size(), {2, 3});
        if (rank == 1) {
          sizes[1] = {3, 2};
        }
        ring_tour(at::ones({2, 3}), sizes, group, {});
      });
  expect(
      "ValueError: shardtensor: the ranks of",
      [](int64_t rank, const std::string& group) {
        std::vector<std::vector<int64_t>> sizes(ones_for(group).size(), {2, 3});
        const auto dtype = rank == 1 ? at::kDouble : at::kFloat;
        ring_tour(at::ones({2, 3}, dtype), sizes, group, {});
      });
}

} // namespace
} // namespace shardtensor
