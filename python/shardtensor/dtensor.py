"""What the core needs to know of PyTorch's DTensors."""

from __future__ import annotations

import copy

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardtensor import _C
from shardtensor.device_mesh import core_mesh, joint_mesh
from shardtensor.placements import to_core

# Layouts of DTensors seen: few, one for each shape and placement of parameters.
_layouts: dict[DTensorSpec, _C.DTensorLayout] = {}
_MOST_LAYOUTS = 4096


def plain_layout(dtensor: DTensor) -> DTensor:
    """The DTensor itself, or one that lies as a ShardTensor can: PyTorch has
    placements of its own for pending norms, masked rows and axes that cut a dim
    in another order than theirs. Communication: then a redistribution."""
    spec = dtensor._spec
    if spec in _layouts or _is_plain(spec):
        return dtensor
    return dtensor.redistribute(placements=[Replicate()] * len(spec.placements))


def open_dtensor(dtensor: DTensor) -> tuple[torch.Tensor, _C.DTensorLayout]:
    """This rank's piece itself, and how the pieces lie."""
    local, spec = dtensor._local_tensor, dtensor._spec
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if _C.is_shard_tensor(local):
        raise TypeError(
            "expected a DTensor of plain tensors beside ShardTensors, got one of "
            "ShardTensors (see shardtensor.nested); to_local() gives these"
        )
    found = _layouts.get(spec)
    if found is None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        found = _layouts[copy.copy(spec)] = _layout_of(spec)
    return local, found


def forget_layouts() -> None:
    """With the groups of their meshes, see forget_groups."""
    _layouts.clear()


def _is_plain(spec):
    known = Shard, Replicate, Partial
    return all(type(p) in known for p in spec.placements) and _is_in_order(spec)


def _is_in_order(spec):
    usual = DTensorSpec.compute_default_shard_order(spec.placements)
    return spec.shard_order in (None, usual)


def _layout_of(spec):
    if not _is_plain(spec):
        raise NotImplementedError(
            f"expected a DTensor of Shard, Replicate and Partial placements whose "
            f"mesh axes cut a dim in their order, got {spec}"
        )
    core = _C.make_spec(
        core_mesh(spec.mesh), list(spec.shape), [to_core(p) for p in spec.placements]
    )
    whole = [Replicate() if p.is_partial() else p for p in spec.placements]
    like = DTensorSpec(spec.mesh, tuple(whole), tensor_meta=spec.tensor_meta)

    def make(local):
        # A copy, for PyTorch fills specs in. Not DTensor(...): its __init__
        # imports the compiler.
        return DTensor.__new__(DTensor, local, copy.copy(like), requires_grad=False)

    return _C.DTensorLayout(core, make)


_C.set_dtensor_bridge(DTensor, plain_layout, open_dtensor, joint_mesh)
