"""Starting a distributed program and describing its ranks."""

from shardtensor._C import Launch, LaunchError, detect_launch
from shardtensor.distributed import mpi
from shardtensor.distributed.manager import (
    DistributedManager,
    UndefinedGroupError,
    UninitializedManagerError,
)

mpi.register()

__all__ = [
    "DistributedManager",
    "Launch",
    "LaunchError",
    "UndefinedGroupError",
    "UninitializedManagerError",
    "detect_launch",
]
