"""Entering and leaving regions in which ranks share one model's work.

Each function's backward is another one's forward, so they may be differentiated
again. `group` is the name of a group or mesh axis of DistributedManager; None
is torch's default group. Tensors are local ones. Those that differ between ranks in
more than values are an error on all of them. fp16 and bf16 are summed in fp32.
"""

import torch
import torch.distributed as dist

from shardtensor import _ops
from shardtensor.agree import agree_on_call
from shardtensor.distributed.autograd import reduced
from shardtensor.distributed.manager import DistributedManager
from shardtensor.distributed.utils import compute_split_shapes


def copy_to_parallel_region(input: torch.Tensor, group: str | None) -> torch.Tensor:
    """The input; its gradient is summed over the ranks."""
    return _Copy.apply(input, _group(group))


def reduce_from_parallel_region(input: torch.Tensor, group: str | None) -> torch.Tensor:
    """The sum over the ranks, a new tensor; the gradient passes as it is."""
    found = _group(group)
    told = f"reduce_from_parallel_region of a {input.dtype} tensor {[*input.shape]}"
    agree_on_call(found, told, x=input)
    return _Reduce.apply(input, found)


def scatter_to_parallel_region(
    input: torch.Tensor, dim: int, group: str | None
) -> torch.Tensor:
    """This rank's piece along `dim`, cut by compute_split_shapes; the gradient
    is joined from all ranks."""
    found = _group(group)
    ranks = found.size()
    told = f"scatter_to_parallel_region of a {input.dtype} tensor {[*input.shape]}"
    problem: Exception | None = None
    if not -input.dim() <= dim < input.dim():
        problem = IndexError(
            f"scatter_to_parallel_region: dim {dim} of {input.dim()} dims"
        )
    elif input.shape[dim] < ranks:
        problem = ValueError(
            f"scatter_to_parallel_region: {input.shape[dim]} rows of dim {dim} for "
            f"{ranks} ranks"
        )
    agree_on_call(found, f"{told} along dim {dim}", problem, input)
    shapes = compute_split_shapes(input.shape[dim], ranks)
    return _Scatter.apply(input, dim % input.dim(), shapes, found)


def gather_from_parallel_region(
    input: torch.Tensor, dim: int, shapes: list[int], group: str | None
) -> torch.Tensor:
    """The pieces of all ranks joined along `dim`, of the extents `shapes`; the
    gradient is this rank's piece of it."""
    return _Gather.apply(input, dim, list(shapes), _group(group))


def _group(name):
    return DistributedManager().group(name) or dist.group.WORLD


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _Reduce.apply(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduced(x, "sum", group.group_name)

    @staticmethod
    def backward(ctx, grad):
        return _Copy.apply(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, shapes, group):
        ctx.place = dim, shapes, group
        begin = sum(shapes[: group.rank()])
        return x.narrow(dim, begin, shapes[group.rank()]).contiguous()

    @staticmethod
    def backward(ctx, grad):
        return _Gather.apply(grad, *ctx.place), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, shapes, group):
        ctx.place = dim, shapes, group
        return _ops.all_gather_v(x, dim, shapes, group.group_name)

    @staticmethod
    def backward(ctx, grad):
        return _Scatter.apply(grad, *ctx.place), None, None, None
