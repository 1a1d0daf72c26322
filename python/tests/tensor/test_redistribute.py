"""One layout made of another."""

import itertools

import pytest
import rig
from layouts import LAYOUTS_1D, LAYOUTS_2D, numbered
from oracle import Repeated
from ranks import assert_close, check_op, partitions, ranks, shard, sharded, uneven
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor


def redistributed(placements, sizes=None):
    def move(x):
        if isinstance(x, ShardTensor):
            return x.redistribute(placements=placements, sizes=sizes)
        return x * 1

    return move


def pairs(layouts):
    """Shard -> Partial has no meaning; see test_redistribute_refuses."""
    return [
        pytest.param(before, after, id=f"{before}-{after}")
        for before, after in itertools.product(layouts, layouts)
        if not any(
            isinstance(a, Partial) and isinstance(b, Shard)
            for b, a in zip(before, after, strict=True)
        )
    ]


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("before, after", pairs(LAYOUTS_1D))
def test_redistribute_between_any_two_layouts(mesh, before, after):
    x = numbered(7, 5).requires_grad_()
    check_op(
        redistributed(after),
        sharded(x, before),
        mesh=mesh,
        second_order=True,
    )


@ranks(1, 2, 3, 4)
def test_redistribute_between_uneven_splits(mesh):
    x = numbered(10, 4).requires_grad_()
    splits = partitions(10, mesh.size(), repeated=False)
    for before, after in itertools.product(splits, splits):
        y = check_op(
            redistributed([Shard(0)], {0: after}),
            sharded(x, [Shard(0)], {0: before}),
            mesh=mesh,
        )
        assert y._spec.sizes() == {0: after}


@ranks(2, 3, "2x2")
def test_redistribute_cuts_that_are_often_repeated(mesh):
    """More often than their boxes are sent one by one."""
    pieces, dims = mesh.size(), [Shard(0)] * mesh.ndim
    splits = [
        Repeated([1] * (pieces - 1) + [13 - pieces], 100),
        Repeated([0, *uneven(8, pieces - 1)], 150),
        Repeated([5, *uneven(115, pieces - 1)], 10),
        uneven(1200, pieces),
        [1200, *[0] * (pieces - 1)],
    ]
    for before, after in itertools.permutations(splits, 2):
        x = numbered(1200, 2).requires_grad_()
        check_op(
            lambda x, y: x * y,
            sharded(x, dims, {0: before}),
            sharded(x.detach() + 1, dims, {0: after}),
            mesh=mesh,
            second_order=True,
        )


@ranks("2x2")
@pytest.mark.parametrize("before, after", pairs(LAYOUTS_2D))
def test_redistribute_on_two_axes(mesh, before, after):
    x = numbered(7, 5).requires_grad_()
    check_op(redistributed(after), sharded(x, before), mesh=mesh)


@ranks(2, 3)
def test_redistribute_keeps_and_changes_the_split(mesh):
    x = numbered(6, 9)
    rows = uneven(6, mesh.size())
    y = shard(x, mesh, [Shard(0)], {0: rows})
    assert y.redistribute(placements=[Shard(0)]) is y
    moved = y.redistribute(sizes={0: rows[::-1]}, async_op=True)
    assert moved.placements == (Shard(0),) and moved._spec.sizes() == {0: rows[::-1]}
    assert_close(moved, x)
    columns = y.redistribute(mesh, [Shard(-1)], sizes=uneven(9, mesh.size()))
    assert columns._spec.sizes() == {1: uneven(9, mesh.size())}
    assert_close(columns, x)


@ranks(2)
def test_redistribute_refuses(mesh):
    y = shard(numbered(6, 4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="expected placements, sizes or both"):
        y.redistribute()
    with pytest.raises(ValueError, match="2 placements .* one for each of its 1 axes"):
        y.redistribute(placements=[Shard(0), Shard(1)])
    with pytest.raises(NotImplementedError, match="cannot turn Shard"):
        y.redistribute(placements=[Partial("max")])
    other = shardtensor.init_device_mesh(rig.DEVICE, (1, 2))
    with pytest.raises(ValueError, match="cannot move to"):
        y.redistribute(other, [Shard(0), Replicate()])


@ranks(2)
def test_each_element_moves_at_most_once(mesh):
    x = numbered(8, 4)
    y = shard(x, mesh, [Shard(0)], {0: [6, 2]})
    shardtensor.reset_comm_stats()
    y.redistribute(sizes={0: [4, 4]})
    stats = shardtensor.comm_stats()
    assert stats.bytes == (2 * 4 * 8 if mesh.get_rank() == 0 else 0)
    assert stats.messages == (1 if mesh.get_rank() == 0 else 0)


@ranks("2x2")
def test_one_message_sums_over_all_axes(mesh):
    x = numbered(8, 4)
    for reduce in ("sum", "avg", "max"):
        y = ShardTensor.from_local(x, mesh, [Partial(reduce)] * 2)
        shardtensor.reset_comm_stats()
        whole = y.redistribute(placements=[Replicate()] * 2)
        assert shardtensor.comm_stats().all_reduces == 1
        assert_close(whole, x * 4 if reduce == "sum" else x)
        y.redistribute(placements=[Shard(0), Replicate()])
    x = ShardTensor.from_local(x, mesh, [Partial("max"), Partial()])
    assert_close(x.redistribute(placements=[Replicate()] * 2), numbered(8, 4) * 2)
