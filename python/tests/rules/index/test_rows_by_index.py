"""Rows named by an index that is cut as the rows are: the edges of a graph."""

import threading

import pytest
import torch
from oracle import WHOLE
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor

NODES, EDGES = 6, 9


def graph(channels=3):
    x = torch.randn(NODES, channels, dtype=torch.float64, requires_grad=True)
    return x, torch.randint(NODES, (2, EDGES))


def wide(index, like):
    """As graph libraries make an index as wide as what it names rows of."""
    return index.view(-1, 1).expand(-1, like.size(1))


def messages(x, edges):
    source, target = edges
    return (x[source] - x.index_select(0, target)).sin()


def softmax(x, edges):
    source, target = edges
    scores = (x[source] * x[target]).sum(-1)
    highest = x.new_zeros(NODES).scatter_reduce(
        0, target, scores.detach(), "amax", include_self=False
    )
    weights = (scores - highest[target]).exp()
    total = x.new_zeros(NODES).index_add(0, target, weights)
    return weights / total[target]


def reduced(name, include_self):
    def reduce(x, edges):
        rows = messages(x, edges)
        return torch.ones_like(x).scatter_reduce(
            0, wide(edges[1], rows), rows, name, include_self=include_self
        )

    return reduce


def written(x, edges):
    rows = messages(x, edges)
    out = torch.zeros_like(x)
    out.index_add_(0, edges[1], rows, alpha=2)
    out.scatter_add_(0, wide(edges[0], rows), rows)
    out.scatter_reduce_(0, wide(edges[0], rows), rows, "amin")
    return out


OPERATORS = {
    "messages": messages,
    "negative": lambda x, edges: x[edges[0] - NODES],
    "table": lambda x, edges: x[edges.t()],
    "columns": lambda x, edges: x.t()[:, edges[0]],
    "gather": lambda x, edges: x.gather(0, wide(edges[0], x)),
    "index_add": lambda x, edges: x.index_add(0, edges[1], messages(x, edges)),
    "scatter_add": lambda x, edges: torch.zeros_like(x).scatter_add(
        0, wide(edges[1], x), messages(x, edges)
    ),
    "index_reduce": lambda x, edges: x.index_reduce(
        0, edges[1], messages(x, edges), "mean", include_self=False
    ),
    "softmax": softmax,
    "written": written,
    **{
        f"{name}_{include}": reduced(name, include)
        for name in ("sum", "mean", "amax", "amin", "prod")
        for include in (True, False)
    },
}


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", OPERATORS)
def test_rows_and_edges_in_any_pieces(mesh, name):
    x, edges = graph()
    cuts = partitions(NODES, mesh.size())
    others = partitions(EDGES, mesh.size())
    with shardtensor.fallback_mode("error"):
        for i, sizes in enumerate(cuts):
            check_op(
                OPERATORS[name],
                sharded(x, [Shard(0)], {0: sizes}),
                sharded(edges, [Shard(1)], {1: others[i % len(others)]}),
                mesh=mesh, second_order=True,
            )  # fmt: skip


@ranks(2, 3)
def test_truth_values_are_reduced_into_rows(mesh):
    x, edges = graph()
    bits = x.detach() > 0
    for sizes in partitions(NODES, mesh.size()):
        cut = shard(bits, mesh, [Shard(0)], {0: sizes})
        index = shard(edges, mesh, [Shard(1)])
        for name in ("amax", "amin", "prod", "sum"):
            for include in (True, False):

                def reduce(x, edges, name=name, include=include):
                    rows = x[edges[0]]
                    return torch.zeros_like(x).scatter_reduce(
                        0, wide(edges[1], rows), rows, name, include_self=include
                    )

                assert_close(reduce(cut, index), reduce(bits, edges))


