"""gather, scatter and their kin along a cut dim: rows travel as those of x[index]."""

import pytest
import torch
from layouts import placements_of
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

import shardtensor

BATCH, POINTS, CENTERS, NEAR, CHANNELS = 2, 7, 5, 2, 3


def wide(index, channels=CHANNELS):
    return index.unsqueeze(-1).expand(*index.shape, channels)


def cloud():
    size = (BATCH, POINTS, CHANNELS)
    return torch.randn(size, dtype=torch.float64, requires_grad=True)


def groups():
    return torch.randint(POINTS, (BATCH, CENTERS, NEAR))


def flat_groups(x, index):
    return x.gather(1, wide(index.flatten(1))).view(*index.shape, -1)


def neighbours(x, index):
    """As PyTorch3D's knn_gather has it."""
    return x.unsqueeze(2).expand(-1, -1, NEAR, -1).gather(1, wide(index))


def grouped(x, index):
    """Channels first, as grouping_operation() is written without its kernel."""
    rows = x.transpose(1, 2).unsqueeze(2).expand(-1, -1, CENTERS, -1)
    return rows.gather(3, index.unsqueeze(1).expand(-1, CHANNELS, -1, -1))


READS = {
    "centers": (lambda x, i: x.gather(1, wide(i[..., 0])).sin(), 1),
    "two_channels": (lambda x, i: x.gather(-2, wide(i[..., 0], 2)).sin(), 1),
    "flat_groups": (lambda x, i: flat_groups(x, i).sin(), 1),
    "neighbours": (lambda x, i: neighbours(x, i).sin(), 1),
    "grouped": (lambda x, i: grouped(x, i).sin(), 2),
    "first": (lambda x, i: x[0].gather(0, wide(i[0, :, 0])).sin(), 0),
    "alike": (lambda x, i: x.gather(1, i[:1, :, :1].expand(2, -1, 3)).sin(), 1),
    "elements": (lambda x, i: x[..., 0].gather(1, i[..., 1]).sin(), 1),
    "dense": (lambda x, i: x.gather(1, torch.cat([i, i[..., :1]], -1)).sin(), 1),
    "along": (lambda x, i: torch.take_along_dim(x, i[..., :1] - POINTS, 1).sin(), 1),
    "along_all": (lambda x, i: torch.take_along_dim(x[0, :, 0], i[0, :, 0] - 1, 0), 0),
}  # fmt: skip


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", READS)
def test_rows_that_are_gathered(mesh, name):
    """Whatever cuts them; they lie as a cut index does."""
    read, dim = READS[name]
    x, index = cloud(), groups()
    others = partitions(CENTERS, mesh.size(), repeated=False)
    with shardtensor.fallback_mode("error"):
        for i, sizes in enumerate(partitions(POINTS, mesh.size())):
            cut = {1: others[i % len(others)]}
            for given in (sharded(index, [Shard(1)], cut), index):
                found = check_op(
                    read, sharded(x, [Shard(1)], {1: sizes}), given,
                    mesh=mesh, second_order=True,
                )  # fmt: skip
                if given is not index:
                    assert found.placements == (Shard(dim),)


@ranks("2x2")
def test_gathered_on_a_grid_of_ranks(mesh):
    x, index = cloud(), groups()
    layouts = [placements_of(mesh, a, b) for a in (0, 1) for b in (0, 1)]
    with shardtensor.fallback_mode("error"):
        for layout in (*layouts, [Replicate(), Shard(1)], [Shard(1), Shard(2)]):
            rows = [p if p.is_replicate() or p.dim < 2 else Replicate() for p in layout]
            for given in (sharded(index, rows), index):
                for read in (flat_groups, neighbours):
                    check_op(
                        lambda x, i, read=read: read(x, i).sin(), sharded(x, layout),
                        given, mesh=mesh, second_order=True,
                    )  # fmt: skip


