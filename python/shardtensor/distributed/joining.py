"""Which job a process belongs to, and joining it."""

import os

import torch
import torch.distributed as dist

from shardtensor import _C
from shardtensor.distributed import mpi


def adopted():
    """The launch of a process group that the program made itself."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    told = os.environ.get("LOCAL_RANK")
    local_rank = int(told) if told else local_rank_of(rank, world_size)
    return _C.Launch(rank, world_size, local_rank, "", 0, "existing")


def local_rank_of(rank, world_size):
    """Where nobody tells it."""
    return rank % (torch.cuda.device_count() or world_size)


def join(launch, backend=None, pg_options=None):
    """Makes the default group, with the other ranks."""
    if dist.is_initialized():
        raise RuntimeError("DistributedManager: there is a process group already")
    device = device_of(launch, backend)
    backend = backend or backend_of(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # c10d asks for the current one here and there
    dist.init_process_group(
        name_in_torch(backend),
        **_meeting(launch),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=_C.time_limit(),
        pg_options=pg_options or _default_options(backend),
        device_id=device if device.type == "cuda" else None,
    )


def _default_options(backend):
    if backend != "nccl":
        return None
    if not dist.is_nccl_available():
        raise ValueError(
            "backend: nccl, which this PyTorch was built without; expected gloo or mpi"
        )
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = _C.time_limit()
    return options


def _meeting(launch):
    """Where the ranks meet: init_process_group's arguments."""
    address, limit = _C.address_of_rank_0(launch), _C.time_limit()
    # A launcher's store that has seen ranks before these.
    name = _C.name_in_launchers_store(launch, limit)
    if not name:
        return {"init_method": f"tcp://{address}:{launch.port}"}
    store = dist.TCPStore(address, launch.port, is_master=False, timeout=limit)
    return {"store": dist.PrefixStore(name, store)}


def name_in_torch(backend):
    """What init_process_group calls it."""
    # With NCCL both, so that host tensors can be reduced next to device tensors.
    names = {"nccl": "cpu:gloo,cuda:nccl", "mpi": mpi.BACKEND}
    return names.get(backend, backend)


def device_of(launch, backend=None):
    """One GPU for each rank, else the host."""
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    return _C.choose_device(launch, gpus, backend or "")


def backend_of(launch):
    """What the environment says, else the best there is."""
    return _C.choose_backend("", launch, device_of(launch), _C.has_mpi())