@ranks(2, 3)
def test_means_of_complex_rows(mesh):
    index = torch.tensor([0, 2, 2, 5])
    x, source = torch.randn(2, 6, 4, dtype=torch.complex64)
    check_op(
        lambda x, index: x.index_reduce(0, index, source[:4].to(x.device), "mean"),
        sharded(x, [Shard(0)]), sharded(index, [Shard(0)]), mesh=mesh,
    )  # fmt: skip


@ranks(2)
def test_index_reduce_has_no_sum(mesh):
    x, index = torch.randn(6, 4), torch.tensor([0, 2, 2, 5])
    cuts = shard(x, mesh, [Shard(0)]), shard(index, mesh, [Shard(0)])
    for rows, of in ((x, index), cuts):
        with pytest.raises(RuntimeError, match="one of prod, mean, amax or amin"):
            rows.index_reduce(0, of, x[:4], "sum")


LAYOUTS = {
    "both_axes": ([Shard(0), Shard(0)], [Shard(1), Shard(1)]),
    "channels": ([Shard(0), Shard(1)], [Shard(1), Replicate()]),
    "copies": ([Replicate(), Shard(0)], [Replicate(), Shard(1)]),
    "copies_of_rows": ([Replicate(), Shard(0)], [Shard(1), Shard(1)]),
}


