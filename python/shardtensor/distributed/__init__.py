"""Starting a distributed program and describing its ranks."""

from shardtensor._C import Launch, LaunchError, detect_launch
from shardtensor.distributed import mpi
from shardtensor.distributed.autograd import (
    all_gather_v,
    all_reduce,
    all_to_all_v,
    broadcast,
    gather_v,
    indexed_all_to_all_v,
    reduce_scatter_v,
    scatter_v,
)
from shardtensor.distributed.config import ProcessGroupConfig, ProcessGroupNode
from shardtensor.distributed.fused_all_reduce import fused_all_reduce
from shardtensor.distributed.groups import GroupError, UndefinedGroupError
from shardtensor.distributed.manager import (
    DistributedManager,
    PhysicsNeMoUndefinedGroupError,
    PhysicsNeMoUninitializedDistributedManagerWarning,
    UninitializedManagerError,
)
from shardtensor.distributed.utils import (
    mark_module_as_shared,
    reduce_loss,
    unmark_module_as_shared,
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
    "all_gather_v",
    "all_reduce",
    "all_to_all_v",
    "broadcast",
    "detect_launch",
    "fused_all_reduce",
    "gather_v",
    "indexed_all_to_all_v",
    "mark_module_as_shared",
    "reduce_loss",
    "reduce_scatter_v",
    "scatter_v",
    "unmark_module_as_shared",
]
