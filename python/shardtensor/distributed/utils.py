"""Splitting, padding, sums of losses, parameters that ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardtensor import _C, _ops
from shardtensor.agree import agree_on_call, errors_on_all_ranks
from shardtensor.distributed.autograd import check_local, number, place_of
from shardtensor.distributed.manager import (
    DistributedManager,
    UninitializedManagerError,
)

# ---- splitting --------------------------------------------------------------


def compute_split_shapes(size: int, num_chunks: int) -> list[int]:
    """`size` rows in `num_chunks` pieces: rounded up, the rest last; if nothing
    would be left for the last, rounded down. Not torch.chunk's split, which
    ShardTensors have: 4 rows in 3 are 1, 1, 2 here."""
    if num_chunks == 1:
        return [size]
    piece = -(-size // num_chunks)
    if piece * (num_chunks - 1) >= size:
        piece = size // num_chunks
    return [piece] * (num_chunks - 1) + [size - piece * (num_chunks - 1)]


def split_tensor_along_dim(
    tensor: torch.Tensor, dim: int, num_chunks: int
) -> tuple[torch.Tensor, ...]:
    """The pieces of compute_split_shapes, as torch.split makes them."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"split_tensor_along_dim: dim {dim} of {tensor.dim()} dims")
    if tensor.shape[dim] < num_chunks:
        raise ValueError(
            f"split_tensor_along_dim: {tensor.shape[dim]} rows of dim {dim} in "
            f"{num_chunks} pieces"
        )
    return tensor.split(compute_split_shapes(tensor.shape[dim], num_chunks), dim)


def distributed_transpose(
    tensor: torch.Tensor,
    dim0: int,
    dim1: int,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> tuple[list[torch.Tensor], dist.Work | None]:
    """Cuts `dim0` into one part for each rank and sends part i to rank i; what
    comes, joined along `dim1` by the caller, is the tensor cut along `dim0`
    instead. Not differentiable; ShardTensor.redistribute is."""
    dist.get_world_size(group)  # raises without a job
    with errors_on_all_ranks("distributed_transpose", group):
        ranks, _ = place_of(group)
        check_local(tensor)
        dim0, dim1 = number("dim0", dim0), number("dim1", dim1)
        _check_transpose(tensor, dim0, dim1, ranks)
    told = f"distributed_transpose of a {tensor.dtype} tensor {[*tensor.shape]}"
    told += f", dims {dim0} and {dim1}"
    tensor = tensor.detach()
    agree_on_call(group or dist.group.WORLD, told, x=tensor)
    sent = torch.stack(tensor.chunk(ranks, dim0))
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=async_op)
    return list(received.unbind(0)), work


def _check_transpose(tensor, dim0, dim1, ranks):
    if not all(-tensor.dim() <= dim < tensor.dim() for dim in (dim0, dim1)):
        raise IndexError(f"dims {dim0} and {dim1} of {tensor.dim()} dims")
    if tensor.shape[dim0] % ranks:
        raise ValueError(
            f"{tensor.shape[dim0]} rows of dim {dim0} do not divide by {ranks} ranks"
        )


# ---- padding ----------------------------------------------------------------


def pad_helper(
    tensor: torch.Tensor, dim: int, new_size: int, mode: str = "zero"
) -> torch.Tensor:
    """`dim` made `new_size` long by zeros at its end. "conj" fills them as a
    real signal's spectrum goes on: the conjugates of entries 1, 2, ... from the
    end backwards."""
    dim %= tensor.dim()
    added = new_size - tensor.shape[dim]
    padded = F.pad(tensor, [0, 0] * (tensor.dim() - dim - 1) + [0, added])
    if mode == "conj":
        mirrored = tensor.narrow(dim, 1, added).flip(dim).conj()
        padded.narrow(dim, tensor.shape[dim], added).copy_(mirrored)
    elif mode != "zero":
        raise ValueError(f"pad_helper: mode: expected 'zero' or 'conj', got {mode!r}")
    return padded


def truncate_helper(tensor: torch.Tensor, dim: int, new_size: int) -> torch.Tensor:
    """The first `new_size` entries of `dim`, in the tensor's memory format."""
    short = tensor.narrow(dim, 0, new_size)
    return short.contiguous(memory_format=get_memory_format(tensor))


def get_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """channels_last where the tensor lies so, else contiguous."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


# ---- losses -----------------------------------------------------------------


def reduce_loss(
    loss: float | torch.Tensor, dst_rank: int = 0, mean: bool = True
) -> float | None:
    """The mean (or sum) of every rank's loss on `dst_rank`, None elsewhere. For
    logging: not differentiable. One all-reduce of one fp32 number."""
    if not DistributedManager.is_initialized():
        raise UninitializedManagerError()
    manager = DistributedManager()
    problem, mine = None, torch.zeros((), device=manager.device)
    try:
        mine = _one_number(loss, dst_rank, manager)
    except (TypeError, ValueError) as error:
        problem = error
    if dist.is_initialized():
        world = dist.group.WORLD
        told = f"reduce_loss to rank {dst_rank}"
        agree_on_call(world, told, problem, mine)
        mine = _ops.reduce_loss(mine, dst_rank, mean, world.group_name)
    elif problem:
        raise problem
    return mine.item() if manager.rank == dst_rank else None


def _one_number(loss, dst_rank, manager):
    """In fp32, on the rank's device."""
    if not 0 <= number("reduce_loss: dst_rank", dst_rank) < manager.world_size:
        raise ValueError(
            f"reduce_loss: dst_rank is {dst_rank} of {manager.world_size} ranks"
        )
    if isinstance(loss, torch.Tensor) and loss.numel() != 1:
        raise ValueError(f"reduce_loss: expected one number, got {[*loss.shape]}")
    try:
        return torch.tensor(float(loss), dtype=torch.float32, device=manager.device)
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"reduce_loss: expected one number, got {loss!r}") from None


# ---- parameters -------------------------------------------------------------


def mark_module_as_shared(
    module: torch.nn.Module,
    process_group: str | None,
    recurse: bool = True,
    use_fp32_reduction: bool = True,
) -> torch.nn.Module:
    """From now on the gradients of the module's parameters are sums over the
    named group (None: over all ranks): each backward's new term is, before it
    is added to `.grad`. For parameters that plain local tensors meet;
    ShardTensors need nothing of this. fp16 and bf16 are summed in fp32 unless
    told otherwise. Freeze a parameter on all ranks or on none: for a gradient that one
    rank does not have the others wait."""
    group = DistributedManager().group(process_group) or dist.group.WORLD
    parameters = list(module.named_parameters(recurse=recurse))
    _C.share_gradients(parameters, group.group_name, use_fp32_reduction)
    return module


def unmark_module_as_shared(
    module: torch.nn.Module, recurse: bool = True
) -> torch.nn.Module:
    """Undoes mark_module_as_shared."""
    _C.unshare_gradients(list(module.named_parameters(recurse=recurse)))
    return module
