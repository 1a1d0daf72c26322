"""Rows that edges reduce into, made as graph libraries make them: zeros of as many
nodes, which lie as the nodes do; and few rows of the whole graph, on all ranks."""

import pytest
import torch
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

import shardtensor

NODES, EDGES, GRAPHS = 7, 12, 3


def wide(index, like):
    """torch_geometric.utils.scatter's way."""
    return index.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


def scatter(rows, index, size, reduce, include_self=False):
    out = rows.new_zeros(size, *rows.shape[1:])
    return out.scatter_reduce_(
        0, wide(index, rows), rows, reduce, include_self=include_self
    )


def softmax(scores, index, size):
    highest = scatter(scores.detach(), index, size, "amax")
    out = (scores - highest.index_select(0, index)).exp()
    total = scatter(out, index, size, "sum") + 1e-16
    return out / total.index_select(0, index)


def attention(x, edges, batch):
    source, target = edges
    weights = softmax(x[source] * x[target], target, NODES)
    return scatter(weights * x[source], target, NODES, "sum")


def graph_norm(x, edges, batch):
    ones = torch.ones_like(x[:, 0])
    count = x.new_zeros(GRAPHS).scatter_add_(0, batch, ones).clamp(min=1).view(-1, 1)
    mean = scatter(x, batch, GRAPHS, "sum") / count
    out = x - mean.index_select(0, batch)
    variance = scatter(out * out, batch, GRAPHS, "sum") / count
    return out / (variance + 1e-5).sqrt().index_select(0, batch)


def aggregated(reduce):
    return lambda x, edges, batch: scatter(x[edges[0]].sin(), edges[1], NODES, reduce)


def pooled(reduce, include_self=False):
    return lambda x, edges, batch: scatter(x, batch, GRAPHS, reduce, include_self)


REDUCTIONS = ("sum", "mean", "amax", "amin", "prod")
NETWORKS = {
    "attention": attention,
    "graph_norm": graph_norm,
    "degree": lambda x, edges, batch: (
        x + x.new_zeros(NODES).scatter_add_(0, edges[1], x.new_ones(EDGES)).view(-1, 1)
    ),
    "table": lambda x, edges, batch: x[edges.t()].sin() + x[edges.t() - NODES],
    "filled": lambda x, edges, batch: x.scatter(0, wide(edges[0], x[edges[0]]), 2.0),
    "of_graphs": lambda x, edges, batch: x * pooled("sum")(x, edges, batch)[batch],
    **{f"aggregated_{name}": aggregated(name) for name in REDUCTIONS},
    **{f"pooled_{name}": pooled(name) for name in REDUCTIONS},
    "pooled_with_self": pooled("prod", include_self=True),
}


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", NETWORKS)
def test_any_pieces(mesh, name):
    x = torch.randn(NODES, 2, dtype=torch.float64, requires_grad=True)
    edges = torch.randint(NODES, (2, EDGES))
    batch = torch.tensor([0, 0, 0, 0, 2, 2, 2])  # a graph without nodes
    others = partitions(EDGES, mesh.size())
    with shardtensor.fallback_mode("error"):
        for i, sizes in enumerate(partitions(NODES, mesh.size(), repeated=False)):
            check_op(
                NETWORKS[name],
                sharded(x, [Shard(0)], {0: sizes}),
                sharded(edges, [Shard(1)], {1: others[i % len(others)]}),
                sharded(batch, [Shard(0)], {0: sizes}),
                mesh=mesh, second_order=True,
            )  # fmt: skip


LAYOUTS = {
    "both_axes": ([Shard(0), Shard(0)], [Shard(1), Shard(1)]),
    "channels": ([Shard(0), Shard(1)], [Shard(1), Replicate()]),
    "copies": ([Replicate(), Shard(0)], [Replicate(), Shard(1)]),
}


