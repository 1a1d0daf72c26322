"""The layout of a tensor of which each rank knows its own piece."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C
from shardtensor.agree import kind_of
from shardtensor.device_mesh import core_mesh
from shardtensor.placements import to_core

if TYPE_CHECKING:
    from shardtensor.placements import Placements

# For each mesh axis the shapes of the pieces along it.
ShapesAlongAxes = Mapping[int, Sequence[Sequence[int]]]


@contextlib.contextmanager
def errors_while_asking(mesh: DeviceMesh, sharding_shapes: object):
    """What Python finds wrong in a call whose ranks ask each other for their pieces,
    which they do unless they are told: an error on all ranks of the mesh."""
    try:
        yield
    except Exception as problem:
        if isinstance(sharding_shapes, Mapping) or sharding_shapes == "chunk":
            raise
        _C.raise_in_infer_spec(core_mesh(mesh), kind_of(problem), str(problem))


def infer_layout(
    op: str,
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    sharding_shapes: str | ShapesAlongAxes,
    global_shape: Sequence[int] | None,
    alike: str = "",
) -> _C.ShardSpec:
    """See ShardTensor.from_local. `alike`: what else all ranks that ask are told."""
    where = core_mesh(mesh), [to_core(p) for p in placements]
    if isinstance(sharding_shapes, Mapping):
        along = [sharding_shapes.get(axis, ()) for axis in range(mesh.ndim)]
        core = _C.infer_spec_along_axes(*where, local.shape, along)
    elif sharding_shapes == "chunk" and global_shape is not None:
        return _C.make_spec(where[0], list(global_shape), where[1], [])
    elif sharding_shapes == "chunk":
        core = _C.infer_even_spec(*where, local.shape)
    elif sharding_shapes == "infer":
        wanted = None if global_shape is None else list(global_shape)
        alike += "" if wanted is None else f", global_shape {wanted}"
        core = _C.infer_spec(local, *where, alike)
    else:
        with errors_while_asking(mesh, sharding_shapes):
            raise ValueError(
                f"{op}: sharding_shapes: expected 'infer', 'chunk' or a dict "
                f"{{mesh dim: shapes}}, got {sharding_shapes!r}"
            )
    if global_shape is not None and list(core.sizes) != list(global_shape):
        raise ValueError(
            f"{op}: the pieces make a tensor of shape {tuple(core.sizes)}, expected "
            f"{tuple(global_shape)}"
        )
    return core


def from_pieces(
    op: str,
    local: torch.Tensor,
    layout: _C.ShardSpec,
    stride: Sequence[int] | None,
    grad_layout: _C.ShardSpec | None = None,
) -> torch.Tensor:
    """The tensor of these pieces, which shows the strides, contiguous ones for None."""
    if stride is None:
        return _C.from_local(local, layout, grad_spec=grad_layout)
    order = _order_of(op, layout.sizes, stride)
    contiguous = _C.from_local(
        local.permute(order),
        _permuted(layout, order),
        grad_spec=grad_layout and _permuted(grad_layout, order),
    )
    return contiguous.permute([order.index(dim) for dim in range(len(order))])


def _permuted(layout, order):
    placements = [
        _C.Placement.shard(order.index(p.dim)) if p.kind == "shard" else p
        for p in layout.placements
    ]
    return _C.make_spec(
        layout.mesh,
        [layout.sizes[dim] for dim in order],
        placements,
        [layout.partitions[dim] for dim in order],
    )


def _order_of(op, shape, stride):
    """Of the dims of a dense tensor, from the largest stride to the smallest."""
    problem = ValueError(
        f"{op}: expected the stride of a dense tensor of shape {tuple(shape)}, got "
        f"{tuple(stride)}"
    )
    if len(stride) != len(shape):
        raise problem
    dims = range(len(shape))
    order = sorted(dims, key=lambda dim: (stride[dim], shape[dim] != 1, -dim))
    expected = 1
    for dim in order:
        if shape[dim] != 1 and stride[dim] != expected:
            raise problem
        expected *= max(shape[dim], 1)
    return order[::-1]
