"""The same parameters on every rank of a mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.agree import agree, missing_ranks_named
from shardtensor.device_mesh import device_of
from shardtensor.shard_tensor import ShardTensor

TITLE = "sync_module_over_mesh: "
BUCKET = 250_000_000  # bytes in one broadcast of several tensors


def sync_module_over_mesh(
    module: torch.nn.Module,
    mesh: DeviceMesh,
    src_mesh_rank: int = 0,
    verify: bool = False,
) -> None:
    """Gives every plain parameter and buffer the values that it has on the rank
    at position `src_mesh_rank` of a 1-D mesh, in place; DTensors and
    ShardTensors stay. For ranks that seeded differently: domain ranks must hold
    equal weights, and neither DDP nor FSDP2 along another axis sees to it. Call
    it before fully_shard. Arguments that differ between ranks, and modules that do
    in more than values, are an error on all of them; `verify` compares the values
    afterwards, too. Not differentiable. Communication: two small reductions, the state
    in broadcasts of 250 MB, or of one tensor that is larger; of `verify` an
    all-reduce."""
    if mesh.ndim != 1:
        raise ValueError(f"{TITLE}expected a 1-D mesh, got one of {mesh.ndim} axes")
    plain = _make_equal(module, mesh, _plain, src_mesh_rank, verify)
    if verify:
        _compare_values(plain, mesh.get_group(), device_of(mesh))


def sync_pieces_over_mesh(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Gives every DTensor's piece the values that it has on the first rank of a 1-D
    mesh, in place. For DTensors along other axes alone: these ranks hold the same
    piece. Errors and communication: see sync_module_over_mesh."""
    _make_equal(module, mesh, _pieces, 0)


def _make_equal(module, mesh, choose, source, verify=False):
    """What `choose` takes of the module's state, on all ranks."""
    problem, tensors = None, {}
    try:
        _check_module(module, source, mesh)
        state = dict(_state(module))
        tensors = choose(state)
        _check_tensors(tensors, mesh)
    except Exception as error:  # noqa: BLE001  whatever it is, others wait
        problem = error
    agree(mesh, problem, {"src_mesh_rank": source, "verify": bool(verify)}, TITLE)
    agree(mesh, None, _metadata(tensors), f"{TITLE}metadata differs: ", RuntimeError)
    group = mesh.get_group()
    with missing_ranks_named(group):
        for bucket in _buckets(list(tensors.values())):
            _broadcast(bucket, source, group)
    return tensors


def _state(module):
    yield from module.named_parameters()
    yield from module.named_buffers()


def _plain(state):
    plain = {name: x for name, x in state.items() if not is_distributed(x)}
    if state and not plain:
        raise RuntimeError(
            f"{TITLE}the module has {len(state)} tensors, but none of it is plain"
        )
    return plain


def _pieces(state):
    return {
        name: x.detach().to_local()
        for name, x in state.items()
        if is_distributed(x) and not isinstance(x, ShardTensor)
    }


def is_distributed(x):
    if isinstance(x, ShardTensor):
        return True
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(x, tensor.DTensor)


# ---- before -----------------------------------------------------------------


def _check_module(module, source, mesh):
    """Raises where this rank's module cannot be made equal."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{TITLE}expected a module, got {module!r}")
    if not hasattr(source, "__index__"):
        raise TypeError(f"{TITLE}src_mesh_rank: expected an int, got {source!r}")
    if not 0 <= source < mesh.size():
        raise ValueError(
            f"{TITLE}src_mesh_rank {source} is outside a mesh of {mesh.size()} ranks"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp and any(isinstance(m, fsdp.FSDPModule) for m in module.modules()):
        raise RuntimeError(
            f"{TITLE}the module is an FSDP2 module already; call this before "
            "fully_shard"
        )


def _check_tensors(tensors, mesh):
    for name, x in tensors.items():
        if x.is_meta:
            raise RuntimeError(f"{TITLE}{name} is a meta tensor")
        if x.device.type != mesh.device_type:
            raise RuntimeError(
                f"{TITLE}{name} is on {x.device}, the mesh on {mesh.device_type}"
            )


def _metadata(plain):
    """What must be alike before values can be."""
    return [
        (name, tuple(x.shape), str(x.dtype), str(x.layout)) for name, x in plain.items()
    ]


# ---- the values -------------------------------------------------------------


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for x in tensors:
        if size and size + x.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(x)
        size += x.nbytes
    if size:
        yield bucket


def _broadcast(bucket, source, group):
    """As bytes, for dtypes that backends do not know."""
    sent = [x.detach().contiguous().view(-1).view(torch.uint8) for x in bucket]
    flat = torch.cat(sent)
    dist.broadcast(flat, group=group, group_src=source)
    if dist.get_rank(group) == source:
        return
    with torch.no_grad():
        for x, piece in zip(
            bucket, flat.split([x.nbytes for x in bucket]), strict=True
        ):
            # A clone begins where its dtype may.
            x.copy_(piece.clone().view(x.dtype).view(x.shape))


def _compare_values(plain, group, device):
    """By checksums, on all ranks alike."""
    if not plain:
        return
    mine = torch.stack([_checksum(x.detach()) for x in plain.values()]).to(device)
    extremes = torch.stack([mine, -mine])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    differs = (extremes[0] != -extremes[1]).any(dim=1).tolist()
    names = [name for name, bad in zip(plain, differs, strict=True) if bad]
    if names:
        raise RuntimeError(f"{TITLE}checksums differ: {names}")


def _checksum(x):
    """In double: the sum of the finite values, how many are not."""
    x = torch.view_as_real(x) if x.is_complex() else x
    x = x.double()
    finite = torch.where(x.isfinite(), x, 0).sum()
    return torch.stack([finite, *(n.sum().double() for n in (x.isnan(), x.isinf()))])
