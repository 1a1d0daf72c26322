"""PyTorch's DeviceMesh: the group of all its ranks."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_groups: dict[DeviceMesh, dist.ProcessGroup] = {}


def whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of `mesh`, in row-major order. The first call for
    a mesh of several axes that is not the whole job makes a group: every rank
    of the mesh takes part."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = mesh.mesh.flatten().tolist()
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    group = _groups.get(mesh)
    if group is None or not _alive(group):
        group = dist.new_group(ranks, use_local_synchronization=True)
        _groups[mesh] = group
    return group


def forget_groups() -> None:
    """After torch.distributed.destroy_process_group."""
    _groups.clear()


def _alive(group):
    try:
        return dist.get_process_group_ranks(group) is not None
    except (KeyError, RuntimeError, ValueError):
        return False
