"""PyTorch's own checks of collectives, TORCH_DISTRIBUTED_DEBUG=DETAIL."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jobs import values
from ranks import run_isolated, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import shardtensor


def train_in_debug_level(shape, sizes):
    """Neighbours along a dim: the ranks have different numbers of peers."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    names = ("rows", "columns")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(3)
    image, weight = torch.randn(1, 2, 9, 8), torch.randn(2, 2, 3, 3)
    weight.requires_grad_()
    cut = [Shard(2), Shard(3)][: len(shape)]
    expected = F.conv2d(image, weight, padding=1)
    (gradient,) = torch.autograd.grad(expected.square().sum(), weight)
    x = shard(image, mesh, cut, {2: sizes})
    for _ in range(3):
        y = F.conv2d(x, weight, padding=1)
        y.square().sum().backward()
        torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-3)
        weight.grad = None
        whole = x.redistribute(placements=[Replicate()] * mesh.ndim)
        assert torch.equal(whole.to_local(), image)
        assert torch.equal(x.flip(2).sort(2)[0].full_tensor(), image.sort(2)[0])
        distributed = shardtensor.distribute_tensor(image, mesh, cut)
        assert torch.equal(distributed.full_tensor(), image)
        dist.barrier()
        dist.barrier(mesh.get_group(0))
    dist.destroy_process_group()


def run_in_debug_level(count, shape, sizes):
    values(run_isolated(count, train_in_debug_level, shape, sizes, world=False))


@pytest.mark.parametrize(
    "shape, sizes", [((2,), [5, 4]), ((3,), [4, 0, 5]), ((4,), [1, 3, 2, 3])]
)
def test_counts_of_calls_are_the_same_on_all_ranks(shape, sizes):
    run_in_debug_level(shape[0], shape, sizes)


def test_counts_of_calls_on_two_axes():
    run_in_debug_level(4, (2, 2), [5, 4])
