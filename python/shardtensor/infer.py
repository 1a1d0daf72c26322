"""The layout of a tensor of which each rank knows its own piece."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C
from shardtensor.mesh import core_mesh
from shardtensor.placements import to_core
from shardtensor.spec import ShardTensorSpec, make_spec

if TYPE_CHECKING:
    from shardtensor.placements import Placements

# What ranks tell each other: dims, a hash of everything that must be equal,
# and the local shape.
MAX_DIMS = 30


def infer_spec(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    sharding_shapes: str | Mapping[int, Sequence[Sequence[int]]],
    global_shape: Sequence[int] | None,
) -> ShardTensorSpec:
    """See ShardTensor.from_local."""
    placements = _positive(placements, local.dim())
    if isinstance(sharding_shapes, Mapping):
        spec = _from_shapes(local, mesh, placements, sharding_shapes)
    elif sharding_shapes == "chunk":
        shape = global_shape or _even_shape(local, mesh, placements)
        spec = make_spec(mesh, shape, placements)
    elif sharding_shapes == "infer":
        spec = _ask_ranks(local, mesh, placements)
    else:
        raise ValueError(
            "from_local: sharding_shapes: expected 'infer', 'chunk' or a dict "
            f"{{mesh dim: shapes}}, got {sharding_shapes!r}"
        )
    if global_shape is not None and spec.shape != torch.Size(global_shape):
        raise ValueError(
            f"from_local: the pieces make a tensor of shape {tuple(spec.shape)}, "
            f"global_shape says {tuple(global_shape)}"
        )
    return spec


def _positive(placements, ndim):
    for placement in placements:
        if placement.is_shard() and not -ndim <= placement.dim < ndim:
            raise IndexError(f"from_local: {placement} of a tensor with {ndim} dims")
    return tuple(type(p)(p.dim % ndim) if p.is_shard() else p for p in placements)


def _axes(placements, dim):
    return [i for i, p in enumerate(placements) if p.is_shard(dim)]


def _sharded_dims(placements):
    return sorted({p.dim for p in placements if p.is_shard()})


def _even_shape(local, mesh, placements):
    shape = list(local.shape)
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            shape[placement.dim] *= mesh.size(axis)
    return shape


def _from_shapes(local, mesh, placements, shapes):
    shape, sizes = list(local.shape), {}
    for dim in _sharded_dims(placements):
        axes = _axes(placements, dim)
        if len(axes) > 1:
            raise ValueError(
                f"from_local: mesh dims {axes} all shard dim {dim}: shapes along "
                "one of them do not say how it is cut; use sharding_shapes='infer'"
            )
        if len(shapes.get(axes[0], ())) != mesh.size(axes[0]):
            raise ValueError(
                f"from_local: sharding_shapes[{axes[0]}]: expected "
                f"{mesh.size(axes[0])} shapes along mesh dim {axes[0]}, got "
                f"{shapes.get(axes[0])}"
            )
        sizes[dim] = [piece[dim] for piece in shapes[axes[0]]]
        shape[dim] = sum(sizes[dim])
    return make_spec(mesh, shape, placements, sizes)


def _ask_ranks(local, mesh, placements):
    """One gather of the local shapes; all ranks then decide alike."""
    told = _gather(local, mesh, placements)
    shapes = _agreeing_shapes(told, local)
    core = core_mesh(mesh)
    shape, sizes = list(shapes[0]), {}
    for dim in range(local.dim()):
        axes = _axes(placements, dim)
        pieces = _pieces(core, axes, dim, [s[dim] for s in shapes])
        if axes:
            sizes[dim] = pieces
        shape[dim] = sum(pieces)
    return make_spec(mesh, shape, placements, sizes)


def _pieces(core, axes, dim, extents):
    """The extent of each piece that `axes` cut; the ranks that hold the same
    piece must agree."""
    pieces: dict[tuple, int] = {}
    for position, extent in enumerate(extents):
        piece = tuple(core.coordinate(position, axis) for axis in axes)
        if pieces.setdefault(piece, extent) != extent:
            raise ValueError(
                f"from_local: dim {dim} must have one extent on all ranks that "
                f"hold the same piece, but by rank it is {extents}"
            )
    return [pieces[piece] for piece in sorted(pieces)]


def _gather(local, mesh, placements):
    if local.dim() > MAX_DIMS:
        raise ValueError(f"from_local: at most {MAX_DIMS} dims, got {local.dim()}")
    layout = f"{[to_core(p) for p in placements]} {local.dtype} {local.device.type}"
    mine = [local.dim(), zlib.crc32(layout.encode()), *local.shape]
    mine += [0] * (MAX_DIMS + 2 - len(mine))
    core = core_mesh(mesh)
    table = torch.zeros(mesh.size(), len(mine), dtype=torch.int64)
    table[core.position] = torch.tensor(mine)
    return _C.all_reduce(table.to(local.device), "sum", core.group).tolist()


def _agreeing_shapes(told, local):
    dims = [row[0] for row in told]
    if len(set(dims)) > 1:
        raise ValueError(
            f"from_local: the local tensors have different numbers of dims, by "
            f"rank: {dims}"
        )
    if len({row[1] for row in told}) > 1:
        raise ValueError(
            "from_local: the ranks differ in placements, dtype or device type; "
            f"this one has {local.dtype} on {local.device.type}"
        )
    return [row[2 : 2 + row[0]] for row in told]
