"""Diagonals that are written."""

import pytest
import torch
from layouts import ALL, sweep
from ranks import assert_close, check_op, ranks, shard, sharded
from torch.distributed.tensor import Shard


@ranks(*ALL)
@pytest.mark.parametrize(
    "sizes, wrap",
    [
        ((4, 6), False),
        ((7, 3), False),
        ((7, 3), True),
        ((4, 3), True),
        ((9, 1), True),
        ((3, 7), True),
        ((3, 3, 3), False),
        ((0, 3), True),
    ],
)
def test_a_filled_diagonal(mesh, sizes, wrap):
    x = torch.randn(sizes, dtype=torch.float64)
    expected = x.clone().fill_diagonal_(2.5, wrap)
    for placements, cuts in sweep(mesh, x.shape):
        part = shard(x, mesh, placements, cuts)
        assert part.fill_diagonal_(2.5, wrap) is part
        assert_close(part, expected)
    check_op(
        lambda x: (x * 2).fill_diagonal_(2.5, wrap),
        sharded(x.requires_grad_(), [Shard(i) for i in range(mesh.ndim)]),
        mesh=mesh,
        second_order=True,
    )


@ranks(2)
def test_a_diagonal_of_a_view_is_filled(mesh):
    x = torch.randn(7, 5)
    for placement in (Shard(0), Shard(1)):
        part = shard(x, mesh, [placement])
        whole = x.clone()
        for tensor in (part, whole):
            tensor.t()[1:].fill_diagonal_(3)
        assert_close(part, whole)


@ranks(2)
def test_what_has_no_diagonal_raises(mesh):
    with pytest.raises(RuntimeError, match="at least 2 dims, got sizes .4."):
        shard(torch.zeros(4), mesh, [Shard(0)]).fill_diagonal_(1)
    with pytest.raises(RuntimeError, match="of equal length, got sizes .2, 2, 3."):
        shard(torch.zeros(2, 2, 3), mesh, [Shard(0)]).fill_diagonal_(1)
