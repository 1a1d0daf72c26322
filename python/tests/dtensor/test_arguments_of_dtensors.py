"""What DTensor's functions take, in ShardTensor's."""

import pytest
import torch
import torch.distributed as dist
from ranks import assert_close, ranks, shard, uneven
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor import _C, ShardTensor

PRELOAD = ("torch._dynamo",)


def local(x, mesh):
    return shard(x, mesh, [Shard(0)], {0: uneven(len(x), mesh.size())}).to_local()


@ranks(1, 2, 3)
def test_shape_and_stride(mesh):
    whole = torch.arange(42.0).view(7, 2, 3)
    for dims in [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)]:
        x = whole.permute(dims).contiguous().permute([dims.index(d) for d in range(3)])
        y = ShardTensor.from_local(
            local(x, mesh).requires_grad_(),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=x.shape,
            stride=x.stride(),
        )
        assert_close(y, x)
        assert y.stride() == x.stride()
        (y * x).sum().backward()
    z = ShardTensor.from_local(whole, mesh, [Replicate()], stride=whole.stride())
    assert z.stride() == whole.stride()


@ranks(2, 3)
def test_shapes_and_strides_that_cannot_be(mesh):
    x = torch.zeros(2, 3)
    for stride in [(3, 2), (1, 1), (4, 1), (3,), (0, 1)]:
        with pytest.raises(ValueError, match="expected the stride of a dense tensor"):
            ShardTensor.from_local(x, mesh, [Shard(0)], stride=stride)
    first = mesh.get_rank() == 0
    with pytest.raises(ValueError, match="do not make the same call"):
        stride = (3, 1) if first else (1, 2 * mesh.size())
        ShardTensor.from_local(x, mesh, [Shard(0)], stride=stride)
    with pytest.raises(ValueError, match="do not make the same call"):
        ShardTensor.from_local(x, mesh, [Shard(0)], run_check=first)
    with pytest.raises(ValueError, match="expected"):
        ShardTensor.from_local(x, mesh, [Shard(0)], shape=(5, 3), stride=(3, 1))
    with pytest.raises(TypeError, match="shape is global_shape, expected one of them"):
        ShardTensor.from_local(x, mesh, [Shard(0)], global_shape=(2, 3), shape=(2, 3))


@ranks(1, 2, 3, "2x2")
def test_replicas_are_compared(mesh):
    axes = mesh.ndim
    placements = [Shard(0)] * (axes - 1) + [Replicate()]
    for dtype in (torch.float32, torch.complex64, torch.int8, torch.bool):
        same = torch.tensor([[1, 0, 1]], dtype=dtype)
        x = ShardTensor.from_local(same, mesh, placements, run_check=True)
        assert x.to_local().equal(same)
    differs = torch.full((1, 3), float(mesh.get_local_rank(axes - 1)))
    ShardTensor.from_local(differs, mesh, [Shard(0)] * axes, run_check=True)
    ShardTensor.from_local(differs, mesh, [Partial()] * axes, run_check=True)
    if mesh.size() == 1:
        return
    message = "expected the same elements on all ranks along the Replicate axes"
    with pytest.raises(ValueError, match=message):
        ShardTensor.from_local(differs, mesh, placements, run_check=True)
    with shardtensor.check_mode(), pytest.raises(ValueError, match=message):
        ShardTensor.from_local(differs, mesh, placements)
    ShardTensor.from_local(differs, mesh, placements)


@ranks(2)
def test_replicas_that_nobody_can_read(mesh):
    def twice(x):
        return ShardTensor.from_local(x, mesh, [Replicate()]) * 2

    x = torch.arange(6.0).view(2, 3)
    with shardtensor.check_mode():
        assert twice(x.to("meta")).is_meta
        grad = torch.func.grad(lambda x: twice(x).square().sum())(x)
        torch.testing.assert_close(grad, 8 * x)
    with pytest.raises(ValueError, match="check_replicas: no spec, expected one"):
        _C.check_replicas(x, None)


