"""Shard to Partial: each rank's rows are its term, zero elsewhere."""

import pytest
import torch
from ranks import assert_close, partitions, ranks, shard
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor

PRELOAD = ("torch._dynamo",)

WAYS = {  # from, to, whether all rows stay where they are
    "1": [
        ([Shard(0)], [Partial()], True),
        ([Shard(1)], [Partial()], True),
    ],
    "2": [
        ([Shard(0), Shard(1)], [Partial(), Partial()], True),
        ([Shard(0), Shard(0)], [Partial(), Partial()], True),
        ([Shard(0), Replicate()], [Partial(), Partial()], True),
        ([Shard(0), Replicate()], [Partial(), Shard(1)], True),
        ([Shard(0), Shard(1)], [Partial(), Replicate()], False),
        ([Shard(0), Shard(1)], [Shard(1), Partial()], False),
        ([Shard(0), Shard(0)], [Partial(), Shard(0)], False),
        ([Partial(), Shard(1)], [Shard(0), Partial()], False),
    ],
}


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("dtype", [torch.double, torch.complex64, torch.int32])
def test_values_messages_and_gradients(mesh, dtype):
    whole = torch.randn(7, 5, 2, 2).mul(9).to(dtype)
    for before, after, stays in WAYS[str(mesh.ndim)]:
        for sizes in partitions(7, mesh.size()):
            uneven = {0: sizes} if before == [Shard(0)] * mesh.ndim else None
            part = shard(whole, mesh, before, uneven)
            for format in (torch.contiguous_format, torch.channels_last):
                check(whole, part.contiguous(memory_format=format), after, stays)


def check(x, part, after, stays):
    if x.dtype == torch.double:
        part.requires_grad_()
    shardtensor.reset_comm_stats()
    terms = part.redistribute(placements=after)
    assert not stays or shardtensor.comm_stats().bytes == 0
    assert tuple(terms.placements) == tuple(after)
    assert_close(terms, x)
    assert terms.stride() == part.stride()
    if part.requires_grad:
        weights = torch.randn_like(x)
        (grad,) = torch.autograd.grad(
            (terms * terms * weights).sum(), part, create_graph=True
        )
        assert_close(grad, 2 * x * weights)
        (second,) = torch.autograd.grad(grad.square().sum(), part)
        assert_close(second, 8 * x * weights**2)


@ranks(2, 3, "2x2")
def test_rows_in_several_intervals(mesh):
    """A view of a tensor that is cut along its last dim."""
    x = torch.arange(24.0).view(4, 6)
    others = [Replicate()] * (mesh.ndim - 1)
    rows = shard(x, mesh, [Shard(1), *others]).view(24)
    for after in ([Partial()] * mesh.ndim, [Partial(), *others]):
        assert_close(rows.redistribute(placements=after), x.view(24))


@ranks(2)
def test_in_a_graph(mesh):
    x = torch.arange(24.0).view(4, 6)

    def doubled(part):
        return part.redistribute(placements=[Partial()]) * 2

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    assert_close(compiled(shard(x, mesh, [Shard(1)])), x * 2)
