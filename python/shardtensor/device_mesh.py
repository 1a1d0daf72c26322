"""PyTorch's DeviceMesh and the core's Mesh, one for one."""

import collections
import hashlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.utils._python_dispatch import _disable_current_modes

from shardtensor import _C
from shardtensor.compile import as_written

# Neither knows the other; both are few and live as long as the job.
_core_meshes: dict[DeviceMesh, _C.Mesh] = {}
_device_meshes: dict[_C.Mesh, DeviceMesh] = {}
_groups: dict[DeviceMesh, dist.ProcessGroup] = {}
# In each job, how often the same ranks have made a group.
_made: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_joint_meshes: dict[tuple[_C.Mesh, _C.Mesh], _C.Mesh | None] = {}
_job: weakref.ref | None = None  # the default group that these belong to
_forgetters: list[Callable[[], None]] = []


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
        group = _group_of(ranks)
        _groups[mesh] = group
    return group


def group_along(mesh: DeviceMesh, axis: int | str) -> dist.ProcessGroup:
    """Of this rank. A mesh of one axis has one, also for an axis that there is not."""
    if mesh.ndim == 1:
        return mesh.get_group()
    check_axis(mesh, axis)
    return mesh.get_group(axis)


def check_axis(mesh: DeviceMesh, axis: int | str) -> None:
    if torch.compiler.is_compiling():
        return
    names = mesh.mesh_dim_names or ()
    axes = range(-mesh.ndim, mesh.ndim)
    if axis not in (names if isinstance(axis, str) else axes):
        raise IndexError(f"mesh_dim: expected an axis of {mesh}, got {axis!r}")