@ranks("2x2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["attention", "graph_norm", "pooled_amax"])
def test_on_a_grid_of_ranks(mesh, name, layout):
    x = torch.randn(NODES, 2, dtype=torch.float64, requires_grad=True)
    nodes, cut = LAYOUTS[layout]
    edges, batch = torch.randint(NODES, (2, EDGES)), torch.arange(NODES) // 3
    rows = [Replicate() if p.is_replicate() or p.is_shard(1) else p for p in nodes]
    check_op(
        NETWORKS[name], sharded(x, nodes), sharded(edges, cut), sharded(batch, rows),
        mesh=mesh, second_order=True,
    )  # fmt: skip


@ranks(2, 3)
@pytest.mark.parametrize(
    "name", ["attention", *(f"aggregated_{name}" for name in REDUCTIONS[:4])]
)
def test_a_step_sends_the_rows_at_the_edges_alone(mesh, name, monkeypatch):
    """On a ring of nodes; no rank gets all nodes, or edges, of the graph."""
    count = 60 * mesh.size()
    monkeypatch.setitem(globals(), "NODES", count)
    ring = torch.arange(count)
    edges = torch.stack([ring.repeat(2), torch.cat([ring, (ring + 1) % count])])
    order = edges[1].argsort(stable=True)
    x = shard(torch.randn(count, 2).requires_grad_(), mesh, [Shard(0)])
    cut = shard(edges[:, order], mesh, [Shard(1)])

    def step():
        shardtensor.reset_comm_stats()
        out = NETWORKS[name](x, cut, None)
        out.backward(torch.ones_like(out))
        return out, shardtensor.comm_stats()

    step()
    out, stats = step()
    assert out._spec == x._spec and x.grad._spec == x._spec
    assert stats.plans == 0
    assert stats.bytes < 60 * x.element_size() * x.size(1)


@ranks(2, 3)
def test_many_rows_that_nothing_is_known_of_are_cut(mesh):
    size = 1 << 17
    index = torch.arange(6) * 1000
    values = shard(torch.ones(6), mesh, [Shard(0)])
    cut = shard(index, mesh, [Shard(0)])
    expected = torch.zeros(size).index_add(0, index, torch.ones(6))
    put = values.new_zeros(size)
    put[cut] = values
    numbers = values.new_zeros(2, size // 2)
    numbers[:, cut] = 1.0
    for out, whole in (
        (values.new_zeros(size).scatter_add_(0, cut, values), expected),
        (put, expected),
        (numbers, expected.chunk(2)[0].expand(2, -1)),
    ):
        assert list(out.placements) == [Shard(out.dim() - 1)]
        assert_close(out, whole)


@ranks(2, 3)
def test_nan_wins_a_maximum_on_all_ranks(mesh):
    x = torch.tensor([1.0, float("nan"), 3.0, 4.0, 5.0])
    batch = torch.zeros(5, dtype=torch.int64)
    for name in ("amax", "amin"):
        assert_close(
            scatter(
                shard(x, mesh, [Shard(0)]), shard(batch, mesh, [Shard(0)]), 1, name
            ),
            scatter(x, batch, 1, name),
        )


def lengths_of(size, runs):
    """Empty runs among them, at both ends, too."""
    starts = torch.randint(size + 1, (runs - 1,)).sort().values
    bounds = torch.cat([torch.tensor([0]), starts, torch.tensor([size])])
    return bounds.diff()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_segment_reduce(mesh, reduce):
    data = torch.randn(EDGES, 2, dtype=torch.float64, requires_grad=True)
    with shardtensor.fallback_mode("error"):
        for i, sizes in enumerate(partitions(EDGES, mesh.size())):
            lengths = lengths_of(EDGES, NODES)
            cut = partitions(NODES, mesh.size(), repeated=False)
            for runs in (lengths, sharded(lengths, [Shard(0)], {0: cut[i % len(cut)]})):
                for initial in (None, 0.5):
                    check_op(
                        lambda data, lengths, initial=initial: torch.segment_reduce(
                            data, reduce, lengths=lengths, initial=initial
                        ),
                        sharded(data, [Shard(0)], {0: sizes}), runs, mesh=mesh,
                    )  # fmt: skip


@ranks(1, 3, "2x2")
def test_segment_reduce_of_each_entry(mesh):
    """The runs of another axis than the first, of each entry before it its own."""
    data = torch.randn(2, EDGES, 3, dtype=torch.float64, requires_grad=True)
    lengths = torch.stack([lengths_of(EDGES, NODES) for _ in range(2)])
    offsets = torch.cat([torch.zeros_like(lengths[:, :1]), lengths.cumsum(1)], 1)
    layouts = [[Shard(dim)] * mesh.ndim for dim in range(3)]
    with shardtensor.fallback_mode("error"):
        for i, reduce in enumerate(["sum", "mean", "max", "min", "prod"]):
            for layout in layouts:
                name = ("lengths", "offsets")[i % 2]
                runs = sharded((lengths, offsets)[i % 2], layouts[i % 2])
                check_op(
                    lambda data, runs, reduce=reduce, name=name: torch.segment_reduce(
                        data, reduce, **{name: runs}, axis=1
                    ),
                    sharded(data, layout), runs, mesh=mesh,
                )  # fmt: skip
    with pytest.raises(RuntimeError, match="Expected all rows of lengths"):
        lengths[0, 0] += 1
        lengths[1, 0] -= 1
        torch.segment_reduce(
            shard(data, mesh, layouts[1]), "sum", lengths=lengths, axis=1
        )


@ranks(2, 3)
def test_segment_reduce_by_offsets_and_what_is_wrong(mesh):
    data, lengths = torch.randn(EDGES), lengths_of(EDGES, NODES)
    offsets = torch.cat([torch.tensor([0]), lengths.cumsum(0)])
    check_op(
        lambda data, offsets: torch.segment_reduce(data, "sum", offsets=offsets),
        sharded(data, [Shard(0)]), sharded(offsets, [Shard(0)]), mesh=mesh,
    )  # fmt: skip
    cut = shard(data, mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="Expected all rows of lengths"):
        torch.segment_reduce(cut, "sum", lengths=lengths + 1)
    lengths[0], lengths[1] = -1, lengths[1] + lengths[0] + 1
    with pytest.raises(RuntimeError, match="negative value"):
        torch.segment_reduce(cut, "sum", lengths=lengths)


@ranks(2, 3)
def test_segment_reduce_may_leave_the_last_rows_out(mesh):
    data = torch.randn(EDGES, 2, dtype=torch.float64, requires_grad=True)
    lengths = lengths_of(EDGES - 3, NODES)
    for reduce in ("sum", "max"):
        for sizes in partitions(EDGES, mesh.size()):
            for runs in (lengths, sharded(lengths, [Shard(0)])):
                check_op(
                    lambda data, lengths, reduce=reduce: torch.segment_reduce(
                        data, reduce, lengths=lengths, unsafe=True, initial=1
                    ),
                    sharded(data, [Shard(0)], {0: sizes}), runs, mesh=mesh,
                )  # fmt: skip
    cut = shard(data.detach(), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=f"at most the {EDGES} rows of data, got"):
        torch.segment_reduce(cut, "sum", lengths=lengths + 1, unsafe=True)


@ranks("2x2")
def test_values_that_are_broadcast_say_nothing_of_a_dim(mesh):
    index, values = torch.randperm(EDGES), torch.randn(EDGES, 1)

    def put(index, values):
        made = torch.zeros(1 << 13, 16)
        made[index] = values
        return made

    expected = put(index, values)
    with shardtensor.new_tensors_on(mesh):
        made = put(
            shard(index, mesh, [Shard(0), Replicate()]),
            shard(values, mesh, [Shard(0), Shard(1)], {1: [1, 0]}),
        )
    assert_close(made, expected)


@ranks(2, "2x2")
def test_one_row_named_by_an_index_without_dims(mesh):
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    value = torch.randn(3, dtype=torch.float64, requires_grad=True)
    check_op(
        lambda x, index, value: x.index_put((index,), value, accumulate=True),
        sharded(x, [Shard(0)] * mesh.ndim),
        sharded(torch.tensor(4), [Replicate()] * mesh.ndim),
        sharded(value, [Replicate()] * mesh.ndim),
        mesh=mesh, second_order=True,
    )  # fmt: skip
