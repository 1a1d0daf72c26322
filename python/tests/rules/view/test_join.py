"""Tensors put together along a dim, and dims repeated, rolled and flipped."""

import itertools

import pytest
import torch
from layouts import ALL, check, placements_of, sweep
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

import shardtensor


@ranks(*ALL)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat_of_parts_in_different_layouts(mesh, dim):
    a = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    layouts = list(sweep(mesh, a.shape))
    pairs = itertools.product(layouts[::2], layouts[1::3])
    for (p, s), (q, t) in itertools.islice(pairs, 24):
        check_op(
            lambda x, y: torch.cat([x, y * 2, x], dim),
            sharded(a, p, s),
            sharded(b, q, t),
            mesh=mesh,
        )


@ranks(1, 2, 3, "2x2")
def test_cat_with_plain_parts_and_other_sizes(mesh):
    token = torch.randn(1, 3, requires_grad=True)
    more = torch.randn(2, 3)
    check(mesh, (5, 3), lambda x, t: torch.cat([t, x]), token.double())
    check(mesh, (5, 3), lambda x: torch.cat([x, x[:2], x[4:]]), second_order=True)
    check(mesh, (5, 3), lambda x: torch.cat([more.double(), x, more.double()], 0))
    check(mesh, (5, 3), lambda x: torch.cat([torch.empty(0).double(), x]))
    check(mesh, (5, 3), lambda x: torch.cat([x]))
    check(mesh, (5, 3), lambda x: torch.cat([x.float(), x.double()], 1))


@ranks(2, 3)
def test_cat_moves_nothing_where_pieces_stand_in_order(mesh):
    x = torch.randn(9, 4, requires_grad=True)
    token = torch.randn(2, 4)
    for sizes in partitions(9, mesh.size(), repeated=False):
        s = shard(x, mesh, [Shard(0)], {0: sizes})
        other = shard(x, mesh, [Shard(0)], {0: sizes})
        shardtensor.reset_comm_stats()
        wide = torch.cat([s, other], 1)
        longer = torch.cat([token, s])
        parts = torch.cat(s.split([2, 4, 3]))
        assert shardtensor.comm_stats().messages == 0
        assert_close(wide, torch.cat([x, x], 1))
        assert_close(longer, torch.cat([token, x]))
        assert_close(parts, x)
        assert parts._spec == s._spec


@ranks(2, 3, "2x2")
def test_cat_cuts_larger_parts_that_every_rank_has(mesh):
    axes = [Shard(1), Shard(2)][: mesh.ndim]
    x = torch.randn(2, 9, 4, requires_grad=True)
    wide = torch.randn(5, 9, 4, requires_grad=True)
    small = torch.randn(1, 9, 4, requires_grad=True)
    whole = [Replicate()] * mesh.ndim
    for plain in (wide, sharded(wide, whole)):
        for fn in (lambda a, b: torch.cat([a, b]), lambda a, b: torch.cat([b, a])):
            shardtensor.reset_comm_stats()
            result = check_op(fn, plain, sharded(x, axes), mesh=mesh, backward=False)
            assert result.placements == tuple(axes)
            assert shardtensor.comm_stats().messages == 0
            check_op(fn, plain, sharded(x, axes), mesh=mesh)
    if mesh.ndim == 2:  # each axis as the part that it cuts
        rows = sharded(wide, [Shard(1), Replicate()])
        columns = sharded(small, [Replicate(), Shard(2)])
        result = check_op(lambda a, b: torch.cat([a, b]), rows, columns, mesh=mesh)
        assert result.placements == tuple(axes)


@ranks(2, 3)
def test_cat_spreads_rows_that_every_rank_has(mesh):
    tokens = torch.randn(12, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)
    for sizes in partitions(3, mesh.size(), repeated=False):
        part = sharded(x, [Shard(0)], {0: sizes})
        result = check_op(lambda a, b: torch.cat([a, b]), tokens, part, mesh=mesh)
        assert max(result._spec.sizes()[0]) < 12


@ranks(2, 3)
def test_cat_of_partial_sums_stays_partial(mesh):
    x = torch.randn(6, 4)
    s = shard(x, mesh, [Shard(0)])
    both = torch.cat([s.sum(0), s.sum(0) * 2])
    assert both.placements[0].is_partial()
    assert_close(both, torch.cat([x.sum(0), x.sum(0) * 2]))
    mixed = torch.cat([s.sum(0), torch.ones(4)])
    assert_close(mixed, torch.cat([x.sum(0), torch.ones(4)]))


@ranks(*ALL)
def test_stack(mesh):
    y = torch.randn(4, 3, dtype=torch.float64)
    for dim in (0, 1, -1):
        check(mesh, (4, 3), lambda x, d=dim: torch.stack([x, y, x * 3], d))
    check(mesh, (4, 3), lambda x: torch.hstack([x, y]), second_order=True)
    check(mesh, (4, 3), lambda x: torch.vstack([x, y]))
    check(mesh, (4, 3), lambda x: torch.stack(x.unbind(1)))


