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

import operator
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardtensor import _C, _ops
from shardtensor.agree import agree_on_call, errors_on_all_ranks, is_foreign

_HALVES = (torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32)
_REDUCTIONS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
)


def all_gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    use_fp32: bool = True,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """All pieces joined, on every rank. The gradient of a rank's piece is the
    sum over all ranks."""
    with errors_on_all_ranks("all_gather_v", group):
        ranks, name = place_of(group)
        check_local(tensor)
        sizes, dim = numbers("sizes", sizes), number("dim", dim)
        if ranks == 1:
            return _alone("all_gather_v", tensor, dim, sizes)
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
    with errors_on_all_ranks("gather_v", group):
        ranks, name = place_of(group)
        check_local(tensor)
        sizes, dim = numbers("sizes", sizes), number("dim", dim)
        dst = number("dst", dst)
        if ranks == 1:
            return _alone("gather_v", tensor, dim, sizes, dst)
    return _ops.gather_v(tensor, dim, sizes, dst, name)


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
    with errors_on_all_ranks("scatter_v", group):
        ranks, name = place_of(group)
        check_local(tensor)
        sizes, dim = numbers("sizes", sizes), number("dim", dim)
        src = number("src", src)
        if ranks == 1:
            return _alone("scatter_v", tensor, dim, sizes, src)
    return _ops.scatter_v(tensor, dim, sizes, src, name)


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
    with errors_on_all_ranks("indexed_all_to_all_v", group):
        ranks, name = place_of(group)
        check_local(tensor)
        rows, dim = _rows(indices), number("dim", dim)
        table = [numbers("sizes", row) for row in sizes]
        if ranks == 1:
            (index,) = rows
            kept = _alone("indexed_all_to_all_v", index, 0, table[0])
            return tensor.index_select(dim, kept.long())
        rank = dist.get_rank(group)
        received = [n for row in table for n in row[rank : rank + 1]]
    return _ops.indexed_all_to_all_v(tensor, dim, rows, received, name)


def reduce_scatter_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's piece of the sum of every rank's tensor. all_gather_v's
    adjoint."""
    with errors_on_all_ranks("reduce_scatter_v", group):
        ranks, name = place_of(group)
        check_local(tensor)
        sizes, dim = numbers("sizes", sizes), number("dim", dim)
        if ranks == 1:
            return _alone("reduce_scatter_v", tensor, dim, sizes)
    return _ops.reduce_scatter_v(tensor, dim, sizes, name)


def all_to_all_v(
    tensor: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Sends `in_splits[i]` rows to each rank i, in rank order, and joins the
    `out_splits[i]` that come from each."""
    with errors_on_all_ranks("all_to_all_v", group):
        ranks, name = place_of(group)
        check_local(tensor)
        sent = numbers("in_splits", in_splits)
        received = numbers("out_splits", out_splits)
        dim = number("dim", dim)
        if ranks == 1:
            _alone("all_to_all_v", tensor, dim, sent)
            return _alone("all_to_all_v", tensor, dim, received)
    return _ops.all_to_all_v(tensor, dim, sent, received, name)


def all_reduce(
    tensor: torch.Tensor,
    op: str | dist.ReduceOp.RedOpType = "sum",
    use_fp32: bool = True,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The "sum", "avg", "product", "max" or "min" (or dist.ReduceOp's) of every
    rank's tensor, a new one; the first two have a derivative, the sum of all ranks'
    gradients, or their average. Without `use_fp32` sums of fp16 and bf16 travel,
    and are added, as they are."""
    with errors_on_all_ranks("all_reduce", group):
        ranks, name = place_of(group)
        check_local(tensor)
        op = reduction(op)
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
    with errors_on_all_ranks("broadcast", group):
        ranks, name = place_of(group)
        check_local(tensor)
        src = number("src", src)
        if ranks == 1:
            _check_only_rank("broadcast", src)
            return tensor
    return _ops.broadcast(tensor, src, name)


# ---- arguments --------------------------------------------------------------


def place_of(group: dist.ProcessGroup | None) -> tuple[int, str]:
    """How many ranks, and the group's name; without a job one rank."""
    if is_foreign(group):
        raise ValueError("expected a group that this rank is in")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"expected a ProcessGroup or None, got {group!r}")
    if group is None and not dist.is_initialized():
        return 1, ""
    group = group or dist.group.WORLD
    return group.size(), group.group_name


def check_local(tensor: torch.Tensor) -> None:
    """A compiler's tensors are what it makes of them."""
    if torch.compiler.is_compiling():
        return
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor, got {tensor!r}")
    if not _is_local(tensor):
        kind = f"{tensor.layout} tensor on {tensor.device}"
        raise TypeError(
            f"expected a local strided tensor, got a {type(tensor).__name__}, a {kind}"
        )


def _is_local(tensor):
    strided = tensor.layout == torch.strided and not tensor.is_meta
    return strided and not (_C.is_shard_tensor(tensor) or hasattr(tensor, "placements"))


def numbers(what, sizes):
    try:
        return [_number(size) for size in sizes]
    except TypeError:
        raise TypeError(f"{what}: expected integers, got {sizes!r}") from None


def number(what: str, told: int) -> int:
    try:
        return _number(told)
    except TypeError:
        raise TypeError(f"{what}: expected an integer, got {told!r}") from None


def _number(size):
    if torch.compiler.is_compiling():
        return int(size)
    number = operator.index(size)
    if not -(2**63) <= number < 2**63:
        # An operator on this rank alone would raise it.
        raise ValueError(f"expected an integer of 64 bits, got {number}")
    return number


def _rows(indices):
    for index in indices:
        if not isinstance(index, torch.Tensor) or index.dtype not in _INTEGERS:
            raise TypeError(f"indices: expected tensors of integers, got {index!r}")
    return list(indices)


def reduction(op: str | dist.ReduceOp.RedOpType) -> str:
    """With the library's name."""
    if isinstance(op, str) or torch.compiler.is_compiling():
        return op
    for known, name in _REDUCTIONS:
        if op == known:
            return name
    names = [name for _, name in _REDUCTIONS]
    raise ValueError(f"op: expected one of {names}, got {op}")


def _alone(op, tensor, dim, sizes, rank=0):
    """The only rank's tensor, which must have the only size."""
    _check_only_rank(op, rank)
    if sizes != [tensor.shape[dim]]:
        raise ValueError(
            f"{op}: the tensor has shape {tuple(tensor.shape)}, expected "
            f"{sizes} rows in dim {dim} on one rank"
        )
    return tensor


def _check_only_rank(op, rank):
    if rank != 0:
        raise ValueError(f"{op}: rank {rank} of one rank")
