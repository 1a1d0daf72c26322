"""Cumulative sums along a cut dim: a row of each piece is all that is sent."""

import math

import pytest
import torch
from layouts import check, sweep
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Shard

import shardtensor


@ranks(2, 3)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_row_is_sent_in_each_direction(mesh, dim):
    x = torch.randn(9, 8, 10)
    row = x.numel() // x.size(dim) * x.element_size()
    for sizes in partitions(x.size(dim), mesh.size(), repeated=False):
        s = shard(x, mesh, [Shard(dim)], {dim: sizes}).requires_grad_()
        shardtensor.reset_comm_stats()
        result = s.cumsum(dim)
        assert shardtensor.comm_stats().bytes == row * (mesh.size() - 1)
        assert result._spec.partition(dim) == s._spec.partition(dim)
        shardtensor.reset_comm_stats()
        result.backward(s.detach())
        assert shardtensor.comm_stats().bytes == row * (mesh.size() - 1)
        assert_close(s.grad, x.flip(dim).cumsum(dim).flip(dim))


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.half])
def test_dtypes_are_those_of_one_device(mesh, dtype):
    x = (torch.rand(7, 3) * 3).to(dtype)
    for options in ({}, {"dtype": torch.float32}, {"dtype": torch.int64}):
        check(mesh, None, lambda x, o=options: x.cumsum(0, **o), x=x)


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_infinite_is_so_from_there_on(mesh, value):
    for row in range(5):
        x = torch.randn(5, 2)
        x[row, 1] = value
        check(mesh, None, lambda x: x.cumsum(0), x=x)
        x[4 - row, 1] = math.inf
        check(mesh, None, lambda x: x.cumsum(0), x=x)


@ranks(2, 3, "2x2")
def test_written_into_tensors(mesh):
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    for placements, sizes in sweep(mesh, x.shape):
        s = sharded(x, placements, sizes)
        check_op(lambda x: (x * 2).cumsum_(0), s, mesh=mesh, second_order=True)
        out = shard(torch.zeros(6, 3, dtype=x.dtype), mesh, [Shard(1)] * mesh.ndim)
        torch.cumsum(shard(x.detach(), mesh, placements, sizes), 0, out=out)
        assert_close(out, x.cumsum(0))


@ranks(2, 3)
def test_a_dim_that_is_cut_repeatedly(mesh):
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    for sizes in partitions(7, mesh.size()):
        check_op(
            lambda x: x.flatten().cumsum(0),
            sharded(x, [Shard(1)], {1: sizes}),
            mesh=mesh,
            second_order=True,
        )


@ranks(2, 3)
def test_transforms_and_tangents(mesh):
    x = torch.randn(7, 2, dtype=torch.float64)
    t = torch.randn(7, 2, dtype=torch.float64)
    for sizes in partitions(7, mesh.size()):
        s, u = (shard(y, mesh, [Shard(0)], {0: sizes}) for y in (x, t))
        loss = lambda x: x.cumsum(0).sin().sum()  # noqa: E731
        assert_close(torch.func.grad(loss)(s), torch.func.grad(loss)(x))
        for ours, theirs in zip(
            torch.func.jvp(lambda x: x.cumsum(0), (s,), (u,)),
            torch.func.jvp(lambda x: x.cumsum(0), (x,), (t,)),
            strict=True,
        ):
            assert_close(ours, theirs)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(s, u).cumsum(0)
            tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
        assert_close(tangent, t.cumsum(0))


@ranks(2)
def test_compiled(mesh):
    x = torch.randn(7, 2)
    s = shard(x, mesh, [Shard(0)]).requires_grad_()
    torch._dynamo.reset()
    result = torch.compile(lambda x: x.cumsum(0) * 2, backend="aot_eager")(s)
    result.backward(s.detach())
    assert_close(result.detach(), x.cumsum(0) * 2)
    assert_close(s.grad, 2 * x.flip(0).cumsum(0).flip(0))


@ranks(2, 3)
def test_autocast_and_meta(mesh):
    x = torch.randn(7, 2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = (x @ x.t()).cumsum(0)
        s = shard(x, mesh, [Shard(0)])
        result = (s @ x.t()).cumsum(0)
    assert result.dtype == expected.dtype
    assert_close(result, expected, rtol=0, atol=0.1)
    shardtensor.reset_comm_stats()
    assert s.to("meta").cumsum(0).shape == x.shape
    assert shardtensor.comm_stats().messages == 0