@ranks(1, 2)
def test_wrong_parts_raise(mesh):
    x = shard(torch.zeros(4, 3), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([x, torch.zeros(4, 2)])
    with pytest.raises(RuntimeError, match="same size|equal size"):
        torch.stack([x, torch.zeros(4, 2)])
    for dim in (2, -3, -4):
        with pytest.raises(IndexError, match="out of range"):
            torch.cat([x, x], dim)


def numbers(*sizes, start=0.0):
    count = torch.Size(sizes).numel()
    x = torch.arange(start, start + count, dtype=torch.double).view(sizes)
    return x.requires_grad_()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("op", [torch.cat, torch.stack])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_joins_equal_layouts(mesh, op, dim):
    for cut in (0, 1):
        for sizes in partitions(6, mesh.size()):
            x = sharded(numbers(6, 6), [Shard(cut)], {cut: sizes})
            y = sharded(numbers(6, 6, start=50.0), [Shard(cut)], {cut: sizes})
            check_op(
                lambda a, b: op([a.sin(), b], dim), x, y, mesh=mesh, second_order=True
            )


@ranks(2, 3)
def test_joins_different_layouts_and_plain_tensors(mesh):
    x = sharded(numbers(5, 6), [Shard(0)])
    y = sharded(numbers(5, 2), [Shard(1)])
    check_op(lambda a, b, c: torch.cat([a, b, c], 1), x, y, numbers(5, 3), mesh=mesh)


@ranks(2)
def test_skips_empty_one_dimensional_tensors(mesh):
    x = sharded(numbers(5, 6), [Shard(0)])
    check_op(lambda a: torch.cat([torch.empty(0), a], 1), x, mesh=mesh)


SHAPES = {
    "repeat": lambda x: x.repeat(2, 3),
    "repeat_new": lambda x: x.repeat(2, 1, 2),
    "repeat_zero": lambda x: x.repeat(0, 1),
    "repeat_zero_new": lambda x: x.repeat(0, 2, 1),
    "tile": lambda x: x.tile(2),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 0),
    "repeat_interleave_flat": lambda x: x.repeat_interleave(2),
    "repeat_then_sum": lambda x: x.repeat(2, 2).view(2, 5, 2, 4).sum(0),
    "roll": lambda x: x.roll(2, 0),
    "roll_back": lambda x: x.roll((-1, 6), (0, 1)),
    "roll_flat": lambda x: x.roll(3),
    "flip": lambda x: x.flip(0),
    "flip_transposed": lambda x: x.t().flip(0),
    "flip_both": lambda x: x.flip(0, -1),
    "flip_none": lambda x: x.flip(()),
    "fliplr": lambda x: x.fliplr(),
    "rot90": lambda x: x.rot90(),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "triu_low": lambda x: x.triu(-2),
    "tril_": lambda x: (x * 1).tril_(-1),
    "contiguous": lambda x: x.t().contiguous(),
    "clone": lambda x: x.clone(memory_format=torch.contiguous_format),
    "expand_as": lambda x: x.unsqueeze(0).expand_as(torch.empty(2, 5, 4)),
}


@ranks(*ALL)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(mesh, name):
    check(mesh, (5, 4), SHAPES[name], second_order=name in ("roll", "repeat"))


@ranks(2, 3)
def test_repeating_and_triangles_move_nothing(mesh):
    x = torch.randn(5, 4)
    for sizes in partitions(5, mesh.size()):
        s = shard(x, mesh, [Shard(0)], {0: sizes})
        shardtensor.reset_comm_stats()
        results = s.repeat(3, 2), s.tril(), s.repeat_interleave(2, 0)
        assert shardtensor.comm_stats().messages == 0
        assert_close(results[0], x.repeat(3, 2))
        assert_close(results[1], x.tril())
        assert_close(results[2], x.repeat_interleave(2, 0))


@ranks(2, 3, "2x2")
def test_rolling_a_repeated_partition(mesh):
    x = torch.randn(3, 4, requires_grad=True)
    for sizes in partitions(4, mesh.size()):
        for fn in (
            lambda x: x.flatten().roll(2),
            lambda x: x.flatten().flip(0),
            lambda x: x.flatten().unsqueeze(0).tril(3),
            lambda x: torch.cat([x.flatten(), x.flatten()]),
        ):
            check_op(fn, sharded(x, placements_of(mesh, 1), {1: sizes}), mesh=mesh)


@ranks(2)
def test_tensors_that_a_cat_skips_have_any_dim(mesh):
    none = torch.zeros(0)
    for dim in (0, 1, -3):
        for placement in (Shard(0), Replicate()):
            part = shard(none, mesh, [placement])
            assert_close(torch.cat([part, part], dim), torch.cat([none, none], dim))
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.cat([shard(torch.zeros(3), mesh, [Shard(0)])] * 2, 1)


@ranks(2)
def test_wrong_rolls_raise(mesh):
    x = shard(torch.zeros(4, 3), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match="as many shifts as dims"):
        x.roll((1, 2), (0,))
    with pytest.raises(RuntimeError, match="one shift without dims"):
        x.roll((1, 2))
    with pytest.raises(RuntimeError, match="appears twice"):
        x.flip(0, 0)
