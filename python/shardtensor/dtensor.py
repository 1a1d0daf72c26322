"""What the core needs to know of PyTorch's DTensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardtensor import _C
from shardtensor.device_mesh import core_mesh, joint_mesh, on_forget, whole_group
from shardtensor.placements import to_core

# Layouts of DTensors seen: few, one for each shape and placement of parameters.
_layouts: dict[DTensorSpec, _C.DTensorLayout] = {}
_MOST_LAYOUTS = 4096

# Meshes over which FSDP cuts parameters, other than those of ShardTensors, and the
# names of the axes that FSDP has.
_of_fsdp: dict[DeviceMesh, set[str]] = {}


def note_cut_by_fsdp(mesh: DeviceMesh, parameters: Iterable[DTensor]) -> None:
    """FSDP has cut these parameters over `mesh`, along whose axes ranks may have other
    samples: where ShardTensors meet them they are gathered."""
    axes = {*mesh.mesh_dim_names}
    for parameter in parameters:
        if axes <= {*parameter.device_mesh.mesh_dim_names}:
            _of_fsdp[parameter.device_mesh] = axes
            _keep_placements_of_gradient(parameter)


def _keep_placements_of_gradient(parameter):
    """Operators on DTensors alone choose others, to which FSDP would add its own."""
    placements = parameter.placements
    if parameter.requires_grad:
        parameter.register_hook(lambda grad: grad.redistribute(placements=placements))


def plain_layout(dtensor: DTensor) -> torch.Tensor:
    """The DTensor itself, or one that lies as a ShardTensor can: PyTorch has
    placements of its own for pending norms, masked rows and axes that cut a dim
    in another order than theirs. Communication: then a redistribution.

    What FSDP has cut is gathered, as FSDP does inside the modules whose parameters
    these are: a plain tensor."""
    spec = dtensor._spec
    if spec.mesh in _of_fsdp:
        return _gathered(dtensor)
    if spec in _layouts or _is_plain(spec):
        return dtensor
    return dtensor.redistribute(placements=[Replicate()] * len(spec.placements))


def _gathered(dtensor):
    from shardtensor.distributed.autograd import reduced

    mesh = dtensor.device_mesh
    if others := [n for n in mesh.mesh_dim_names if n not in _of_fsdp[mesh]]:
        raise NotImplementedError(
            "a parameter that FSDP has cut, and that is cut along "
            f"{others}, too, meets a ShardTensor outside of the module that has it; "
            "put the modules that share it into one of FSDP's units"
        )
    whole, group = dtensor.full_tensor(), whole_group(mesh).group_name
    if whole.requires_grad:  # FSDP's gradients are means over its ranks
        whole.register_hook(lambda grad: reduced(grad, "avg", group))
    return whole


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


@on_forget
def forget_layouts() -> None:
    """With the groups of their meshes, see forget_groups."""
    _layouts.clear()
    _of_fsdp.clear()


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
