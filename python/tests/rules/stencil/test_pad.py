"""Padding with constants and with rows of the input."""

import pytest
import torch
import torch.nn.functional as F
from ranks import (
    assert_close,
    check_op,
    partitions,
    ranks,
    shard,
    sharded,
    uneven,
)
from torch.distributed.tensor import Shard


def leaf(*sizes):
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


PADS = [(1, 2), (0, 3), (4, 0), (-1, 2), (2, -3), (-2, -2), (0, 0)]


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_one_dim_sweeps_cuts(mesh, mode):
    for pad in PADS:
        for sizes in partitions(9, mesh.size()):
            check_op(
                F.pad,
                sharded(leaf(2, 2, 9), [Shard(2)], {2: sizes}),
                *(pad, mode, 3.5 if mode == "constant" else None),
                mesh=mesh,
                second_order=pad == (1, 2),
            )


@ranks(2, 4, "2x2")
@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("dims", [2, 3])
def test_every_dim_can_be_sharded(mesh, mode, dims):
    layouts = {
        1: [[Shard(d)] for d in range(dims + 2)],
        2: [[Shard(2), Shard(3)], [Shard(3), Shard(2)], [Shard(0), Shard(2)]],
    }[mesh.ndim]
    pad = [1, 2, 3, 0, 2, 1][: 2 * dims]
    for placements in layouts:
        check_op(
            lambda x: F.pad(x, pad, mode),
            sharded(leaf(2, 2, *[5, 6, 4][:dims]), placements),
            mesh=mesh,
        )


@ranks(2)
def test_constants_in_any_dim_and_dtype(mesh):
    for placements in [[Shard(0)], [Shard(1)]]:
        check_op(
            lambda x: F.pad(x, [1, 2, 3, 4], value=7),
            sharded(torch.arange(12).view(3, 4), placements),
            mesh=mesh,
        )
        check_op(
            lambda x: F.pad(x, [0, 0, -3, 0]),
            sharded(torch.arange(12).view(3, 4), placements),
            mesh=mesh,
        )


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_many_rows_are_chosen_among_those_gathered(mesh, mode):
    """Not sent one by one."""
    placements = [Shard(2)] * mesh.ndim
    pieces = mesh.size()
    for sizes in (uneven(900, pieces), [0, *uneven(900, pieces - 1)], [2, 898]):
        if len(sizes) == pieces:
            x = sharded(leaf(1, 2, 900), placements, {2: sizes})
            for pad in ((700, 300), (500, -100)):
                check_op(F.pad, x, pad, mode, mesh=mesh, second_order=True)
    x = sharded(leaf(1, 2, 900, 3), placements, {2: uneven(900, pieces)})
    check_op(F.pad, x, (2, 1, 300, 400), mode, mesh=mesh)


@ranks(2, 3)
@pytest.mark.parametrize("pad", [(0, 0), (-1, 0), (-1, -1, 0, -2), (1, -1)])
def test_strides_are_those_of_one_device(mesh, pad):
    """Where nothing is added, those of a clone."""
    for order in ((2, 3, 0, 1), (0, 3, 1, 2), (0, 1, 2, 3)):
        x = torch.randn(4, 5, 6, 7)
        part = shard(x, mesh, [Shard(order[2])]).permute(order)
        expected = F.pad(x.permute(order), pad)
        assert F.pad(part, pad).stride() == expected.stride()
        assert_close(F.pad(part, pad), expected)


@ranks(2)
def test_constants_need_no_messages(mesh):
    import shardtensor

    x = shard(torch.randn(1, 2, 8), mesh, [Shard(2)])
    shardtensor.reset_comm_stats()
    F.pad(x, [3, 3])
    assert shardtensor.comm_stats().messages == 0


@ranks(2)
def test_wrong_arguments_raise_clear_errors(mesh):
    x = shard(torch.randn(1, 2, 8), mesh, [Shard(2)])
    with pytest.raises(RuntimeError, match=r"size should be less.* \[1, 2, 8\]"):
        F.pad(x, [8, 0], "reflect")
    with pytest.raises(RuntimeError, match="wrapping around more than once"):
        F.pad(x, [9, 0], "circular")
    with pytest.raises(RuntimeError, match="removes more than the 8 rows"):
        F.pad(x, [-5, -5])
    with pytest.raises(RuntimeError, match="a pair of numbers for at most 3"):
        torch.constant_pad_nd(x, [1] * 8)
    with pytest.raises(RuntimeError, match="a pair of numbers for at most 3"):
        torch.constant_pad_nd(x, [1])


@ranks(2, 3)
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_booleans(mesh, mode):
    x = torch.ones(2, 3, 8, dtype=torch.bool)
    cut = shard(x, mesh, [Shard(2)])
    if mode == "circular":
        assert_close(F.pad(cut, (1, 1), mode), F.pad(x, (1, 1), mode))
        return
    for given in x, cut:
        with pytest.raises(NotImplementedError, match="not implemented for 'Bool'"):
            F.pad(given, (1, 1), mode)
