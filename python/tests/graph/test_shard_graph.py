"""Graphs whose nodes and edges no rank holds whole."""

import contextlib
import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from networks import Forecast
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.autograd import forward_ad
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor import ShardGraph, ShardTensor, partition_nodes

NODES, EDGES, SOURCES = 9, 17, 6


def owner_lists(mesh):
    """Who owns which node: mixed, with a rank without nodes, all on one."""
    ranks = mesh.size()
    mixed = torch.arange(NODES).mul(5).remainder(7).remainder(ranks)
    return mixed, mixed.clamp(max=max(ranks - 2, 0)), torch.full((NODES,), ranks - 1)


def on_all(placement, mesh):
    return [placement] * mesh.ndim


def pieces(extent, mesh):
    return partitions(extent, mesh.size(), repeated=False)


@ranks(1, 2, 3, 4, "2x2")
def test_edges_go_to_the_owners_of_their_targets(mesh):
    edges = torch.randint(NODES, (2, EDGES))
    cut = on_all(Shard(1), mesh)
    for owners in owner_lists(mesh):
        nodes = partition_nodes(mesh, owners=owners)
        order = nodes.full_tensor()
        assert torch.equal(order, owners.argsort(stable=True))
        for sizes in pieces(EDGES, mesh):
            graph = ShardGraph(shard(edges, mesh, cut, {1: sizes}), nodes)
            renumbered = graph.edge_index.full_tensor()
            kept = graph.edge_permutation.full_tensor()
            assert torch.equal(kept.sort().values, torch.arange(EDGES))
            assert torch.equal(order[renumbered], edges[:, kept])
            check_own_edges(graph)


def check_own_edges(graph):
    begin, end = graph.nodes._spec.interval(0)
    sources, targets = graph.edge_index.to_local()
    assert bool(((begin <= targets) & (targets < end)).all())
    inside = (begin <= sources) & (sources < end)
    assert inside.sum() == graph.interior_edges
    assert inside[: graph.interior_edges].all()
    for part in graph.edge_permutation.to_local().split(
        [graph.interior_edges, inside.numel() - graph.interior_edges]
    ):
        assert torch.equal(part, part.sort().values)  # in the order that was given
    assert torch.equal(graph.halo_nodes, sources[~inside].unique())
    rows = torch.cat([torch.arange(begin, end), graph.halo_nodes])
    assert torch.equal(rows[graph.local_edge_index[0]], sources)
    assert torch.equal(graph.local_edge_index[1] + begin, targets)


class Layer:
    """By hand on the rows that a rank has, and the same on one device."""

    def __init__(self, graph, edges, overlaps=False):
        self.graph, self.edges, self.overlaps = graph, edges, overlaps
        self.order = graph.nodes.full_tensor()
        self.kept = graph.edge_permutation.full_tensor()

    def __deepcopy__(self, memo):
        return self

    def messages(self, x, source, e):
        return x[source].sin() * e

    def __call__(self, x, e):
        if isinstance(x, ShardTensor):
            return self.by_hand(x[self.graph.sources], e[self.graph.edge_permutation])
        out = x.new_zeros(NODES, x.size(1)).index_add(
            0, self.edges[1], self.messages(x, self.edges[0], e)
        )
        return out[self.order]

    def by_hand(self, x, e):
        graph, inner = self.graph, self.graph.interior_edges
        source, target = graph.local_edge_index
        e = e.to_local()
        if self.overlaps:
            table, first = graph.halo(
                x, lambda own: self.messages(own, source[:inner], e[:inner])
            )
            last = self.messages(table, source[inner:], e[inner:])
            messages = torch.cat([first, last])
        else:
            messages = self.messages(graph.halo(x), source, e)
        begin, end = graph.nodes._spec.interval(0)
        out = messages.new_zeros(end - begin, x.size(1)).index_add(0, target, messages)
        return graph.node_tensor(out)


def double(*sizes):
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


@ranks(1, 2, 3, 4, "2x2")
@pytest.mark.parametrize("overlaps", [False, True])
def test_layers_by_hand(mesh, overlaps):
    x, e, edges = double(NODES, 3), double(EDGES, 1), torch.randint(NODES, (2, EDGES))
    rows = on_all(Shard(0), mesh)
    for owners in owner_lists(mesh):
        nodes = partition_nodes(mesh, owners=owners)
        for sizes in pieces(EDGES, mesh)[:3]:
            cut = shard(edges, mesh, on_all(Shard(1), mesh), {1: sizes})
            check_op(
                Layer(ShardGraph(cut, nodes), edges, overlaps),
                sharded(x, rows), sharded(e, rows, {0: sizes}),
                mesh=mesh, second_order=True,
            )  # fmt: skip


