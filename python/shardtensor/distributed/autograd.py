"""Collectives on local tensors, differentiable to any order, most of them uneven.

`sizes[i]` is the extent of rank i's piece along `dim`, the same list on all
ranks; numbers or integer tensors. `group` None is torch's default group; `dst`
and `src` are ranks of the group. fp16 and bf16 are summed in fp32, in backward,
too; uneven collectives do so whatever `use_fp32` says, for it costs nothing
there. One exchange each way; one rank gets its tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardtensor import _ops

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
    rank, ranks, name = _place(group)
    dim = _dim("all_gather_v", tensor, dim)
    sizes = _piece_sizes("all_gather_v", sizes, ranks)
    _check_extent("all_gather_v", tensor, dim, sizes[rank])
    if ranks == 1:
        return tensor
    return _ops.all_gather_v(tensor, dim, sizes, name)


def gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    dst: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """All pieces joined on `dst`, zeros of that shape elsewhere. All ranks call
    backward; only dst's gradient counts."""
    rank, ranks, name = _place(group)
    dim = _dim("gather_v", tensor, dim)
    sizes = _piece_sizes("gather_v", sizes, ranks)
    _check_rank("gather_v: dst", dst, ranks)
    _check_extent("gather_v", tensor, dim, sizes[rank])
    return tensor if ranks == 1 else _ops.gather_v(tensor, dim, sizes, dst, name)


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
    rank, ranks, name = _place(group)
    dim = _dim("scatter_v", tensor, dim)
    sizes = _piece_sizes("scatter_v", sizes, ranks)
    _check_rank("scatter_v: src", src, ranks)
    if rank == src:
        _check_extent("scatter_v", tensor, dim, sum(sizes))
    return tensor if ranks == 1 else _ops.scatter_v(tensor, dim, sizes, src, name)


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
    rank, ranks, name = _place(group)
    dim = _dim("indexed_all_to_all_v", tensor, dim)
    for what, given in (("indices", indices), ("sizes", sizes)):
        if len(given) != ranks:
            raise ValueError(
                f"indexed_all_to_all_v: {what} has {len(given)} entries, expected "
                f"one for each of {ranks} ranks"
            )
    sent = _piece_sizes("indexed_all_to_all_v", sizes[rank], ranks)
    received = [int(row[rank]) for row in sizes]
    if len(sent) != ranks or [len(index) for index in indices] != sent:
        raise ValueError(
            f"indexed_all_to_all_v: indices of {[len(index) for index in indices]} "
            f"rows, expected {sent} by sizes"
        )
    if ranks == 1:
        return tensor.index_select(dim, indices[0].long())
    return _ops.indexed_all_to_all_v(tensor, dim, list(indices), received, name)


def reduce_scatter_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's piece of the sum of every rank's tensor. all_gather_v's
    adjoint."""
    _, ranks, name = _place(group)
    dim = _dim("reduce_scatter_v", tensor, dim)
    sizes = _piece_sizes("reduce_scatter_v", sizes, ranks)
    _check_extent("reduce_scatter_v", tensor, dim, sum(sizes))
    return tensor if ranks == 1 else _ops.reduce_scatter_v(tensor, dim, sizes, name)


def all_to_all_v(
    tensor: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Sends `in_splits[i]` rows to each rank i, in rank order, and joins the
    `out_splits[i]` that come from each."""
    _, ranks, name = _place(group)
    dim = _dim("all_to_all_v", tensor, dim)
    sent = _piece_sizes("all_to_all_v", in_splits, ranks)
    received = _piece_sizes("all_to_all_v", out_splits, ranks)
    _check_extent("all_to_all_v", tensor, dim, sum(sent))
    if ranks == 1:
        return tensor
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
    _, ranks, name = _place(group)
    if ranks == 1:
        return tensor
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
    _, ranks, name = _place(group)
    _check_rank("broadcast: src", src, ranks)
    return tensor if ranks == 1 else _ops.broadcast(tensor, src, name)


# ---- arguments --------------------------------------------------------------


def _place(group):
    """(rank, ranks, the group's name); without a job one rank."""
    group = (
        group if group is not None or not dist.is_initialized() else dist.group.WORLD
    )
    if group is None:
        return 0, 1, ""
    return group.rank(), group.size(), group.group_name


def _dim(op, tensor, dim):
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{op}: dim {dim} of a tensor with {tensor.dim()} dims")
    return dim % tensor.dim()


def _piece_sizes(op, sizes, ranks):
    if len(sizes) != ranks:
        raise ValueError(
            f"{op}: sizes has {len(sizes)} entries, expected one for each of "
            f"{ranks} ranks"
        )
    return [int(size) for size in sizes]


def _check_extent(op, tensor, dim, expected):
    if tensor.shape[dim] != expected:
        raise ValueError(
            f"{op}: the tensor has shape {tuple(tensor.shape)}, expected "
            f"{expected} rows in dim {dim}"
        )


def _check_rank(what, rank, ranks):
    if not 0 <= rank < ranks:
        raise ValueError(f"{what} is {rank}, expected one of {ranks} ranks")
