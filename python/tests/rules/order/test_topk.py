"""The largest along a dim that is cut are found among the largest of its pieces."""

import pytest
import torch
from layouts import sweep
from ranks import assert_close, check_op, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

import shardtensor

LONG = 20_000  # a shorter dim is made whole


def check(s, x, k, dim, **options):
    values, indices = s.topk(k, dim, **options)
    expected_values, expected = x.topk(k, dim, **options)
    assert values._spec == indices._spec
    assert values.stride() == expected_values.stride()
    assert_close(indices, expected, what="indices")
    assert_close(values, expected_values, rtol=0, atol=0, what="values")
    return values


@ranks(2, 3, 4, "2x2")
def test_in_every_layout(mesh):
    x = torch.randn(3, LONG)
    for placements, sizes in sweep(mesh, x.shape):
        s = shard(x, mesh, placements, sizes)
        check(s, x, 7, 1)
        check(s, x, 300, -1, largest=False)
        check(s[1], x[1], 200, 0, sorted=False)


@ranks(2, 3)
def test_few_move(mesh):
    x = torch.randn(2, LONG)
    s = shard(x, mesh, [Shard(1)])
    shardtensor.reset_comm_stats()
    with shardtensor.fallback_mode("error"):
        values = check(s, x, 5, 1)
    assert values.placements == (Replicate(),)
    # Of both rows six values and indices go to each other rank.
    sent = 2 * 6 * (4 + 8) * (mesh.size() - 1)
    assert shardtensor.comm_stats().bytes <= sent + 256


@ranks(2, "2x2")
def test_of_equal_ones_those_of_one_device(mesh):
    nan, zeros = torch.randn(LONG), -torch.rand(LONG)
    nan[::4000] = float("nan")
    zeros[7::5000], zeros[8::6000] = 0.0, -0.0
    half = (torch.randn(LONG) * 9).half()
    for x in (nan, zeros, half, half.bfloat16(), half.int(), torch.ones(LONG)):
        for k in (3, 100):
            check(shard(x, mesh, [Shard(0)] * mesh.ndim), x, k, 0)


@ranks(2, 3, "2x2")
def test_gradients(mesh):
    x = torch.randn(LONG, dtype=torch.double, requires_grad=True)
    for placements, sizes in sweep(mesh, x.shape):
        for call in (
            lambda x: x.topk(4)[0].square(),
            lambda x: x[x.topk(9, largest=False)[1]].exp(),
            lambda x: x.view(2, -1).topk(3)[0].prod(),
        ):
            check_op(call, sharded(x, placements, sizes), mesh=mesh, second_order=True)


@ranks(2)
def test_forms(mesh):
    x = torch.randn(LONG)
    s = shard(x, mesh, [Shard(0)])
    out = s.new_empty(3), s.new_empty(3, dtype=torch.int64)
    torch.topk(s, 3, out=out)
    for ours, theirs in zip(out, x.topk(3), strict=True):
        assert_close(ours, theirs)
    assert_close((s + s.sum()).topk(3)[0], (x + x.sum()).topk(3)[0])
    assert s.to("meta").topk(3)[0].shape == (3,)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.topk(5)[0] * 2, backend="aot_eager")
    assert_close(compiled(s), x.topk(5)[0] * 2)
    for k, dim, error in ((LONG + 1, 0, RuntimeError), (-1, 0, RuntimeError)):
        with pytest.raises(error, match="out of range"):
            s.topk(k, dim)
    with pytest.raises(IndexError, match="out of range"):
        s.topk(1, 1)
