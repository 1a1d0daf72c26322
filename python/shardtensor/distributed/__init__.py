"""Starting a distributed program and describing its ranks."""

from shardtensor._C import Launch, LaunchError, detect_launch
from shardtensor.distributed import mpi
from shardtensor.distributed.config import ProcessGroupConfig, ProcessGroupNode
from shardtensor.distributed.manager import (
    DistributedManager,
    GroupError,
    PhysicsNeMoUndefinedGroupError,
    PhysicsNeMoUninitializedDistributedManagerWarning,
    UndefinedGroupError,
    UninitializedManagerError,
)

mpi.register()

__all__ = [
    "DistributedManager",
    "GroupError",
    "Launch",
    "LaunchError",
    "PhysicsNeMoUndefinedGroupError",
    "PhysicsNeMoUninitializedDistributedManagerWarning",
    "ProcessGroupConfig",
    "ProcessGroupNode",
    "UndefinedGroupError",
    "UninitializedManagerError",
    "detect_launch",
]