@ranks(1, 2, 3, "2x2")
def test_from_one_set_of_nodes_to_another(mesh):
    x, e = double(SOURCES, 2), double(EDGES, 1)
    edges = torch.stack([torch.randint(SOURCES, (EDGES,)), torch.arange(EDGES) % NODES])
    rows = on_all(Shard(0), mesh)
    givers = partition_nodes(mesh, owners=torch.arange(SOURCES) * 3 % mesh.size())
    for owners in owner_lists(mesh):
        graph = ShardGraph(edges, partition_nodes(mesh, owners=owners), givers)
        for overlaps in (False, True):
            check_op(
                Layer(graph, edges, overlaps), sharded(x, rows), sharded(e, rows),
                mesh=mesh, second_order=True,
            )  # fmt: skip


def training_losses(model, given, truth):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(*given) - truth).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@ranks(1, 2, 3, "2x2")
def test_training_from_a_grid_to_a_mesh_and_back(mesh):
    """Encoder, processor and decoder over four sets of edges."""
    model = Forecast().double()
    grid_points, mesh_points = torch.rand(36, 2), torch.rand(11, 2)
    grid, rows, truth = (
        torch.randn(*sizes).double() for sizes in ((36, 3), (11, 2), (36, 1))
    )
    to_mesh = torch.stack([torch.randint(36, (50,)), torch.randint(11, (50,))])
    to_grid = torch.stack([torch.randint(11, (70,)), torch.randint(36, (70,))])
    short, long = torch.randint(11, (2, 40)), torch.randint(11, (2, 13))

    def cut(x, dim=0):
        return shard(x, mesh, on_all(Shard(dim), mesh))

    with shardtensor.fallback_mode("error"):
        of_grid = partition_nodes(mesh, points=cut(grid_points))
        of_mesh = partition_nodes(mesh, points=cut(mesh_points), method="hilbert")
        graphs = (
            ShardGraph(cut(to_mesh, 1), of_mesh, sources=of_grid),
            ShardGraph(cut(short, 1), of_mesh),
            ShardGraph(cut(long, 1), of_mesh),
            ShardGraph(cut(to_grid, 1), of_grid, sources=of_mesh),
        )
        given = (
            cut(grid)[of_grid],
            cut(rows)[of_mesh],
            *(g.edge_index for g in graphs),
        )
        found = training_losses(copy.deepcopy(model), given, cut(truth)[of_grid])
    given = (grid, rows, to_mesh, short, long, to_grid)
    expected = training_losses(model, given, truth)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@ranks(2, 3)
