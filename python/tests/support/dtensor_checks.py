"""What tests of DTensors beside ShardTensors have in common."""

import torch
from oracle import Sharded, assert_close, shard
from ranks import uneven
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def distributed(tensor, mesh, placements):
    """`tensor` (the same on all ranks) as a DTensor, a leaf like it."""
    made = distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=None)
    return made.requires_grad_(tensor.requires_grad)


def cut(tensor, placements, mesh):
    """Unevenly along the dims of `placements`, for check_dtensors."""
    sizes = {
        p.dim: uneven(tensor.shape[p.dim], mesh.size(axis))
        for axis, p in enumerate(placements)
        if p.is_shard()
    }
    return Sharded(tensor, list(placements), sizes)


def check_dtensors(fn, *inputs, mesh, dtensor_mesh=None, placements, tolerance=None):
    """`fn` gives on shards and DTensors what it gives on whole tensors: values,
    gradients, and gradients of DTensors lie as these do. Inputs that are
    Sharded become ShardTensors on `mesh`, other tensors DTensors on
    `dtensor_mesh` where `placements` says so, one dim fewer than it cuts:
    Replicate."""
    tolerance = tolerance or {}
    dtensor_mesh = dtensor_mesh or mesh
    whole, parts = [], []
    for given in inputs:
        if isinstance(given, Sharded):
            whole.append(
                given.tensor.detach().requires_grad_(given.tensor.requires_grad)
            )
            parts.append(shard(given.tensor, mesh, given.placements, given.sizes))
        else:
            own = [p if _fits(p, given) else Replicate() for p in placements]
            whole.append(given.detach().requires_grad_(given.requires_grad))
            parts.append(distributed(given, dtensor_mesh, own))
    expected, actual = fn(*whole), fn(*parts)
    assert_close(actual, expected, **tolerance)
    if not expected.requires_grad:
        return
    expected.square().sum().backward()
    actual.square().sum().backward()
    for x, part in zip(whole, parts, strict=True):
        if x.requires_grad:
            assert_gradient(part, x.grad, **tolerance)


def assert_gradient(part, expected, **tolerance):
    """`part.grad` lies as `part` does, complete on every rank."""
    assert type(part.grad) is type(part), type(part.grad)
    assert part.grad.placements == part.placements
    if isinstance(part, DTensor):
        assert part.grad.device_mesh == part.device_mesh
        assert part.grad.to_local().shape == part.to_local().shape
        assert part.grad.to_local().stride() == part.to_local().stride()
        mine = distributed(expected, part.device_mesh, part.placements).to_local()
        torch.testing.assert_close(part.grad.to_local(), mine, **tolerance)
    else:
        assert_close(part.grad, expected, what="gradient", **tolerance)


def _fits(placement, tensor):
    return not placement.is_shard() or placement.dim < tensor.dim()


REPLICATE, ROWS, COLUMNS = [Replicate()], [Shard(0)], [Shard(1)]
