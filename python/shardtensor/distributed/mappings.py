"""Entering and leaving regions in which ranks share one model's work.

Each function's backward is another one's forward, so they may be differentiated
again. `group` is the name of a group or mesh axis of DistributedManager; None
is torch's default group. Tensors are local ones. Those that differ between ranks in
more than values are an error on all of them. fp16 and bf16 are summed in fp32.
"""

import torch

from shardtensor import _ops
from shardtensor.distributed.autograd import numbers, told_to_all
from shardtensor.distributed.manager import DistributedManager
from shardtensor.distributed.utils import compute_split_shapes


def copy_to_parallel_region(input: torch.Tensor, group: str | None) -> torch.Tensor:
    """A view of the input; its gradient is summed over the ranks."""
    with told_to_all("copy_to_parallel_region", input, _group(group)) as (_, name):
        pass
    return _ops.copy_to_parallel_region(input, name)


def reduce_from_parallel_region(input: torch.Tensor, group: str | None) -> torch.Tensor:
    """The sum over the ranks, a new tensor; the gradient passes as it is."""
    with told_to_all("reduce_from_parallel_region", input, _group(group)) as (_, name):
        pass
    return _ops.reduce_from_parallel_region(input, name)


def scatter_to_parallel_region(
    input: torch.Tensor, dim: int, group: str | None
) -> torch.Tensor:
    """This rank's piece along `dim`, cut by compute_split_shapes, a new tensor; the
    gradient is joined from all ranks."""
    found = _group(group)
    with told_to_all("scatter_to_parallel_region", input, found) as (ranks, name):
        sizes = _split(input, dim, ranks)
    return _ops.scatter_to_parallel_region(input, dim, sizes, name)


def gather_from_parallel_region(
    input: torch.Tensor, dim: int, shapes: list[int], group: str | None
) -> torch.Tensor:
    """The pieces of all ranks joined along `dim`, of the extents `shapes`; the
    gradient is this rank's piece of it."""
    with told_to_all("gather_from_parallel_region", input, _group(group)) as (_, name):
        sizes = numbers("shapes", shapes)
    return _ops.gather_from_parallel_region(input, dim, sizes, name)


def _group(name):
    return DistributedManager().group(name)


def _split(input, dim, ranks):
    if not -input.dim() <= dim < input.dim():
        raise IndexError(f"dim {dim} of {input.dim()} dims")
    if input.shape[dim] < ranks:
        raise ValueError(f"{input.shape[dim]} rows of dim {dim} for {ranks} ranks")
    return compute_split_shapes(input.shape[dim], ranks)
