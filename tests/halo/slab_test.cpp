#include "shardtensor/halo/slab.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "../comm/thread_ranks.h"

namespace shardtensor::detail {
namespace {

constexpr int64_t kRows = 12;

/// Windows of three rows, on shards of 4, 4 and 4.
Slab slab_of(const MeshPtr& mesh) {
  const auto spec = make_spec(mesh, {1, 1, kRows}, {Placement::shard(2)});
  const auto stencil = Stencil::conv({3, 1, 1, 1}, kRows, kRows);
  const auto joined =
      plan_stencil_call(spec, {}, {stencil}, {1}, {1, 1, kRows});
  std::vector<OverlapPiece> pieces;
  for (int64_t p = 0; p < 3; ++p) {
    const auto rows = spec->partition(2).interval(p);
    pieces.push_back(*stencil.overlap(rows, rows));
  }
  return plan_slab(joined, 2, pieces);
}

void expect_edge(
    const Slab::Edge& edge,
    bool before,
    const Interval& slab,
    const Interval& owned,
    const Interval& outputs) {
  EXPECT_EQ(edge.before, before);
  EXPECT_EQ(edge.slab, slab);
  EXPECT_EQ(edge.owned, owned);
  EXPECT_EQ(edge.outputs, outputs);
}

TEST(Slab, HasTheRowsBeforeAndThenThoseAfter) {
  testing::run_on_mesh({3}, [](const MeshPtr& mesh) {
    const auto slab = slab_of(mesh);
    EXPECT_EQ(slab.dim, 2);
    const bool is_first = mesh->position() == 0;
    const bool is_last = mesh->position() == 2;
    ASSERT_EQ(slab.edges.size(), is_first || is_last ? 1 : 2);
    if (!is_first) {
      expect_edge(slab.edges[0], true, {0, 1}, {0, 2}, {0, 1});
    }
    if (!is_last) {
      const Interval row = is_first ? Interval{0, 1} : Interval{1, 2};
      expect_edge(slab.edges.back(), false, row, {2, 4}, {3, 4});
    }
  });
}

TEST(Slab, JoinsAnEdgesRowsInTheirOrder) {
  testing::run_on_mesh({3}, [](const MeshPtr& mesh) {
    const auto slab = slab_of(mesh);
    const int64_t begin = 4 * mesh->position();
    const auto x = at::arange(begin, begin + 4).view({1, 1, 4});
    const auto others = exchange(x, slab.bring);
    for (const auto& edge : slab.edges) {
      const int64_t first = edge.before ? begin - 1 : begin + 2;
      EXPECT_TRUE(
          at::equal(
              edge_rows(x, others, edge, slab),
              at::arange(first, first + edge.rows()).view({1, 1, 3})));
    }
  });
}

TEST(Slab, TakesItsGradientFromThoseOfAllRows) {
  testing::run_on_mesh({3}, [](const MeshPtr& mesh) {
    const auto slab = slab_of(mesh);
    const auto x = at::full({1, 1, 4}, 7);
    std::vector<at::Tensor> of_edges;
    std::vector<int64_t> expected;
    for (const auto& edge : slab.edges) {
      of_edges.push_back(at::arange(3).view({1, 1, 3}));
      expected.push_back(edge.before ? 0 : 2);
      EXPECT_EQ(edge.slab_among_rows().begin, edge.before ? 0 : 2);
      EXPECT_EQ(edge.owned_among_rows().begin, edge.before ? 1 : 0);
    }
    const auto gradient = slab_gradient(of_edges, x, slab);
    EXPECT_TRUE(at::equal(gradient, at::tensor(expected).view({1, 1, -1})));
    Slab none = slab;
    none.edges.clear();
    EXPECT_EQ(slab_gradient({}, x, none).numel(), 0);
  });
}

} // namespace
} // namespace shardtensor::detail