def test_networks_on_its_edges_send_a_message_to_each_neighbour(mesh):
    """Each layer, both ways, and plan the rows of its edges no more."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    count = 6 * ranks
    ring = torch.arange(count)
    edges = torch.stack([ring, (ring + 1) % count])
    nodes = partition_nodes(mesh, points=ring.view(-1, 1).float())
    graph = ShardGraph(shard(edges, mesh, [Shard(1)]), nodes)
    x = torch.randn(count, 2)
    rows = shard(x, mesh, [Shard(0)])[nodes]

    def layer(x, edge_index):
        out = torch.zeros_like(x)
        return out.index_add(0, edge_index[1], x.index_select(0, edge_index[0]))

    layer(rows, graph.edge_index)
    shardtensor.reset_comm_stats()
    out = layer(rows, graph.edge_index)
    stats = shardtensor.comm_stats()
    assert (stats.plans, stats.messages, stats.all_reduces) == (0, 1, 0)
    assert stats.bytes == 2 * x.element_size()
    assert_close(out, layer(x, edges)[nodes.full_tensor()])
    assert len(graph.halo_nodes) == 1, rank


@contextlib.contextmanager
def pymetis_is(stand_in):
    before = sys.modules.get("pymetis")
    sys.modules["pymetis"] = stand_in
    try:
        yield
    finally:
        del sys.modules["pymetis"]
        if before is not None:
            sys.modules["pymetis"] = before


@ranks(1, 2, 3, "2x2")
def test_owners_by_metis(mesh):
    calls = []

    def part_graph(parts, xadj, adjncy):
        calls.append((xadj, adjncy))
        return 0, [node * parts // NODES for node in range(NODES)]

    edges = torch.tensor([[0, 1, 1, 3, 8], [1, 0, 1, 2, 0]])
    layouts = (on_all(Shard(1), mesh), on_all(Replicate(), mesh))
    for given in (edges, *(shard(edges, mesh, layout) for layout in layouts)):
        calls.clear()
        with pymetis_is(SimpleNamespace(part_graph=part_graph)):
            nodes = partition_nodes(mesh, edge_index=given, nodes=NODES)
        first = mesh.get_rank() == 0
        assert calls == [([0, 2, 3, 4, 5, 5, 5, 5, 5, 6], [1, 8, 0, 3, 2, 0])] * first
        assert_close(nodes, torch.arange(NODES))
    with pymetis_is(None), pytest.raises(ImportError, match="needs pymetis"):
        partition_nodes(mesh, edge_index=given, nodes=NODES)
    with pytest.raises(ValueError, match="weights balance points, .* with edge_index"):
        partition_nodes(mesh, edge_index=given, nodes=NODES, weights=torch.ones(NODES))
    owners = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="no number of nodes, for owners .* got 99"):
        partition_nodes(mesh, owners=owners, nodes=99)


@ranks(3, "2x2")
def test_metis_has_the_graph_on_one_rank_alone(mesh):
    """Each piece travels to that rank once."""
    edges = torch.randint(NODES, (2, 6000))
    cut = shard(edges, mesh, on_all(Shard(1), mesh))
    parts = SimpleNamespace(part_graph=lambda parts, xadj, adjncy: (0, [0] * NODES))
    with pymetis_is(parts):
        shardtensor.reset_comm_stats()
        partition_nodes(mesh, edge_index=cut, nodes=NODES)
    piece = 16 * 6000 / mesh.size() if mesh.get_rank() else 0
    assert piece <= shardtensor.comm_stats().bytes <= piece + 2000


@ranks(2, 3)
def test_metis_itself_cuts_few_edges(mesh):
    pytest.importorskip("pymetis")
    side = 12
    number = torch.randperm(side * side).view(side, side)
    pairs = ((number[1:], number[:-1]), (number[:, 1:], number[:, :-1]))
    edges = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], 1)
    cut = shard(edges, mesh, [Shard(1)])
    nodes = partition_nodes(mesh, edge_index=cut, nodes=side * side)
    even = side * side / mesh.size()
    assert max(nodes._spec.partition(0).sizes) <= 1.1 * even
    owners = torch.empty(side * side)
    for rank, piece in enumerate(
        nodes.full_tensor().split(nodes._spec.partition(0).sizes)
    ):
        owners[piece] = rank
    crossing = int((owners[edges[0]] != owners[edges[1]]).sum())
    assert crossing <= 1.5 * side * (mesh.size() - 1)


@ranks(2, 3)
def test_what_metis_cannot_part_is_an_error_everywhere(mesh):
    def part_graph(parts, xadj, adjncy):
        raise RuntimeError("out of memory")

    edges = torch.tensor([[0, 1, 3], [1, 0, 2]])
    with pymetis_is(SimpleNamespace(part_graph=part_graph)):
        with pytest.raises(RuntimeError, match=r"out of memory"):
            partition_nodes(mesh, edge_index=edges, nodes=NODES)
        told = r"edge_index \(2, E\) of int64, got"
        for wrong in (edges.double(), edges[[0, 1, 0]], edges[0], edges.int()):
            cut = shard(wrong, mesh, [Shard(wrong.dim() - 1)])
            with pytest.raises(ValueError, match=told):
                partition_nodes(mesh, edge_index=cut, nodes=NODES)
        for bad in (-1, None, 9.0):
            with pytest.raises(ValueError, match=f"number of nodes, got nodes={bad}"):
                partition_nodes(mesh, edge_index=edges, nodes=bad)
        for bad in (NODES, -1):
            wrong = edges.clone()
            wrong[1, 1] = bad
            with pytest.raises(IndexError, match=f"names node {bad}, expected one of"):
                cut = shard(wrong, mesh, [Shard(1)])
                partition_nodes(mesh, edge_index=cut, nodes=NODES)
        first = mesh.get_rank() == 0
        for given, nodes in ((edges, NODES + first), (cut if first else edges, NODES)):
            with pytest.raises(ValueError, match="partition_nodes: ranks were told"):
                partition_nodes(mesh, edge_index=given, nodes=nodes)


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("wrong", [NODES, -1])
def test_an_edge_to_nowhere_is_the_same_error_everywhere(mesh, wrong):
    nodes = partition_nodes(mesh, owners=owner_lists(mesh)[0])
    for row in (0, 1):
        edges = torch.randint(NODES, (2, EDGES))
        edges[row, -1] = wrong
        for given in (edges, shard(edges, mesh, on_all(Shard(1), mesh))):
            told = f"ShardGraph: index {wrong} is out of bounds"
            with pytest.raises(IndexError, match=told):
                ShardGraph(given, nodes)


@ranks(2, 3)
def test_what_is_no_graph_is_the_same_error_everywhere(mesh):
    edges = torch.randint(NODES, (2, EDGES))
    nodes = partition_nodes(mesh, owners=owner_lists(mesh)[0])
    twice = torch.arange(NODES)
    twice[0] = 1
    with pytest.raises(ValueError, match="each of 9 nodes once"):
        ShardGraph(edges, shard(twice, mesh, [Shard(0)]))
    with pytest.raises(
        ValueError, match=r"edge_index \(2, E\) of int64, got \[17, 2\]"
    ):
        ShardGraph(edges.t(), nodes)
    with pytest.raises(ValueError, match="cut by all axes"):
        ShardGraph(edges, shard(twice, mesh, [Replicate()]))
    with pytest.raises(TypeError, match="plain tensor"):
        ShardGraph(edges, twice)
    graph = ShardGraph(edges, nodes)
    with pytest.raises(ValueError, match="a row for each of 9 sources"):
        graph.halo(shard(torch.ones(NODES + 1, 2), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="expected one of owners, points"):
        partition_nodes(mesh)


@ranks(2, 3)
def test_edges_that_one_rank_has_otherwise_are_the_same_error_everywhere(mesh):
    edges = torch.randint(NODES, (2, EDGES))
    nodes = partition_nodes(mesh, owners=torch.arange(NODES) % mesh.size())
    first = mesh.get_local_rank() == 0
    cut = shard(edges, mesh, [Shard(1)])
    for bad, kind, told in (
        (edges[:, 1:], ValueError, r"the same call:(.|\n)*\[2, 16\]"),
        (edges.int(), ValueError, r"\(2, E\) of int64, got .*on rank 0"),
        (cut, ValueError, "the same call:(.|\n)*a ShardTensor"),
    ):
        with pytest.raises(kind, match=told):
            ShardGraph(bad if first else edges, nodes)
    assert ShardGraph(edges, nodes).edge_index.shape == edges.shape


@ranks(2, 3)
def test_a_rank_may_use_own_rows_alone(mesh):
    """The others' gradients of its rows come to it all the same."""
    edges = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])
    nodes = partition_nodes(mesh, owners=torch.arange(NODES) * mesh.size() // NODES)
    graph = ShardGraph(edges, nodes)
    x = shard(torch.ones(NODES, 2, dtype=torch.float64), mesh, [Shard(0)])[nodes]
    x = x.detach().requires_grad_()
    table, first = graph.halo(x, meanwhile=lambda own: own**2)
    loss = first.sum()
    if mesh.get_local_rank() > 0:
        loss = loss + 3 * (table[len(first) :] ** 2).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad((grad**2).sum() / 2, x)
    uses = torch.ones(NODES, 2, dtype=torch.float64)
    for node in range(1, NODES):  # the next one's owner has another rank
        if node * mesh.size() // NODES > (node - 1) * mesh.size() // NODES:
            uses[node - 1] += 3
    assert_close(grad, 2 * uses)
    assert_close(second, 4 * uses**2)


@ranks(1, 2, 3, "2x2")
def test_tangents_of_the_halo_travel_with_it(mesh):
    edges = torch.arange(2 * EDGES).reshape(2, EDGES) * 5 % NODES
    nodes = partition_nodes(mesh, owners=torch.arange(NODES) % mesh.size())
    graph = ShardGraph(edges, nodes)
    value, tangent = (
        shard(torch.randn(NODES, 2), mesh, on_all(Shard(0), mesh)) for _ in range(2)
    )
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(value, tangent)
        table, first = graph.halo(dual, meanwhile=lambda own: 2 * own)
        found = [forward_ad.unpack_dual(x) for x in (table, first)]
    expected = graph.halo(tangent)
    torch.testing.assert_close(found[0].primal, graph.halo(value))
    torch.testing.assert_close(found[0].tangent, expected)
    torch.testing.assert_close(found[1].tangent, 2 * expected[: len(first)])


@ranks(2, 3)
def test_rows_that_one_rank_has_otherwise_are_the_same_error_everywhere(mesh):
    nodes = partition_nodes(mesh, owners=torch.arange(NODES) % mesh.size())
    graph = ShardGraph(torch.randint(NODES, (2, EDGES)), nodes)
    first = mesh.get_local_rank() == 0
    for make, each, rows in (
        (graph.node_tensor, "node", len(graph.nodes.to_local())),
        (graph.edge_tensor, "edge", len(graph.edge_permutation.to_local())),
    ):
        good = torch.ones(rows, 2)
        for bad, kind, told in (
            (torch.ones(rows + 1, 2), ValueError, rf"own {each}, \(\d+, \.\.\.\), got"),
            (torch.tensor(1.0), ValueError, rf"own {each}, .* got \[\]"),
            (torch.ones(rows, 3), ValueError, r"the same call:(.|\n)*\[\*, 3\]"),
            (good.double(), ValueError, "the same call:(.|\n)*Double"),
            (graph.nodes, TypeError, "expected a plain tensor, got a ShardTensor"),
        ):
            with pytest.raises(kind, match=told):
                make(bad if first else good)
        assert make(good).shape[1:] == (2,)
