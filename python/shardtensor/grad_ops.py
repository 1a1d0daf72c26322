"""Identities that change the gradient, for operators of one's own."""

import torch

from shardtensor import _ops
from shardtensor.spec import ShardTensorSpec


class GradReducer(torch.autograd.Function):
    """`GradReducer.apply(tensor, ref_spec)` is the local tensor itself; its
    gradient is summed over each mesh axis along which `ref_spec`, the layout of
    the other operand, is cut. So a weight that meets pieces gets its complete
    gradient. Backward: one all-reduce per axis."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, ref_spec: ShardTensorSpec):
        core = ref_spec._core
        groups = core.mesh.axis_groups
        cut = [a for a, p in enumerate(core.placements) if p.kind == "shard"]
        ctx.groups = [groups[axis] for axis in cut]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        for group in ctx.groups:
            grad = _ops.all_reduce(grad, "sum", group)
        return grad, None


class ContiguousGrad(torch.autograd.Function):
    """`ContiguousGrad.apply(tensor)` is an alias; its gradient is made
    contiguous in memory."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous()
