"""The layout of a tensor of which each rank knows its own piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C
from shardtensor.device_mesh import core_mesh
from shardtensor.placements import to_core
from shardtensor.spec import ShardTensorSpec, make_spec

if TYPE_CHECKING:
    from shardtensor.placements import Placements


def infer_spec(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    sharding_shapes: str | Mapping[int, Sequence[Sequence[int]]],
    global_shape: Sequence[int] | None,
) -> ShardTensorSpec:
    """See ShardTensor.from_local."""
    where = core_mesh(mesh), [to_core(p) for p in placements]
    if isinstance(sharding_shapes, Mapping):
        along = [sharding_shapes.get(axis, ()) for axis in range(mesh.ndim)]
        core = _C.infer_spec_along_axes(*where, local.shape, along)
    elif sharding_shapes == "chunk" and global_shape is not None:
        return make_spec(mesh, global_shape, placements)
    elif sharding_shapes == "chunk":
        core = _C.infer_even_spec(*where, local.shape)
    elif sharding_shapes == "infer":
        core = _C.infer_spec(local, *where)
    else:
        raise ValueError(
            "from_local: sharding_shapes: expected 'infer', 'chunk' or a dict "
            f"{{mesh dim: shapes}}, got {sharding_shapes!r}"
        )
    spec = ShardTensorSpec(core)
    if global_shape is not None and spec.shape != torch.Size(global_shape):
        raise ValueError(
            f"from_local: the pieces make a tensor of shape {tuple(spec.shape)}, "
            f"global_shape says {tuple(global_shape)}"
        )
    return spec
