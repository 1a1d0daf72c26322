"""Rows that are named by indices of cut dims, and written or added to."""

import pytest
import torch
from layouts import placements_of
from oracle import WHOLE, every
from ranks import check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

import shardtensor

ROWS, COLUMNS, ENTRIES = 6, 5, 14


def table():
    return torch.randn(ROWS, COLUMNS, 2, dtype=torch.float64, requires_grad=True)


def each_once(entries=ENTRIES):
    """Places in the table, none of them twice."""
    places = torch.randperm(ROWS * COLUMNS)[:entries]
    return places // COLUMNS, places % COLUMNS - COLUMNS * (places % 2)


def rows_once():
    rest = torch.zeros(ENTRIES - ROWS, dtype=torch.int64)
    return torch.cat([torch.randperm(ROWS), rest]), torch.arange(ENTRIES)


def often():
    return torch.randint(-ROWS, ROWS, (ENTRIES,)), torch.randint(COLUMNS, (ENTRIES,))


def assigned(x, i, j, values):
    y = x.sin()
    y[i, j] = values.sin()
    return y


def assigned_behind(x, i, j, values):
    y = x.permute(2, 1, 0).sin()
    y[:, j, i] = values.t().sin()
    return y


def assigned_apart(x, i, j, values):
    y = x.transpose(1, 2).sin()
    y[i, :, j] = values
    return y * values.sum()


def assigned_as_a_table(x, i, j, values):
    return x.sin().index_put((i.view(2, -1), j.view(2, -1)), values.view(2, -1, 2))


def whole_rows(x, i, j, values):
    y = x.sin()
    y[i[:ROWS]] = values[:ROWS, None]
    return y


def added(x, i, j, values):
    return x.sin().index_put_((i, j), values.sin(), accumulate=True)


def added_broadcast(x, i, j, values):
    return x.sin().index_put((i.view(2, -1), j.view(-1)[:7]), values[:7], True)


def numbers(x, i, j, values):
    y = x.sin() * values.sum()
    y[i, j] = 2.0
    return y


def numbers_of_the_host(x, i, j, values):
    """What Python makes of a number on GPUs."""
    number = torch.tensor(2.0, dtype=x.dtype, device="cpu")
    return (x.sin() * values.sum()).index_put((i, j), number)


WRITES = {
    "assigned": (assigned, each_once),
    "behind": (assigned_behind, each_once),
    "apart": (assigned_apart, each_once),
    "table": (assigned_as_a_table, each_once),
    "whole_rows": (whole_rows, rows_once),
    "numbers": (numbers, often),
    "numbers_of_the_host": (numbers_of_the_host, often),
    "added": (added, often),
    "added_broadcast": (added_broadcast, often),
}


def layouts_of(mesh):
    """Of the table, and of indices and values."""
    if mesh.ndim == 2:
        for a, b in ((0, 0), (1, 1), (0, 1), (1, 0), (2, 0)):
            for entries in ([Shard(0)] * 2, [Shard(0), Replicate()]):
                yield [Shard(a), Shard(b)], None, entries, None
                yield [Replicate(), Shard(b)], None, entries, None
        return
    others = partitions(ENTRIES, mesh.size())
    for dim, extent in ((0, ROWS), (1, COLUMNS)):
        for i, sizes in enumerate(partitions(extent, mesh.size())):
            yield [Shard(dim)], {dim: sizes}, [Shard(0)], {0: others[i % len(others)]}


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("name", WRITES)
def test_any_pieces(mesh, name):
    write, places = WRITES[name]
    values = torch.randn(ENTRIES, 2, dtype=torch.float64, requires_grad=True)
    i, j = places()
    whole = [[Replicate()] * mesh.ndim, None]
    with shardtensor.fallback_mode("error"):
        for number, (layout, sizes, *cut) in enumerate(every(2, layouts_of(mesh))):
            ways = (cut, cut), (cut, whole), (whole, cut)
            for index, given in ways if WHOLE else ways[number % 3 :][:1]:
                check_op(
                    write, sharded(table(), layout, sizes), sharded(i, *index), j,
                    sharded(values, *given), mesh=mesh, second_order=True,
                )  # fmt: skip


@ranks(2, 3)
def test_values_for_others_alone_are_sent(mesh):
    rows = 64 * mesh.size()
    x, values = torch.randn(rows, 8), torch.randn(rows, 8)
    i, j = torch.arange(rows).view(-1, 1), torch.arange(8)
    i[0] = rows - 1
    parts = [shard(t, mesh, [Shard(0)]) for t in (x, i, values)]
    for accumulate in (False, True):
        for index in ((parts[1], j), (parts[1].squeeze(1),)):
            shardtensor.reset_comm_stats()
            out = parts[0].index_put(index, parts[2], accumulate)
            assert shardtensor.comm_stats().bytes < x[:16].nbytes
            assert out._spec == parts[0]._spec


@ranks(2, 3)
def test_the_last_value_of_an_element_stays(mesh):
    """As on one device that writes in order."""
    if mesh.device_type == "cuda":
        pytest.skip("CUDA writes in any order")
    i, j = often()
    values = torch.arange(ENTRIES).double()
    x = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    expected = x.clone()
    for row, column, value in zip(i, j, values):
        expected[row, column] = value
    for sizes in partitions(ROWS, mesh.size()):
        for shape, dim in (((-1,), 0), ((2, -1), 1), ((2, -1), 0)):
            out = shard(x, mesh, [Shard(0)], {0: sizes})
            cut = [shard(t.view(shape), mesh, [Shard(dim)]) for t in (i, values)]
            out[cut[0], j.view(shape)] = cut[1]
            assert out.full_tensor().equal(expected)


@ranks(2, 3, "2x2")
def test_wrong_places_and_values_are_the_same_error_everywhere(mesh):
    x, values = table().detach(), torch.zeros(ENTRIES, 2, dtype=torch.float64)
    i, j = each_once()
    far = i.clone()
    far[-1] = ROWS
    layout = placements_of(mesh, 0)
    x, i, far, values = (shard(t, mesh, layout) for t in (x, i, far, values))
    with pytest.raises(IndexError, match=f"index {ROWS} is out of bounds for dim"):
        x[far, j] = values
    with pytest.raises(IndexError, match=f"index {-1 - ROWS} is out of bounds for dim"):
        x.index_put_((-1 - far, j), values, accumulate=True)
    with pytest.raises(RuntimeError, match="expected values of dtype"):
        x[i, j] = values.float()
    told = rf"shape \[{ENTRIES}, 3\] .* result of shape \[{ENTRIES}, 2\]"
    with pytest.raises(RuntimeError, match=told):
        x[i, j] = values[:, :1].repeat(1, 3)


@ranks(2, 3)
@pytest.mark.parametrize("extents", [(4, 2), (5, 3), (4, 3)])
def test_values_of_another_shape_are_the_same_error_everywhere(mesh, extents):
    sizes = [4, 1, *[0] * (mesh.size() - 2)]  # extents fit the first rank's rows
    x = shard(torch.zeros(5, 3), mesh, [Shard(0)], {0: sizes})
    told = rf"shape \[{extents[0]}, {extents[1]}\] .* result of shape \[5, 2\]"
    cut = shard(torch.ones(extents), mesh, [Shard(0)])
    for values in torch.ones(extents), cut:
        for accumulate in False, True:
            with pytest.raises(RuntimeError, match=told):
                index = [torch.arange(5)[:, None], torch.tensor([0, 2])]
                x.index_put_(index, values, accumulate)
        with pytest.raises(RuntimeError, match=told):
            x[:, torch.tensor([0, 2])] = values
    assert not x.full_tensor().any()
