"""Tensors sharded over ranks, for unchanged PyTorch models.

import shardtensor
from shardtensor import ShardTensor, Shard

shardtensor.distributed.DistributedManager.initialize()
mesh = shardtensor.distributed.DistributedManager().global_mesh
x = ShardTensor.from_local(piece, mesh, (Shard(2),))
model(x).square().mean().backward()
"""

import importlib
from typing import TYPE_CHECKING

import torch  # noqa: F401  its libraries come before ours
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardtensor import _patches, distributed, nn
from shardtensor._C import is_shard_tensor
from shardtensor.buffers import cut_buffers
from shardtensor.constants import new_tensors_on
from shardtensor.contract import einsum, tensordot, transpose
from shardtensor.create import (
    distribute_tensor,
    empty,
    full,
    ones,
    rand,
    randn,
    scatter_tensor,
    zeros,
)
from shardtensor.distribute_module import distribute_module
from shardtensor.grad_ops import ContiguousGrad, GradReducer
from shardtensor.graph import ShardGraph, partition_nodes
from shardtensor.halo import (
    HaloConfig,
    halo_exchange,
    halo_padding,
    halo_trim,
    unhalo_padding,
)
from shardtensor.modes import (
    CommStats,
    TensorPromotionMode,
    attention_transport,
    check_mode,
    comm_stats,
    conv_overlap_bytes,
    fallback_counts,
    fallback_mode,
    get_attention_transport,
    get_check_mode,
    get_conv_overlap_bytes,
    get_fallback_mode,
    get_gradient_bucket_bytes,
    get_gradient_policy,
    get_point_transport,
    get_random_policy,
    gradient_bucket_bytes,
    gradient_policy,
    point_transport,
    random_policy,
    reset_comm_stats,
    reset_fallback_counts,
    set_attention_transport,
    set_check_mode,
    set_communication_timeout,
    set_conv_overlap_bytes,
    set_fallback_mode,
    set_gradient_bucket_bytes,
    set_gradient_policy,
    set_point_transport,
    set_random_policy,
)
from shardtensor.parallelize import check_replicas, parallelize
from shardtensor.patch_core import MissingShardPatch, UndeterminedShardingError
from shardtensor.ring import (
    RingPassingConfig,
    perform_ring_iteration,
    perform_ring_iteration_async,
    ring_sum,
    ring_tour,
)
from shardtensor.shard_tensor import ShardTensor
from shardtensor.spec import (
    ShardTensorSpec,
    compute_sharding_shapes_from_chunking_global_shape,
    make_spec,
)
from shardtensor.sync import sync_module_over_mesh

if TYPE_CHECKING:
    from torch.distributed.tensor import Partial, Placement, Replicate, Shard

    from shardtensor import checkpoint, io, mesh

__all__ = [
    "ST_AVAILABLE",
    "CommStats",
    "ContiguousGrad",
    "DeviceMesh",
    "GradReducer",
    "HaloConfig",
    "MissingShardPatch",
    "Partial",
    "Placement",
    "Replicate",
    "RingPassingConfig",
    "Shard",
    "ShardGraph",
    "ShardTensor",
    "ShardTensorSpec",
    "TensorPromotionMode",
    "UndeterminedShardingError",
    "attention_transport",
    "check_mode",
    "check_replicas",
    "checkpoint",
    "comm_stats",
    "conv_overlap_bytes",
    "compute_sharding_shapes_from_chunking_global_shape",
    "cut_buffers",
    "distribute_module",
    "distribute_tensor",
    "distributed",
    "einsum",
    "empty",
    "fallback_counts",
    "fallback_mode",
    "full",
    "get_check_mode",
    "get_conv_overlap_bytes",
    "get_fallback_mode",
    "get_attention_transport",
    "get_gradient_bucket_bytes",
    "get_gradient_policy",
    "get_point_transport",
    "get_random_policy",
    "gradient_bucket_bytes",
    "gradient_policy",
    "halo_exchange",
    "halo_padding",
    "halo_trim",
    "init_device_mesh",
    "io",
    "is_shard_tensor",
    "make_spec",
    "mesh",
    "new_tensors_on",
    "nn",
    "ones",
    "parallelize",
    "partition_nodes",
    "perform_ring_iteration",
    "perform_ring_iteration_async",
    "point_transport",
    "rand",
    "randn",
    "random_policy",
    "register_custom_ops",
    "reset_comm_stats",
    "reset_fallback_counts",
    "ring_sum",
    "ring_tour",
    "scatter_tensor",
    "set_check_mode",
    "set_communication_timeout",
    "set_conv_overlap_bytes",
    "set_fallback_mode",
    "set_attention_transport",
    "set_gradient_bucket_bytes",
    "set_gradient_policy",
    "set_point_transport",
    "set_random_policy",
    "sync_module_over_mesh",
    "tensordot",
    "transpose",
    "unhalo_padding",
    "zeros",
]

_patches.install()

# For programs that ask PhysicsNeMo whether it has ShardTensors, and switch its
# operators on.
ST_AVAILABLE = True


def register_custom_ops() -> None:
    """Nothing: operators understand ShardTensors from the import on."""


def __getattr__(name: str):
    """PyTorch's placements, see placements.py, and what imports a lot."""
    if name in ("checkpoint", "io", "mesh"):
        return importlib.import_module(f"shardtensor.{name}")
    if name in ("Partial", "Placement", "Replicate", "Shard"):
        from torch.distributed import tensor

        globals()[name] = getattr(tensor, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
