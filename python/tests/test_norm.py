"""Norms over the whole domain: values, gradients, buffers."""

import pytest
import torch
from ranks import check_op, partitions, ranks, sharded
from torch import nn
from torch.distributed.tensor import Replicate, Shard


def image(*shape, dtype=torch.float64):
    """Values with a mean, so that forgetting it shows."""
    return (torch.randn(shape, dtype=dtype) + 3).requires_grad_()


NORMS = {
    "group": lambda c: nn.GroupNorm(2, c),
    "group_plain": lambda c: nn.GroupNorm(4, c, affine=False),
    "batch": lambda c: nn.BatchNorm2d(c),
    "batch_cumulative": lambda c: nn.BatchNorm2d(c, momentum=None),
    "batch_plain": lambda c: nn.BatchNorm2d(c, affine=False, eps=0.1),
    "batch_untracked": lambda c: nn.BatchNorm2d(c, track_running_stats=False),
    "instance": lambda c: nn.InstanceNorm2d(c),
    "instance_affine": lambda c: nn.InstanceNorm2d(c, affine=True),
    "instance_tracked": lambda c: nn.InstanceNorm2d(
        c, affine=True, track_running_stats=True, momentum=0.3
    ),
    "layer": lambda c: nn.LayerNorm([c, 7, 5]),
    "layer_last": lambda c: nn.LayerNorm([5], bias=False),
    "layer_plain": lambda c: nn.LayerNorm([7, 5], elementwise_affine=False),
    "rms": lambda c: nn.RMSNorm([7, 5]),
    "rms_plain": lambda c: nn.RMSNorm([5], elementwise_affine=False, eps=0.01),
}


def make(kind):
    norm = NORMS[kind](4).double()
    for p in norm.parameters():
        nn.init.normal_(p, 1.0, 0.5)
    return norm


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_every_cut(mesh, kind, dim):
    x = image(3, 4, 7, 5)
    for sizes in partitions(x.shape[dim], mesh.size()):
        part = sharded(x, [Shard(dim)], {dim: sizes})
        check_op(make(kind), part, mesh=mesh, second_order=True)


@ranks("2x2")
@pytest.mark.parametrize("dims", [(2, 3), (0, 2), (2, 2), (1, 3), (None, 2)])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_on_a_grid_of_ranks(mesh, kind, dims):
    x = image(3, 4, 7, 5)
    placements = [Replicate() if d is None else Shard(d) for d in dims]
    check_op(make(kind), sharded(x, placements), mesh=mesh, second_order=True)
    if dims[0] == dims[1]:
        part = sharded(x, placements, {2: [1, 0, 4, 2]})
        check_op(make(kind), part, mesh=mesh, second_order=True)