@ranks(2, 3)
def test_rows_that_are_gathered_cost_what_those_of_x_index_do(mesh):
    points, centers, near = 60 * mesh.size(), 4 * mesh.size(), 3
    x = shard(torch.randn(2, points, 8), mesh, [Shard(1)])
    index = shard(torch.randint(points, (2, centers, near)), mesh, [Shard(1)])
    batch = torch.arange(2).view(-1, 1, 1)

    def sent(read):
        for _ in range(2):
            shardtensor.reset_comm_stats()
            found = read()
            stats = shardtensor.comm_stats()
        return stats.bytes, stats.messages, stats.plans, found.placements

    expected = sent(lambda: x[batch, index])
    assert expected[2:] == (0, (Shard(1),))
    assert sent(lambda: x.gather(1, wide(index.flatten(1), 8))) <= expected
    assert (
        sent(lambda: x.unsqueeze(2).expand(-1, -1, near, -1).gather(1, wide(index, 8)))
        == expected
    )
    expected = sent(lambda: x[batch[..., 0], index[..., 0]])
    assert sent(lambda: x.gather(1, wide(index[..., 0], 8))) == expected
    bounds = 2 * index.element_size()  # of what it counts from the front
    found = sent(lambda: torch.take_along_dim(x, index[..., :1], 1))
    assert found == (expected[0] + bounds, *expected[1:])


WRITES = {
    "index_copy": lambda x, i, v: x.sin().index_copy(1, i, v.cos()),
    "index_fill": lambda x, i, v: x.sin().index_fill(1, i - POINTS, 2.0) + v.sum(),
    "index_fill_tensor": lambda x, i, v: x.sin().index_fill(1, i, v.detach().sum()),
    "index_add": lambda x, i, v: x.sin().index_add(1, i, v.cos(), alpha=0.5),
    "index_reduce": lambda x, i, v: x.sin().index_reduce(1, i, v.cos(), "amax"),
    "scatter": lambda x, i, v: x.sin().scatter(1, i.view(1, -1, 1).expand_as(v), v),
    "scatter_value": lambda x, i, v: (
        x.sin().scatter(1, i.view(1, -1, 1).expand_as(v), 2.0) + v.sum()
    ),
    "scatter_add": lambda x, i, v: (
        x.sin().scatter_add(1, i.view(1, -1, 1).expand_as(v), v.cos())
    ),
    "scatter_reduce": lambda x, i, v: (
        x.sin().scatter_reduce(1, i.view(1, -1, 1).expand_as(v), v.cos(), "amin")
    ),
    "in_place": lambda x, i, v: (
        x.sin().index_copy_(1, i, v.cos()).index_fill_(1, i[:2], 3.0)
        .index_add_(1, i, v)
        .scatter_(1, i[:3].view(1, -1, 1).expand(2, -1, 3), v[:, :3])
        .scatter_add_(1, i.view(1, -1, 1).expand_as(v), v)
    ),
}  # fmt: skip


def of_batches(write):
    """An index that differs between batches."""

    def call(x, i, v):
        other = (i + torch.arange(BATCH).view(-1, 1)) % POINTS
        return write(x, wide(other), v)

    return call


WRITES |= {
    "scatter_batches": of_batches(lambda x, i, v: x.sin().scatter(1, i, v.cos())),
    "scatter_value_batches": of_batches(
        lambda x, i, v: x.sin().scatter(1, i, 2.0) + v.sum()
    ),
    "scatter_add_batches": of_batches(
        lambda x, i, v: x.sin().scatter_add(1, i, v.cos())
    ),
    "batches_in_place": of_batches(
        lambda x, i, v: x.sin().scatter_(1, i, v.cos()).scatter_add_(1, i, v)
        .scatter_(1, i[:, :2], v[:, :2])
    ),
}  # fmt: skip


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", WRITES)
def test_rows_that_are_written(mesh, name):
    """What is written into stays as it lies."""
    x, index = cloud(), torch.randperm(POINTS)[:CENTERS]
    values = torch.randn(BATCH, CENTERS, CHANNELS, dtype=x.dtype, requires_grad=True)
    others = partitions(CENTERS, mesh.size(), repeated=False)
    twice = name not in ("index_reduce", "scatter_reduce")
    with shardtensor.fallback_mode("error"):
        for i, sizes in enumerate(partitions(POINTS, mesh.size())):
            cut = others[i % len(others)]
            for given in (sharded(index, [Shard(0)], {0: cut}), index):
                for written in (sharded(values, [Shard(1)], {1: cut}), values):
                    found = check_op(
                        WRITES[name], sharded(x, [Shard(1)], {1: sizes}), given,
                        written, mesh=mesh, second_order=twice,
                    )  # fmt: skip
                    assert found.placements == (Shard(1),)


