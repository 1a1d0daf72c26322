"""Tables that modules keep, cut where they are registered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_buffer_registration_hook

from shardtensor.create import distribute_tensor
from shardtensor.device_mesh import default_mesh
from shardtensor.placements import check_placements
from shardtensor.shard_tensor import ShardTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


@contextlib.contextmanager
def cut_buffers(
    placements: Mapping[str, Sequence[Placement]],
    device_mesh: DeviceMesh | None = None,
) -> Iterator[None]:
    """Buffers that modules register within it are cut, where `placements` has the
    module's class and the buffer's name, so that no rank keeps a table of the domain's
    size:

        with shardtensor.cut_buffers({"RealSHT.weights": [Shard(-3)]}, mesh):
            transform = torch_harmonics.RealSHT(721, 1440)

    A dim below 0 counts from the buffer's last. All other buffers stay as they are.
    Every rank makes the whole table, the same, and keeps its piece: no communication.
    Where an operator meets the table beside a tensor that is cut alike, nothing moves
    there, either. Default: DistributedManager's mesh."""
    mesh = default_mesh() if device_mesh is None else device_mesh
    told = {name: check_placements(p, mesh.ndim) for name, p in placements.items()}

    def cut(module, name, buffer):
        name = f"{type(module).__name__}.{name}"
        if name not in told or buffer is None:
            return None
        try:
            if isinstance(buffer, ShardTensor):  # made within new_tensors_on
                return buffer.redistribute(placements=told[name])
            return distribute_tensor(buffer, mesh, told[name], src_data_rank=None)
        except (IndexError, ValueError) as error:
            raise type(error)(f"cut_buffers: {name}: {error}") from None

    hook = register_module_buffer_registration_hook(cut)
    try:
        yield
    finally:
        hook.remove()
