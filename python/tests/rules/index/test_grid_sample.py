"""grid_sample: the points may be cut, the image is whole where it is read."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from layouts import placements_of, sweep
from oracle import WHOLE
from ranks import check_op, ranks, sharded

import shardtensor
from shardtensor import ShardTensor


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize(
    "mode", ["bilinear", pytest.param("nearest", marks=pytest.mark.tail)]
)
def test_images(mesh, mode):
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    grid = (torch.rand(2, 6, 7, 2, dtype=torch.float64) * 2.2 - 1.1).requires_grad_()

    def sample(x, grid):
        return F.grid_sample(x, grid, mode, "border", align_corners=False)

    dims = range(4) if WHOLE else [1]
    cuts = [grid, *(sharded(grid, placements_of(mesh, dim)) for dim in dims)]
    with shardtensor.fallback_mode("error"):
        for layout, points in itertools.product(sweep(mesh, x.shape), cuts):
            check_op(sample, sharded(x, *layout), points, mesh=mesh)
        for layout in sweep(mesh, grid.shape):
            check_op(sample, x, sharded(grid, *layout), mesh=mesh)
            check_op(sample, x.detach(), sharded(grid, *layout), mesh=mesh)


@ranks(2)
def test_volumes(mesh):
    x = torch.randn(2, 3, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    grid = (torch.rand(2, 3, 4, 2, 3, dtype=torch.float64) * 2 - 1).requires_grad_()

    def sample(x, grid):
        return F.grid_sample(x, grid, align_corners=True)

    with shardtensor.fallback_mode("error"):
        for dim in range(5):
            part = sharded(x, placements_of(mesh, dim))
            check_op(sample, part, grid, mesh=mesh)
            check_op(sample, part, sharded(grid, placements_of(mesh, dim)), mesh=mesh)


@ranks(1, 2, 3)
def test_what_gpus_ask_cudnn_for(mesh):
    """As PyTorch does for these arguments; cuDNN refuses an empty piece."""
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    grid = (torch.rand(2, 2, 7, 2, dtype=torch.float64) * 2.2 - 1.1).requires_grad_()

    def sample(x, grid):
        if any(isinstance(each, ShardTensor) for each in (x, grid)):
            return torch.cudnn_grid_sampler(x, grid)
        return F.grid_sample(x, grid, align_corners=True)

    with shardtensor.fallback_mode("error"):
        for dim in range(4):
            check_op(sample, sharded(x, placements_of(mesh, dim)), grid, mesh=mesh)
            check_op(sample, x, sharded(grid, placements_of(mesh, dim)), mesh=mesh)
