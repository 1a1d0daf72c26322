"""Collectives on local tensors, differentiable to any order, most of them uneven.

`sizes[i]` is the extent of rank i's piece along `dim`, the same list on all
ranks; numbers or integer tensors. `group` None is torch's default group; `dst`
and `src` are ranks of the group. fp16 and bf16 are summed in fp32, in backward,
too; uneven collectives do so whatever `use_fp32` says, for it costs nothing
there. One exchange each way; one rank gets its tensor itself.

Arguments that do not fit on one rank, or to those of other ranks, are one error
on all of them: three integers go from each rank to each beforehand, but not in
backward, and not in torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardtensor import _ops
from shardtensor.agree import agree_on_call

_HALVES = (torch.float16, torch.bfloat16)


def all_gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    use_fp32: bool = True,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """All pieces joined, on every rank. The gradient of a rank's piece is the
    sum over all ranks."""
    ranks, name = _place(group)
    if ranks == 1:
        return _alone("all_gather_v", tensor, dim, sizes)
    return _ops.all_gather_v(tensor, dim, _numbers(sizes), name)


def gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    dst: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """All pieces joined on `dst`, zeros of that shape elsewhere. All ranks call
    backward; only dst's gradient counts."""
    ranks, name = _place(group)
    if ranks == 1:
        return _alone("gather_v", tensor, dim, sizes, dst)
    return _ops.gather_v(tensor, dim, _numbers(sizes), dst, name)


def scatter_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's piece of src's tensor. Others pass a tensor of the same dtype,
    device and shape but for `dim`; its gradient is zero, src's is joined from
    all ranks."""
    ranks, name = _place(group)
    if ranks == 1:
        return _alone("scatter_v", tensor, dim, sizes, src)
    return _ops.scatter_v(tensor, dim, _numbers(sizes), src, name)


def indexed_all_to_all_v(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]],
    use_fp32: bool = True,
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Rank i gets this rank's rows `indices[i]` of `dim`; what arrives is joined
    in rank order. `sizes[i][j]` is how many rows i sends to j. The gradients of
    a row that went several ways are summed."""
    ranks, name = _place(group)
    if ranks == 1:
        (index,) = indices
        kept = _alone("indexed_all_to_all_v", index, 0, sizes[0])
        return tensor.index_select(dim, kept.long())
    rank = dist.get_rank(group)
    received = [int(n) for row in sizes for n in row[rank : rank + 1]]
    return _ops.indexed_all_to_all_v(tensor, dim, list(indices), received, name)


def reduce_scatter_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's piece of the sum of every rank's tensor. all_gather_v's
    adjoint."""
    ranks, name = _place(group)
    if ranks == 1:
        return _alone("reduce_scatter_v", tensor, dim, sizes)
    return _ops.reduce_scatter_v(tensor, dim, _numbers(sizes), name)


def all_to_all_v(
    tensor: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Sends `in_splits[i]` rows to each rank i, in rank order, and joins the
    `out_splits[i]` that come from each."""
    ranks, name = _place(group)
    if ranks == 1:
        _alone("all_to_all_v", tensor, dim, in_splits)
        return _alone("all_to_all_v", tensor, dim, out_splits)
    sent, received = _numbers(in_splits), _numbers(out_splits)
    return _ops.all_to_all_v(tensor, dim, sent, received, name)


def all_reduce(
    tensor: torch.Tensor,
    op: str = "sum",
    use_fp32: bool = True,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The "sum", "avg", "product", "max" or "min" of every rank's tensor, a new
    one; the first two have a derivative, the sum of all ranks' gradients, or
    their average. Without `use_fp32` sums of fp16 and bf16 travel, and are
    added, as they are."""
    ranks, name = _place(group)
    if ranks == 1:
        return tensor
    wide = use_fp32 and tensor.dtype in _HALVES
    told = f"all_reduce ({op}) of a {tensor.dtype} tensor {[*tensor.shape]}"
    agree_on_call(group or dist.group.WORLD, told + " in fp32" * wide, x=tensor)
    return reduced(tensor, op, name, use_fp32)


def reduced(
    tensor: torch.Tensor, op: str, name: str, use_fp32: bool = True
) -> torch.Tensor:
    """all_reduce over the group of this name, where ranks need not agree first."""
    if use_fp32 and tensor.dtype in _HALVES:
        return _ops.all_reduce(tensor.float(), op, name).to(tensor.dtype)
    return _ops.all_reduce(tensor, op, name)


def broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """src's tensor on every rank. Others pass one of the same shape, dtype and
    device; its gradient is zero, src's is the sum of all."""
    ranks, name = _place(group)
    if ranks == 1:
        _check_only_rank("broadcast", src)
        return tensor
    return _ops.broadcast(tensor, src, name)


# ---- arguments --------------------------------------------------------------


def _place(group):
    """(ranks, the group's name); without a job one rank."""
    if group is None and not dist.is_initialized():
        return 1, ""
    group = group or dist.group.WORLD
    return group.size(), group.group_name


def _numbers(sizes):
    return [int(size) for size in sizes]


def _alone(op, tensor, dim, sizes, rank=0):
    """The only rank's tensor, which must have the only size."""
    _check_only_rank(op, rank)
    if _numbers(sizes) != [tensor.shape[dim]]:
        raise ValueError(
            f"{op}: the tensor has shape {tuple(tensor.shape)}, expected "
            f"{_numbers(sizes)} rows in dim {dim} on one rank"
        )
    return tensor


def _check_only_rank(op, rank):
    if rank != 0:
        raise ValueError(f"{op}: rank {rank} of one rank")