@ranks("2x2")
@pytest.mark.parametrize("name", WRITES)
def test_written_on_a_grid_of_ranks(mesh, name):
    x, index = cloud(), torch.randperm(POINTS)[:CENTERS]
    values = torch.randn(BATCH, CENTERS, CHANNELS, dtype=x.dtype, requires_grad=True)
    layouts = [placements_of(mesh, a, b) for a in (0, 1, 2) for b in (0, 1)]
    for layout in (*layouts, [Replicate(), Shard(1)]):
        rows = [Shard(0) if p.is_shard(1) else Replicate() for p in layout]
        for given in (sharded(index, rows), index):
            check_op(
                WRITES[name], sharded(x, layout), given, sharded(values, layout),
                mesh=mesh,
            )  # fmt: skip


@ranks(2, 3)
def test_only_rows_that_are_written_travel(mesh):
    """With an index that all ranks have, or one cut as the values."""
    points, count, channels = 60 * mesh.size(), 4 * mesh.size(), 8
    x = shard(torch.randn(points, channels), mesh, [Shard(0)])
    values = shard(torch.randn(count, channels), mesh, [Shard(0)])
    whole = torch.randperm(points)[:count]
    cut = shard(whole, mesh, [Shard(0)])
    for index in (whole, cut):
        rows = wide(index, channels)
        for name, write in {
            "index_copy": lambda x, index, rows: x.index_copy(0, index, values),
            "index_add": lambda x, index, rows: x.index_add(0, index, values),
            "index_reduce": lambda x, index, rows: x.index_reduce(
                0, index, values, "amax"
            ),
            "index_fill": lambda x, index, rows: x.index_fill(0, index, 1.0),
            "scatter": lambda x, index, rows: x.scatter(0, rows, values),
            "scatter_value": lambda x, index, rows: x.scatter(0, rows, 1.0),
            "scatter_add": lambda x, index, rows: x.scatter_add(0, rows, values),
            "scatter_reduce": lambda x, index, rows: x.scatter_reduce(
                0, rows, values, "amax"
            ),
        }.items():
            write(x, index, rows)
            shardtensor.reset_comm_stats()
            found = write(x, index, rows)
            stats = shardtensor.comm_stats()
            assert found._spec == x._spec, name
            sent = 0 if name in ("index_fill", "scatter_value") else count * channels
            assert stats.bytes <= sent * x.element_size() and stats.plans == 0, name
            assert index is whole or stats.all_reduces == 0, name


@ranks(2, 3)
def test_what_is_wrong_is_the_same_error_everywhere(mesh):
    x = shard(torch.randn(BATCH, POINTS, CHANNELS), mesh, [Shard(1)])
    values = shard(torch.randn(BATCH, CENTERS, CHANNELS), mesh, [Shard(1)])
    for wrong in (-1, POINTS):
        index = torch.randint(POINTS, (BATCH, CENTERS))
        index[-1, -1] = wrong
        outside = f"index {wrong} is out of bounds for dimension 1 with size {POINTS}"
        for given in (index, shard(index, mesh, [Shard(1)])):
            for call in (
                lambda given: x.gather(1, wide(given)),
                lambda given: x[-1].gather(0, wide(given[-1])),
                lambda given: x.scatter(1, wide(given), values),
                lambda given: x.scatter(1, wide(given), 1.0),
                lambda given: x.scatter_add(1, wide(given), values),
            ):
                with pytest.raises(
                    (IndexError, RuntimeError), match=f"index {wrong} is out of"
                ):
                    call(given)
            with pytest.raises(IndexError, match=outside):
                x.index_copy(1, given[-1], values)
            if wrong > 0:
                with pytest.raises(IndexError, match=f"index {wrong} is out of"):
                    x.index_fill(1, given[-1], 1.0)
    index = torch.randint(POINTS, (CENTERS,))
    with pytest.raises(RuntimeError, match="Source/destination tensor must have same"):
        x.index_copy(1, index, values[..., :2])
    with pytest.raises(RuntimeError, match="Expected self.dtype to be equal to src"):
        x.scatter(1, wide(torch.randint(POINTS, (BATCH, CENTERS))), values.double())
    with pytest.raises(RuntimeError, match="to be no larger than self"):
        x.gather(1, wide(torch.randint(POINTS, (BATCH, CENTERS)), CHANNELS + 1))


