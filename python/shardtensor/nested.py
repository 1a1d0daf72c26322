"""DTensors of ShardTensors: what tensor parallelism makes of activations.

PyTorch's parallel styles (ColwiseParallel, RowwiseParallel, ...) call
DTensor.from_local with what enters a module and to_local with what leaves it.
The local tensor of one rank is then a ShardTensor on the domain mesh, and the
DTensor says how these lie along another axis. DTensor's operators work on such
local tensors as on any; what is done here keeps parameters' gradients plain.
"""

from __future__ import annotations

import copy
import functools

import torch
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import _mesh_resources
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

import shardtensor.dtensor  # noqa: F401  tells the core what a DTensor is
from shardtensor import _C
from shardtensor.compile import as_written
from shardtensor.shard_tensor import ShardTensor

# They name the tensors of a program, whose gradients they want.
_ABOUT_GRADIENTS = {torch.autograd.grad, torch.Tensor.backward}


class NestedDTensor(DTensor):
    """A DTensor whose local tensor is a ShardTensor. A parameter that meets it
    is taken as Replicate on the domain mesh; its gradient is summed there and
    lies as the parameter does."""

    __slots__ = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _ABOUT_GRADIENTS:
            leaves = tree_leaves((args, kwargs))
            like = next(t for t in leaves if isinstance(t, NestedDTensor))
            args, kwargs = tree_map(lambda t: _beside(t, like), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return tree_map(nested, func(*args, **kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """A compiler calls operators from here on; its tensors keep their class."""
        args, kwargs = tree_map(_as_dtensor, (args, kwargs or {}))
        return tree_map(nested, func(*args, **kwargs))

    @staticmethod
    def __tensor_unflatten__(inner_tensors, told, size, stride):
        """In a graph sizes are numbers, as ShardTensors' are."""
        size, stride = torch.Size(map(int, size)), tuple(map(int, stride))
        return nested(DTensor.__tensor_unflatten__(inner_tensors, told, size, stride))

    def redistribute(self, device_mesh=None, placements=None, **options) -> DTensor:
        options["async_op"] = False  # an unfinished tensor would hide the ShardTensor
        return nested(super().redistribute(device_mesh, placements, **options))


def nested(value):
    """The value; a DTensor of a ShardTensor gets its class."""
    if type(value) is DTensor and _C.is_shard_tensor(value._local_tensor):
        value.__class__ = NestedDTensor
    return value


def _as_dtensor(value):
    if type(value) is not NestedDTensor:
        return value
    local, grad = value._local_tensor, value.requires_grad
    return DTensor.__new__(DTensor, local, value._spec, requires_grad=grad)


def _beside(value, like):
    """The value as it meets `like`, a DTensor of a ShardTensor."""
    if type(value) is DTensor:
        return _OnDomain.apply(value, _C.spec(like._local_tensor).mesh)
    if isinstance(value, torch.Tensor) and _C.is_shard_tensor(value):
        mesh = like.device_mesh
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim)
    return value


class _OnDomain(torch.autograd.Function):
    """A DTensor's plain local tensor, taken as Replicate on the domain mesh."""

    @staticmethod
    def forward(ctx, dtensor, mesh):
        ctx.spec, ctx.strides = dtensor._spec, dtensor._local_tensor.stride()
        local = _C.promote(dtensor._local_tensor.detach(), mesh)
        return DTensor.__new__(
            NestedDTensor, local, copy.copy(dtensor._spec), requires_grad=False
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        whole = [Replicate() if p.is_partial() else p for p in ctx.spec.placements]
        local = nested(grad).redistribute(placements=whole)._local_tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        if _C.is_shard_tensor(local):
            local = _C.local(_C.redistribute(local, _C.spec(local).replicated()))
        like = copy.copy(ctx.spec)
        like.placements = tuple(whole)
        local = torch.empty_strided(
            local.shape, ctx.strides, dtype=local.dtype, device=local.device
        ).copy_(local)
        return DTensor.__new__(DTensor, local, like, requires_grad=False), None


def _finished(tensor):
    """A collective's result at once: unfinished it would be an
    AsyncCollectiveTensor, which would hide the ShardTensor."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


if hasattr(torch.ops._c10d_functional, "_wrap_tensor_autograd"):
    _C.set_handler("_c10d_functional::_wrap_tensor_autograd", _finished)

_from_local = DTensor.from_local


@functools.wraps(_from_local)
def _nested_from_local(local_tensor, *args, **kwargs):
    if isinstance(local_tensor, ShardTensor):
        return _from_shard_tensor(local_tensor, *args, **kwargs)
    return _from_local(local_tensor, *args, **kwargs)


@as_written  # a graph's result would be of PyTorch's class, and so its gradient
def _from_shard_tensor(local_tensor, device_mesh=None, *args, **kwargs):
    mesh = device_mesh or _mesh_resources.get_current_mesh()
    _check_beside(local_tensor, mesh)
    return nested(_from_local(local_tensor, mesh, *args, **kwargs))


def _check_beside(tensor, mesh):
    """What DTensor works on along its axes is one piece, the same on all their ranks:
    nothing that differs between them, of which it knows nothing."""
    core = _C.spec(tensor)
    for axis, placement in enumerate(core.placements):
        if placement.kind != "replicate" and _shares(core.mesh, axis, mesh):
            raise ValueError(
                "DTensor.from_local: expected a ShardTensor that is the same along the "
                f"axes of {mesh}, got {core}; take an axis beside the domain's for "
                "tensor parallelism, or redistribute() the tensor to Replicate there"
            )


def _shares(own, axis, mesh):
    """Whether ranks along this axis are in the other mesh, too."""
    line = [own.with_coordinate(own.position, axis, i) for i in range(own.shape[axis])]
    others = {own.ranks[p] for p in line if p != own.position}
    return not others.isdisjoint(mesh.mesh.flatten().tolist())


DTensor.from_local = staticmethod(_nested_from_local)
