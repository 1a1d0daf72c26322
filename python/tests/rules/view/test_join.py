"""cat and stack on every layout."""

import pytest
import torch
from ranks import check_op, partitions, ranks, sharded
from torch.distributed.tensor import Replicate, Shard


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


@ranks("2x2")
def test_joins_on_a_two_dimensional_mesh(mesh):
    for placements in (
        [Shard(0), Shard(1)],
        [Shard(1), Shard(1)],
        [Replicate(), Shard(0)],
    ):
        x = sharded(numbers(5, 6), placements)
        y = sharded(numbers(5, 6, start=9.0), placements)
        for dim in (0, 1):
            check_op(lambda a, b, d=dim: torch.cat([a, b], d), x, y, mesh=mesh)


@ranks(2)
def test_joins_an_unsharded_dim_without_messages(mesh):
    from ranks import shard

    import shardtensor as st

    x = shard(numbers(5, 6).detach(), mesh, [Shard(0)], {0: [4, 1]})
    st.reset_comm_stats()
    joined = torch.cat([x, x], 1)
    assert st.comm_stats().messages == 0
    assert joined._spec._core.partition(0).sizes == [4, 1]


@ranks(2)
def test_skips_empty_one_dimensional_tensors(mesh):
    x = sharded(numbers(5, 6), [Shard(0)])
    check_op(lambda a: torch.cat([torch.empty(0), a], 1), x, mesh=mesh)
