"""Entering and leaving regions in which ranks share one model's work.

Each function's backward is another one's forward, so they may be differentiated
again. `group` is the name of a group or mesh axis of DistributedManager; None
is torch's default group. Tensors are local ones. Those that differ between ranks in
more than values are an error on all of them. fp16 and bf16 are summed in fp32.
"""

import torch

from shardtensor import _ops
from shardtensor.agree import errors_on_all_ranks
from shardtensor.distributed.autograd import check_local, number, numbers, place_of
from shardtensor.distributed.manager import DistributedManager
from shardtensor.distributed.utils import compute_split_shapes


def copy_to_parallel_region(input: torch.Tensor, group: str | None) -> torch.Tensor:
    """A view of the input; its gradient is summed over the ranks."""
    found = _group(group)
    with errors_on_all_ranks("copy_to_parallel_region", found):
        _, name = place_of(found)
        check_local(input)
    return _ops.copy_to_parallel_region(input, name)


def reduce_from_parallel_region(input: torch.Tensor, group: str | None) -> torch.Tensor:
    """The sum over the ranks, a new tensor; the gradient passes as it is."""
    found = _group(group)
    with errors_on_all_ranks("reduce_from_parallel_region", found):
        _, name = place_of(found)
        check_local(input)
    return _ops.reduce_from_parallel_region(input, name)


def scatter_to_parallel_region(
    input: torch.Tensor, dim: int, group: str | None
) -> torch.Tensor:
    """This rank's piece along `dim`, cut by compute_split_shapes, a new tensor; the
    gradient is joined from all ranks."""
    found = _group(group)
    with errors_on_all_ranks("scatter_to_parallel_region", found):
        ranks, name = place_of(found)
        check_local(input)
        dim = number("dim", dim)
        sizes = _split(input, dim, ranks)
    return _ops.scatter_to_parallel_region(input, dim, sizes, name)


def gather_from_parallel_region(
    input: torch.Tensor, dim: int, shapes: list[int], group: str | None
) -> torch.Tensor:
    """The pieces of all ranks joined along `dim`, of the extents `shapes`; the
    gradient is this rank's piece of it."""
    found = _group(group)
    with errors_on_all_ranks("gather_from_parallel_region", found):
        _, name = place_of(found)
        check_local(input)
        sizes, dim = numbers("shapes", shapes), number("dim", dim)
    return _ops.gather_from_parallel_region(input, dim, sizes, name)


def _group(name):
    return DistributedManager().group(name)


def _split(input, dim, ranks):
    if not -input.dim() <= dim < input.dim():
        raise IndexError(f"dim {dim} of {input.dim()} dims")
    if input.shape[dim] < ranks:
        raise ValueError(f"{input.shape[dim]} rows of dim {dim} for {ranks} ranks")
    return compute_split_shapes(input.shape[dim], ranks)
