"""Pixel shuffling: blocks of pixels from channels and back."""

import pytest
import torch
import torch.nn.functional as F
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Shard


def leaf(*sizes):
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


@ranks(1, 2, 3, 4)
def test_cuts_and_factors(mesh):
    for factor in [1, 2, 3]:
        for sizes in partitions(12, mesh.size()):
            check_op(
                F.pixel_shuffle,
                sharded(leaf(2, 2 * factor**2, 12, 3), [Shard(2)], {2: sizes}),
                factor,
                mesh=mesh,
            )
            check_op(
                F.pixel_unshuffle,
                sharded(leaf(2, 2, 12, 2 * factor), [Shard(2)], {2: sizes}),
                factor,
                mesh=mesh,
                second_order=True,
            )


@ranks(2, "2x2")
def test_every_dim_can_be_sharded(mesh):
    layouts = {1: [[Shard(d)] for d in range(5)], 2: [[Shard(3), Shard(4)]]}
    for placements in layouts[mesh.ndim]:
        check_op(
            lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
            sharded(leaf(2, 2, 8, 4, 6), placements),
            mesh=mesh,
        )


@ranks(2)
def test_nothing_is_shuffled_as_on_one_device(mesh):
    for shape in ((0, 4, 6, 4), (2, 4, 0, 4)):
        x = torch.zeros(shape)
        for dim in (0, 2):
            part = shard(x, mesh, [Shard(dim)])
            for shuffle in (F.pixel_shuffle, F.pixel_unshuffle):
                assert_close(shuffle(part, 2), shuffle(x, 2))
            with pytest.raises(RuntimeError, match="divisible by downscale_factor"):
                F.pixel_unshuffle(part, 3)


@ranks(2)
def test_wrong_arguments_raise_pytorchs_errors(mesh):
    x = shard(torch.randn(1, 2, 8, 8), mesh, [Shard(2)])
    with pytest.raises(RuntimeError, match="divisible by the square of upscale_factor"):
        F.pixel_shuffle(x, 3)
    with pytest.raises(RuntimeError, match="divisible by downscale_factor"):
        F.pixel_unshuffle(x, 3)