def summed(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("placement", [Replicate(), Partial()], ids=str)
def test_gradients_that_stay_terms(mesh, placement):
    everywhere = [placement] * mesh.ndim
    terms = [Partial()] * mesh.ndim
    x = torch.arange(1.0, 13.0).view(4, 3)
    whole = summed(x) if placement.is_partial() else x
    weights = torch.rand(4, 3)
    own = shard(weights, mesh, [Shard(0)] * mesh.ndim)
    for stride in (None, (1, 4)):
        leaf = x.clone().requires_grad_()
        y = ShardTensor.from_local(
            leaf, mesh, everywhere, stride=stride, grad_placements=terms
        )
        loss = (y * y * own).sum()
        shardtensor.reset_comm_stats()
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        assert placement.is_partial() or shardtensor.comm_stats().bytes == 0
        torch.testing.assert_close(summed(grad.detach()), 2 * whole * weights)
        again = ShardTensor.from_local(grad, mesh, terms).square().sum()
        (second,) = torch.autograd.grad(again, leaf)
        torch.testing.assert_close(summed(second), 8 * whole * weights**2)


@ranks(1, 2)
def test_gradients_in_other_pieces(mesh):
    x = torch.ones(2, 3, requires_grad=True)
    y = ShardTensor.from_local(x, mesh, [Shard(0)], grad_placements=[Shard(0)])
    (y * 3).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 3), 3.0))
    for other in (Shard(1), Replicate(), Partial()):
        with pytest.raises(ValueError, match="expected a gradient in the pieces of"):
            ShardTensor.from_local(x, mesh, [Shard(0)], grad_placements=[other])
    with pytest.raises(ValueError, match="one placement for each of the 1 mesh axes"):
        ShardTensor.from_local(x, mesh, [Shard(0)], grad_placements=[])
    with pytest.raises(NotImplementedError, match="makes its own gradients"):
        torch.func.grad(
            lambda x: ShardTensor.from_local(
                x, mesh, [Replicate()], grad_placements=[Partial()]
            ).sum()
        )(x.detach())
    if mesh.size() > 1:
        other = [Replicate(), Partial()][mesh.get_rank()]
        with pytest.raises(ValueError, match="do not make the same call"):
            ShardTensor.from_local(x, mesh, [Replicate()], grad_placements=[other])


def gathered(x, mesh, **told):
    y = ShardTensor.from_local(x, mesh, [Shard(0)], run_check=False, **told)
    return y.redistribute(mesh, [Replicate()]).to_local() + 2


@ranks(2, 3)
def test_graphs(mesh):
    rank, size = mesh.get_rank(), mesh.size()
    x = torch.full((2, 3), float(rank))
    told = {"shape": (2 * size, 3), "stride": (3, 1)}
    expected = gathered(x, mesh)
    torch.testing.assert_close(gathered(x, mesh, **told), expected)
    compiled = torch.compile(gathered, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x, mesh, **told), expected)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="asks the other ranks"):
        compiled(x, mesh)
    torch._dynamo.reset()
    broken = torch.compile(gathered, backend="eager", dynamic=False)
    torch.testing.assert_close(broken(x, mesh), expected)


@ranks(1, 2, 3)
def test_dtypes_of_messages(mesh):
    x = torch.arange(21.0).view(7, 3) / 7
    rounded = x.bfloat16()
    for to in ([Replicate()], [Shard(1)], [Shard(0)]):
        y = shard(x, mesh, [Shard(0)], {0: uneven(7, mesh.size())}).requires_grad_()
        z = y.redistribute(mesh, to, forward_dtype=torch.bfloat16)
        assert_close(z, rounded)
        (z * rounded).sum().backward()
        assert_close(y.grad, rounded.float())
    y = shard(x, mesh, [Shard(0)], {0: uneven(7, mesh.size())})
    shardtensor.reset_comm_stats()
    y.redistribute(mesh, [Replicate()])
    sent = shardtensor.comm_stats().bytes
    shardtensor.reset_comm_stats()
    y.redistribute(mesh, [Replicate()], forward_dtype=torch.bfloat16)
    assert 2 * shardtensor.comm_stats().bytes == sent
