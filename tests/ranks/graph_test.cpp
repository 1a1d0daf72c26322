// Graphs cut by owners, between real processes.
#include <torch/csrc/autograd/autograd.h>

#include "support.h"

namespace shardtensor::testing {

namespace {

constexpr int64_t kNodes = 11;

/// A ring, and chords that reach other ranks' nodes.
at::Tensor edges() {
  const auto nodes = at::arange(kNodes);
  const auto next = at::cat({nodes.add(1), nodes.mul(4)}).remainder(kNodes);
  return at::stack({at::cat({nodes, nodes}), next});
}

at::Tensor cut(const at::Tensor& whole, int64_t dim, const Partition& pieces) {
  ShardSpec::Partitions partitions(whole.dim());
  partitions[dim] = pieces;
  const auto mesh = line();
  return shard(
      whole,
      make_spec(
          mesh, whole.sizes().vec(), {Placement::shard(dim)}, partitions));
}

/// Every rank's nodes, mixed, and some ranks without any.
std::vector<at::Tensor> orders() {
  std::vector<at::Tensor> all;
  for (const auto& pieces : cuts(kNodes, line()->ranks())) {
    const auto order = at::arange(kNodes).mul(3).remainder(kNodes);
    all.push_back(cut(order, 0, pieces));
  }
  return all;
}

/// One layer on one device.
at::Tensor layer(const at::Tensor& x, const at::Tensor& edge_index) {
  return x.index_add(0, edge_index[1], x.index_select(0, edge_index[0]).sin());
}

TEST(RanksShardGraph, GivesEdgesToTheOwnersOfTheirTargets) {
  for (const auto& nodes : orders()) {
    for (const auto& pieces : cuts(2 * kNodes, line()->ranks())) {
      const ShardGraph graph(cut(edges(), 1, pieces), nodes, nodes);
      const auto order = full_tensor(nodes);
      const auto kept = full_tensor(graph.edge_permutation());
      const auto renumbered = full_tensor(graph.edge_index());
      EXPECT_TRUE(
          order.index({renumbered}).equal(edges().index_select(1, kept)));
      const auto own = spec(nodes)->interval(0);
      const auto targets = to_local(graph.edge_index())[1];
      EXPECT_TRUE(targets.ge(own.begin).all().item<bool>());
      EXPECT_TRUE(targets.lt(own.end).all().item<bool>());
      const auto inner =
          graph.local_edge_index()[0].slice(0, 0, graph.interior_edges());
      EXPECT_TRUE(inner.lt(own.extent()).all().item<bool>());
    }
  }
}

TEST(RanksShardGraph, LayersByHandAreThoseOfOneDevice) {
  for (const auto& nodes : orders()) {
    const auto order = full_tensor(nodes);
    const ShardGraph graph(edges(), nodes);
    const auto whole = numbered({kNodes, 2}).requires_grad_();
    const auto expected = layer(whole, edges());
    const auto x =
        cut(whole.detach().index_select(0, order), 0, spec(nodes)->partition(0))
            .requires_grad_();
    const auto local = graph.local_edge_index();
    const auto table = graph.halo(x);
    const auto found = graph.node_tensor(to_local(x).index_add(
        0, local[1], table.index_select(0, local[0]).sin()));
    expect_close(full_tensor(found), expected.index_select(0, order));

    // Twice: the second derivatives go through the halo's adjoint and back.
    const auto grad_of = [](const at::Tensor& y, const at::Tensor& of) {
      return torch::autograd::grad(
          {y.square().sum()}, {of}, {}, true, /*create_graph=*/true)[0];
    };
    const auto first = grad_of(expected, whole);
    const auto first_found = grad_of(found, x);
    expect_close(full_tensor(first_found), first.index_select(0, order));
    expect_close(
        full_tensor(grad_of(first_found, x)),
        grad_of(first, whole).index_select(0, order));
  }
}

TEST(RanksShardGraph, WorksOnOwnRowsWhileMessagesTravel) {
  const auto nodes = orders().front();
  const ShardGraph graph(edges(), nodes, nodes);
  const auto x = cut(numbered({kNodes, 2}), 0, spec(nodes)->partition(0));
  at::Tensor seen;
  const auto table =
      graph.halo(x, [&](const at::Tensor& own) { seen = own.clone(); });
  expect_close(seen, to_local(x));
  expect_close(
      table,
      at::cat(
          {seen, numbered({kNodes, 2}).index_select(0, graph.halo_nodes())}));
}

TEST(RanksShardGraph, LeadsFromOneSetOfNodesToAnother) {
  const auto mesh = line();
  const auto targets = orders().back();
  const auto sources =
      cut(at::arange(5), 0, Partition::chunked(5, mesh->ranks()));
  const auto across =
      at::stack({at::arange(kNodes).remainder(5), at::arange(kNodes)});
  const ShardGraph graph(across, targets, sources);
  const auto x = cut(numbered({5, 1}), 0, spec(sources)->partition(0));
  const auto rows = graph.node_tensor(
      graph.halo(x).index_select(0, graph.local_edge_index()[0]));
  const auto order = full_tensor(graph.edge_permutation());
  expect_close(
      full_tensor(rows),
      numbered({5, 1}).index_select(0, across[0].index_select(0, order)));
}

TEST(RanksShardGraph, RaisesForAnEdgeToNowhereOnAllRanks) {
  const auto nodes = orders().front();
  auto wrong = edges();
  wrong[1][2] = kNodes;
  EXPECT_NE(
      error_of<c10::IndexError>([&] {
        const ShardGraph graph(wrong, nodes, nodes);
      }).find("ShardGraph"),
      std::string::npos);
}

} // namespace

} // namespace shardtensor::testing