@ranks("2x2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["messages", "scatter_add", "softmax", "amax_False"])
def test_on_a_grid_of_ranks(mesh, name, layout):
    x, edges = graph()
    nodes, cut = LAYOUTS[layout]
    check_op(
        OPERATORS[name], sharded(x, nodes), sharded(edges, cut),
        mesh=mesh, second_order=True,
    )  # fmt: skip


@ranks(2, 3)
def test_sums_into_rows_that_all_ranks_have(mesh):
    x, edges = graph()
    rows = torch.randn(EDGES, 3, dtype=torch.float64, requires_grad=True)
    with shardtensor.fallback_mode("error"):
        for add in (
            lambda x, i, rows: x.index_add(0, i, rows, alpha=0.5),
            lambda x, i, rows: x.scatter_add(0, wide(i, rows), rows),
        ):
            check_op(
                add, sharded(x, [Replicate()]), sharded(edges[0], [Shard(0)]),
                sharded(rows, [Shard(0)]), mesh=mesh, second_order=True,
            )  # fmt: skip


ORDERS = {
    "rows": lambda x, order: x[order].sin(),
    "columns": lambda x, order: x.t()[:, order - NODES].sin(),
    "select": lambda x, order: x.index_select(-2, order).sin(),
    "twice": lambda x, order: x[order.repeat(2, 1)].sin(),
    "of_numbers": lambda x, order: x[:, 0][order].sin(),
    "select_of_numbers": lambda x, order: x[:, 0].index_select(0, order.int()),
    "mask": lambda x, order: (x > 0)[order],
}


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("name", ORDERS)
def test_rows_in_an_order_that_all_ranks_have(mesh, name):
    """Whole, or cut along another mesh axis: no rank gets all rows."""
    x, _ = graph()
    order = torch.randperm(NODES)
    axes = [Replicate()] * mesh.ndim
    orders = [order, sharded(order, axes)]
    layouts = [([Shard(0)], {0: sizes}) for sizes in partitions(NODES, mesh.size())]
    if mesh.ndim == 2:
        orders.append(sharded(order, [Replicate(), Shard(0)]))
        layouts = [([Shard(0), other], None) for other in (Shard(0), *axes[:1])]
    for layout, sizes in layouts:
        for given in orders:
            with shardtensor.fallback_mode("error"):
                found = check_op(
                    ORDERS[name], sharded(x, layout, sizes), given, mesh=mesh,
                    second_order=True,
                )  # fmt: skip
            if name in ("rows", "select"):
                assert found._spec == shard(x, mesh, layout)._spec


@ranks(1, 2, 3, 4, "2x2")
@pytest.mark.parametrize("name", ["rows", "select"])
def test_a_whole_index_that_names_some_rows_cuts_them(mesh, name):
    """One exchange each way, for each rank knows what all need."""
    x, _ = graph()
    index = torch.arange(1, NODES).flip(0)
    pieces = partitions(NODES, mesh.size(), repeated=False)
    layouts = [([Shard(0)], {0: sizes}) for sizes in pieces]
    if mesh.ndim == 2:
        layouts = [([Shard(0), Replicate()], None), ([Shard(0), Shard(0)], None)]

    def messages(call, *given):
        shardtensor.reset_comm_stats()
        result = call(*given)
        stats = shardtensor.comm_stats()
        assert stats.all_reduces == 0 and stats.exchanges <= 1
        return result, stats.plans

    for placements, sizes in layouts:
        part = shard(x.detach(), mesh, placements, sizes).requires_grad_()
        for again in (False, True):
            found, plans = messages(ORDERS[name], part, index + 0)
            assert found._spec == shard(x[index], mesh, placements)._spec
            assert not (again and plans)
            assert messages(found.backward, torch.ones_like(found))[1] == 0
        for given in (index, index.view(-1, 1) - NODES)[: 2 if name == "rows" else 1]:
            with shardtensor.fallback_mode("error"):
                check_op(
                    ORDERS[name], sharded(x, placements, sizes), given, mesh=mesh,
                    second_order=True,
                )  # fmt: skip
        with pytest.raises(IndexError, match=f"index {NODES} is out of bounds for"):
            ORDERS[name](part, torch.full((NODES,), NODES))
    one = shard(x, mesh, [Shard(0)] * mesh.ndim)[index[:1]]
    assert mesh.size() == 1 or one.placements == (Partial(),) * mesh.ndim


@ranks(2, 3)
def test_a_static_graph_is_planned_once(mesh):
    """From the second step on a layer sends rows alone, once each way."""
    nodes = 8 * mesh.size()
    x = torch.randn(nodes, 4)
    ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
    rows = shard(x, mesh, [Shard(0)])
    target = shard(ring[1], mesh, [Shard(0)])

    def sent(layer):
        shardtensor.reset_comm_stats()
        layer()
        stats = shardtensor.comm_stats()
        return stats.exchanges, stats.all_reduces, stats.messages, stats.bytes

    def step():
        return torch.zeros_like(rows).index_add(0, target, rows[target].sin())

    first, second, third = sent(step), sent(step), sent(step)
    assert first[1] > 0  # who names what, and within which bounds
    # One row goes to the next piece, one message there and one back.
    assert second == third == (2, 0, 2, 2 * 4 * x.element_size())
    assert_close(step(), torch.zeros_like(x).index_add(0, ring[1], x[ring[1]].sin()))


def as_graph_libraries_write_it(x, edge_index):
    """Rows and widened rows of edge_index, made anew where they are needed."""
    rows = x[edge_index[0]] - x.index_select(0, edge_index[1])
    index = edge_index.select(0, 1).view(-1).unsqueeze(-1).expand_as(rows)
    return x + torch.zeros_like(x).scatter_add_(0, index, rows.sin())


@ranks(1, 2, 3)
def test_rows_of_an_index_made_anew_find_their_plans(mesh):
    x, edges = graph()
    edges = edges.repeat(1, 5)  # a graph that was not met before
    rows, cut = shard(x, mesh, [Shard(0)]), shard(edges, mesh, [Shard(1)])
    rows.requires_grad_()

    def plans(layers):
        shardtensor.reset_comm_stats()
        out = rows
        for _ in range(layers):
            out = as_graph_libraries_write_it(out, cut)
        out.sum().backward()
        return shardtensor.comm_stats().plans

    assert plans(layers=1) == 2  # sources and targets
    assert plans(layers=3) == 0
    cut.add_(1).remainder_(NODES)
    assert plans(layers=2) == 2


def plans_of(step, *given):
    shardtensor.reset_comm_stats()
    found = step(*given)
    return found, shardtensor.comm_stats().plans


@ranks(1, 2, 3, 4)
def test_an_index_made_anew_of_the_same_values_finds_its_plan(mesh):
    """And another one does not, on whichever rank it differs."""
    x, edges = graph()
    loops = torch.arange(NODES).repeat(2, 2)

    def step(x, edges):
        joined = torch.cat([edges, loops], 1)
        return as_graph_libraries_write_it(
            as_graph_libraries_write_it(x, joined), joined
        )

    for sizes in partitions(EDGES, mesh.size()):
        x = x.detach().requires_grad_()
        rows = shard(x.detach(), mesh, [Shard(0)]).requires_grad_()
        cut = shard(edges, mesh, [Shard(1)], {1: sizes})
        for place in range(0, EDGES, 1 if WHOLE else 3):
            cut[0, place], edges[0, place] = [(edges[0, place] + 1) % NODES] * 2
            for is_new in (True, False):
                found, plans = plans_of(step, rows, cut)
                assert (plans > 0) == is_new
                assert_close(found, step(x, edges))
            found.sum().backward()
            assert plans_of(step, rows, cut)[1] == 0
        step(x, edges).sum().backward()


@ranks(2, "2x2")
def test_plans_of_indices_that_are_gone_are_few(mesh):
    """The last 32, and of those of one size eight."""
    layout = [Shard(0)] * mesh.ndim
    x = shard(torch.randn(NODES, 2), mesh, layout)
    alike = [torch.randint(NODES, (60,)) for _ in range(9)]
    others = [torch.randint(NODES, (61 + i,)) for i in range(33)]

    def plans(indices):
        return sum(plans_of(lambda i: x[shard(i, mesh, layout)], i)[1] for i in indices)

    # What earlier tests left, which may be larger, goes.
    plans([torch.zeros(1 + i, dtype=torch.int64) for i in range(32)])
    assert plans(alike[:8]) == 8
    assert plans(alike[:8]) == 0
    assert plans(alike[8:]) == 1
    assert plans(alike[1:]) == 0
    assert plans(alike[:1]) == 1
    assert plans(others[:1]) == 1
    large = torch.zeros(1000, dtype=torch.int64)
    assert plans([large, *others[:31]]) == 31
    assert plans([*others[:31], large]) == 0
    assert plans(others[31:]) == 2
    assert plans([*others[2:], large]) == 0
    assert plans(others[:1]) == 1


@ranks(2, 3)
def test_a_whole_index_of_a_merged_dim_is_planned_once(mesh):
    x = torch.randn(3, 8, 2)
    order = torch.arange(23, -1, -1)
    for sizes in partitions(8, mesh.size(), repeated=False):
        merged = shard(x, mesh, [Shard(1)], {1: sizes}).flatten(0, 1)
        shardtensor.reset_comm_stats()
        assert_close(merged[order], x.flatten(0, 1)[order])
        stats = shardtensor.comm_stats()
        assert (stats.plans, stats.all_reduces) == (1, 0), sizes
        assert stats.exchanges <= 1  # a rank without rows sends nothing


@ranks(2, 3)
def test_an_index_made_anew_costs_one_reduction(mesh):
    x, edges = graph()
    edges = edges.repeat(1, 7)
    rows, cut = shard(x, mesh, [Shard(0)]), shard(edges, mesh, [Shard(1)])
    stats = []
    for _ in range(3):
        index = cut[0] + 0
        shardtensor.reset_comm_stats()
        rows[index]
        stats.append(shardtensor.comm_stats())
    assert stats[1].all_reduces == stats[2].all_reduces == 1
    assert stats[1].exchanges == 1 < stats[0].exchanges


@ranks(2)
def test_a_backward_in_another_thread_finds_the_plans_of_forward(mesh):
    x, edges = graph()
    rows, cut = shard(x, mesh, [Shard(0)]), shard(edges, mesh, [Shard(1)])
    loss = as_graph_libraries_write_it(rows.requires_grad_(), cut).sum()
    shardtensor.reset_comm_stats()
    backward = threading.Thread(target=loss.backward)
    backward.start()
    backward.join()
    assert rows.grad is not None
    assert shardtensor.comm_stats().plans == 0


@ranks(1, 2, 3, 4)
def test_each_part_of_an_index_has_its_own_plan(mesh):
    """Rows, strides and pieces that are empty on some ranks, also once written."""
    x, _ = graph()
    edges = torch.tensor([[0, 5, 5, 1, 1], [5, 0, 2, 2, 3], [1, 1, 0, 4, 4]])
    rows = shard(x, mesh, [Shard(0)])
    for sizes in partitions(5, mesh.size()):
        cut, whole = shard(edges, mesh, [Shard(1)], {1: sizes}), edges.clone()
        for _ in range(3):
            for part in (
                lambda e: e[0], lambda e: e[2], lambda e: e.t()[:, 1],
                lambda e: e[1:][0], lambda e: e[0, :2], lambda e: e[0, 2:4],
                lambda e: e[2, ::2], lambda e: e.flip(1)[0], lambda e: e[:, 3],
            ):  # fmt: skip
                assert_close(rows[part(cut)], x[part(whole)])
            for index in (cut, whole):
                index[1:].add_(2)
                index[0, 1:].mul_(3)
                index.remainder_(NODES)


@ranks(1, 2, 3)
def test_an_index_that_was_written_is_another(mesh):
    x, edges = graph()
    rows, cut = shard(x.detach(), mesh, [Shard(0)]), shard(edges, mesh, [Shard(1)])
    held = cut[0]
    for _ in range(3):
        for index in (held, cut[0]):
            assert_close(rows[index], x[edges[0]])
            assert_close(rows.index_select(0, index), x[edges[0]])
            assert_close(
                rows.gather(0, wide(index, rows)), x.gather(0, wide(edges[0], x))
            )
        edges.add_(2).remainder_(NODES)
        cut.add_(2).remainder_(NODES)
    cut.to_local().zero_()
    assert_close(rows[held], x[torch.zeros_like(edges[0])])


@ranks(1, 2, 3, "2x2")
def test_an_index_that_was_written_without_a_version_is_another(mesh):
    x, edges = graph()
    placements = [Shard(1)] * mesh.ndim
    rows = shard(x.detach(), mesh, [Shard(0)] * mesh.ndim)
    for part in (lambda e: e, lambda e: e[0], lambda e: e.detach()):
        cut, whole = shard(edges, mesh, placements), edges.clone()
        for _ in range(3):
            assert_close(rows[cut[0]], x[whole[0]])
            for index in (cut, whole):
                part(index).data.add_(2).remainder_(NODES)
        other, cut.data = cut, shard(edges, mesh, placements)
        assert_close(rows[other[0]], x[edges[0]])


@ranks(2, 3, 4)
def test_parts_of_an_index_are_other_ones_on_all_ranks(mesh):
    """Also on those where both parts are empty."""
    x, edges = graph()
    rows, cut = shard(x, mesh, [Shard(0)]), shard(edges[0], mesh, [Shard(0)])
    for begin in (0, 1, 0, 1, EDGES - 2, EDGES - 1):
        part = slice(begin, begin + 2)
        assert_close(rows[cut[part]], x[edges[0, part]])


@ranks(2, 3)
def test_an_index_out_of_bounds_is_the_same_error_everywhere(mesh):
    x, edges = graph()
    edges[0, -1] = NODES
    rows, cut = shard(x, mesh, [Shard(0)]), shard(edges, mesh, [Shard(1)])
    for call in (
        lambda: rows[cut[0]],
        lambda: rows.index_select(0, cut[0]),
        lambda: rows.gather(0, wide(cut[0], rows)),
        lambda: rows.index_add(0, cut[0], rows[cut[1]]),
    ):
        with pytest.raises(IndexError, match=f"index {NODES} is out of bounds"):
            call()