def _group_of(ranks):
    """A group that these ranks make without the others. A default group that is
    bound to a device would split its communicator, which takes every rank. PyTorch
    would name it by how many groups this rank is in, and others may be in fewer."""
    world = dist.group.WORLD
    made = _made.setdefault(world, collections.Counter())
    made[tuple(ranks)] += 1
    text = f"shardtensor {ranks} {made[tuple(ranks)]}".encode()
    name = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    device, world.bound_device_id = world.bound_device_id, None
    naming = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: name
    try:
        return dist.new_group(ranks, use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = naming
        world.bound_device_id = device


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank's pieces of tensors on `mesh` are."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def moves_on_host(mesh: DeviceMesh) -> bool:
    """Whether the mesh's group has a backend for host tensors, too."""
    return torch.device("cpu") in whole_group(mesh)._device_types


def core_mesh(mesh: DeviceMesh) -> _C.Mesh:
    """The core's Mesh of this DeviceMesh. Communication: see whole_group."""
    _forget_an_earlier_job()
    found = _core_meshes.get(mesh)
    if found is not None and _took_its_place(mesh, _device_meshes[found]):
        del _core_meshes[mesh]
        found = None
    if found is None:
        with _disable_current_modes():  # its numbers are numbers, also in a trace
            found = _make_core_mesh(mesh)
        _core_meshes[mesh] = found
        _device_meshes.setdefault(found, mesh)
    return found


def _took_its_place(mesh, known):
    """Whether an equal DeviceMesh has other groups because those of the known one were
    destroyed. That one then lets go of them, for gloo's threads to end."""
    if mesh is known or _group_names(mesh) == _group_names(known) or _has_groups(known):
        return False
    registry = getattr(known, "_pg_registry", {})
    for name in [name for name, group in registry.items() if not _alive(group)]:
        del registry[name]
    return True


def _group_names(mesh):
    return getattr(mesh, "_dim_group_names", None)


def _has_groups(mesh):
    try:
        return all(_alive(mesh.get_group(axis)) for axis in range(mesh.ndim))
    except (KeyError, RuntimeError, ValueError):
        return False


def device_mesh(mesh: _C.Mesh) -> DeviceMesh:
    """The DeviceMesh of one of the core's meshes."""
    if mesh not in _device_meshes:
        raise RuntimeError(f"{mesh} was not made from a DeviceMesh")
    return _device_meshes[mesh]


def find_mesh(
    device_type: str, ranks: list, names: tuple[str, ...] | None
) -> DeviceMesh:
    """The mesh of these ranks that the program uses already, else a new one
    (which all ranks then make together)."""
    for mesh in _core_meshes:
        known = mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names
        if known == (device_type, ranks, names) and _has_groups(mesh):
            return mesh
    return DeviceMesh(
        device_type, torch.tensor(ranks, device="cpu"), mesh_dim_names=names
    )


@as_written
def joint_mesh(one: _C.Mesh, other: _C.Mesh) -> _C.Mesh | None:
    """The smallest mesh that has the axes of both; None where no device mesh
    has them. Communication: see whole_group."""
    key = one, other
    if key not in _joint_meshes:
        with _disable_current_modes():  # see core_mesh
            _joint_meshes[key] = _find_joint_mesh(one, other)
    return _joint_meshes[key]


def _find_joint_mesh(one, other):
    roots = [device_mesh(mesh)._get_root_mesh() for mesh in (one, other)]
    first, second = ({*root.mesh.flatten().tolist()} for root in roots)
    if first != second:
        return None  # some ranks would see axes that others do not
    for whole in itertools.chain((one, other), map(core_mesh, roots)):
        if _C.has_axes(whole, one) and _C.has_axes(whole, other):
            return _without_other_axes(whole, one, other)
    return None


def _without_other_axes(whole, *parts):
    """The sub-mesh of `whole` that has just the axes of the parts, where axes
    have names to ask for it by."""
    names = {name for part in parts for name in part.axis_names}
    needed = tuple(name for name in whole.axis_names if name in names)
    if len(needed) == len(whole.shape) or len(needed) < len(names) or not needed:
        return whole
    smaller = core_mesh(device_mesh(whole)[needed])
    return smaller if all(_C.has_axes(smaller, part) for part in parts) else whole


def default_mesh() -> DeviceMesh:
    """The mesh of a call that names none: that of the `with` around it, as DTensor has
    it, else DistributedManager's."""
    from shardtensor.distributed import DistributedManager

    if _mesh_resources.mesh_stack:
        return _mesh_resources.get_current_mesh()
    if not DistributedManager.is_initialized():
        raise ValueError(
            "device_mesh: expected a DeviceMesh; there is no default one: no mesh is "
            "entered, and DistributedManager is not initialized"
        )
    return DistributedManager().global_mesh


def forget_groups(meshes: Iterable[DeviceMesh]) -> None:
    """Before torch.distributed.destroy_process_group: lets go of every group,
    also those that these DeviceMeshes and those of tensors hold. gloo's threads
    end with the last reference; one that still runs when the interpreter ends
    aborts."""
    global _job
    _job = None
    for mesh in (*_core_meshes, *meshes):
        for known in (mesh, mesh._get_root_mesh()):
            getattr(known, "_pg_registry", {}).clear()
    for known in (_groups, _core_meshes, _device_meshes, _joint_meshes):
        known.clear()
    for forget in _forgetters:
        forget()
    _forget_default_groups()


def on_forget(forget: Callable[[], None]) -> Callable[[], None]:
    """Has forget_groups call it: for what else holds groups or meshes."""
    _forgetters.append(forget)
    return forget


def _forget_an_earlier_job():
    """A program may leave and join without DistributedManager. A DeviceMesh of the new
    job is equal to one of the old, whose groups' names now mean others."""
    global _job
    world = dist.group.WORLD
    if _job is not None and _job() is not world:
        forget_groups(())
    if _job is None and world is not None:
        _job = weakref.ref(world)


def _forget_default_groups():
    """The functions of torch.distributed.nn have as default argument the group
    that existed when PyTorch imported them, with torch._dynamo for one. None
    stands for the default group, too."""
    functional = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(functional).values() if functional else ():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(value, dist.ProcessGroup) for value in defaults):
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value
                for value in defaults
            )


def _make_core_mesh(mesh):
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"device_mesh: expected a DeviceMesh, got {mesh!r}")
    ranks = mesh.mesh.flatten().tolist()
    me = dist.get_rank()
    position = ranks.index(me) if me in ranks else -1
    axis_groups, group = [""] * mesh.ndim, ""
    if position >= 0:
        axis_groups = [mesh.get_group(i).group_name for i in range(mesh.ndim)]
        group = whole_group(mesh).group_name
    names = list(mesh.mesh_dim_names or ())
    shape = list(mesh.mesh.shape)
    return _C.make_mesh(shape, ranks, names, axis_groups, group, position)


def _alive(group):
    try:
        return dist.get_process_group_ranks(group) is not None
    except (KeyError, RuntimeError, ValueError):
        return False