@ranks(2)
def test_results_lie_in_the_memory_order_of_one_device(mesh):
    x, index = cloud(), torch.randperm(POINTS)[:CENTERS]
    values = torch.randn(BATCH, CENTERS, CHANNELS, dtype=x.dtype)
    cut, named = shard(x, mesh, [Shard(1)]), shard(index, mesh, [Shard(0)])
    for view in (lambda x: x, lambda x: x.transpose(0, 2), lambda x: x.transpose(1, 2)):
        dim, other = view(x).shape.index(POINTS), view(values)
        for i, j in ((named, index), (index, index)):

            def results(x, i, dim=dim, other=other):
                ones = [1] * 3
                ones[dim] = CENTERS
                rows = i.view(ones).expand_as(other)
                return (
                    x.gather(dim, rows), torch.take_along_dim(x, i.view(ones), dim),
                    x.gather(dim, rows.narrow(dim - 1, 0, 1)),
                    x.scatter(dim, rows, other), x.scatter(dim, rows, 1.0),
                    x.scatter_add(dim, rows, other), x.index_copy(dim, i, other),
                    x.index_fill(dim, i, 1.0), x.index_add(dim, i, other),
                )  # fmt: skip

            for found, expected in zip(
                results(view(cut), i), results(view(x), j), strict=True
            ):
                assert_close(found, expected)
                assert found.stride() == expected.stride()


@ranks(2, "2x2")
def test_results_lie_as_their_indices_do(mesh):
    x, index = cloud(), torch.randint(POINTS, (NEAR, CENTERS))
    rows = torch.randperm(POINTS)[:NEAR]

    def results(x, index, rows):
        columns = index.t()
        return (
            x[:, columns], x[:, :, columns % 3], x.transpose(0, 2)[:, columns],
            x[rows % 2, columns], x.transpose(0, 2).index_fill(1, rows, 1.0),
        )  # fmt: skip

    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        cut = shard(x, mesh, [placement] * mesh.ndim)
        for of_index in (Shard(0), Shard(1), Replicate()):
            found = results(
                cut,
                shard(index, mesh, [of_index] * mesh.ndim),
                shard(rows, mesh, [Shard(0)] * mesh.ndim),
            )
            for a, b in zip(found, results(x, index, rows), strict=True):
                assert_close(a, b)
                assert a.stride() == b.stride()


ONE_ROW = {
    "scatter_add": lambda x, dim, index, y: x.scatter_add(dim, index, y),
    "scatter_reduce": lambda x, dim, index, y: x.scatter_reduce(dim, index, y, "amax"),
    "scatter": lambda x, dim, index, y: x.scatter(dim, index, y),
    "gather": lambda x, dim, index, y: x.gather(dim, index) * y,
}


@ranks(2, "2x2")
@pytest.mark.parametrize("name", ONE_ROW)
def test_one_row_of_any_dim(mesh, name):
    """The index has one element along several dims: which of them is cut?"""
    index = torch.tensor([2])
    for dim in range(3):
        x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
        y = torch.randn_like(x).narrow(dim, 0, 1).detach().requires_grad_()
        for given in (index, sharded(index, [Shard(0)] * mesh.ndim)):
            check_op(
                lambda x, index, y, dim=dim: ONE_ROW[name](
                    x, dim, index.view(1, 1, 1).expand(y.shape), y
                ),
                sharded(x, [Shard(dim)] * mesh.ndim), given, y, mesh=mesh,
            )  # fmt: skip
