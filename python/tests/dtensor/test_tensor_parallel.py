"""parallelize_module on an axis beside the domain."""

import pytest
import torch
from dtensor_checks import distributed
from ranks import assert_close, ranks, shard, uneven
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardtensor
from shardtensor import ShardTensor

PRELOAD = ("torch._inductor.compile_fx",)  # torch.optim imports the compiler


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.blocks(x))


def model():
    torch.manual_seed(1)
    return Model().double()


def parallel(mesh, **options):
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(model(), mesh, {**plan, **options})


def check(found, expected, parameters, whole_parameters):
    for p, q in zip(parameters, whole_parameters, strict=True):
        assert type(p.grad) is type(p.data), (type(p.grad), type(p.data))
        if isinstance(p, DTensor):
            assert p.grad.placements == p.placements
            assert type(p.grad.to_local()) is torch.Tensor
            assert p.grad.to_local().stride() == p.to_local().stride()
        full = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
        torch.testing.assert_close(full, q.grad)


@pytest.mark.parametrize("axes", [("domain_h", "domain_w"), ("domain_w", "domain_h")])
@pytest.mark.parametrize("dim", [0, 1])
@ranks("2x2")
def test_colwise_and_rowwise(mesh, axes, dim):
    domain, tensors = mesh[axes[0]], mesh[axes[1]]
    x = torch.randn(5, 7, 6, dtype=torch.float64, requires_grad=True)
    part = shard(x, domain, [Shard(dim)], {dim: uneven(x.shape[dim], 2)})
    whole, cut = model(), parallel(tensors)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, cut)]
    with shardtensor.fallback_mode("error"):
        for _ in range(3):
            found, expected = cut(part), whole(x)
            assert type(found) is ShardTensor and found.device_mesh == domain
            assert_close(found, expected)
            found.square().mean().backward()
            expected.square().mean().backward()
            check(found, expected, cut.parameters(), whole.parameters())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_close(part.grad, x.grad)


@ranks("2x2")
def test_results_that_stay_distributed(mesh):
    """use_local_output=False: DTensors of ShardTensors between modules."""
    domain, tensors = mesh["domain_h"], mesh["domain_w"]
    x = torch.randn(5, 7, 6, dtype=torch.float64, requires_grad=True)
    part = shard(x, domain, [Shard(1)], {1: [4, 3]})
    stay = {"head": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)}
    whole, cut = model(), parallel(tensors, **stay)
    found, expected = cut(part), whole(x)
    assert isinstance(found, DTensor)
    assert found.placements == (Replicate(),)
    found = (part[..., :4] * found.sin()).to_local()
    expected = x[..., :4] * expected.sin()
    assert_close(found, expected)
    found.square().mean().backward()
    expected.square().mean().backward()
    check(found, expected, cut.parameters(), whole.parameters())
    assert_close(part.grad, x.grad)


@ranks("2x2")
def test_without_parallel_styles(mesh):
    """Weights that are DTensors, nothing else: results on both axes."""
    domain, tensors = mesh["domain_h"], mesh["domain_w"]
    whole, cut = Block().double(), Block().double()
    cut.load_state_dict(whole.state_dict())
    for module, placement in ((cut.up, Shard(0)), (cut.down, Shard(1))):
        weight = distributed(module.weight, tensors, [placement])
        module.weight = nn.Parameter(weight)
    x = torch.randn(5, 7, 6, dtype=torch.float64, requires_grad=True)
    part = shard(x, domain, [Shard(1)], {1: [4, 3]})
    found, expected = cut(part), whole(x)
    assert_close(found, expected)
    found.square().mean().backward()
    expected.square().mean().backward()
    assert_close(part.grad, x.grad)
    check(found, expected, cut.parameters(), whole.parameters())


@ranks("2x2")
def test_gradients_are_asked_for_by_name(mesh):
    """Of a DTensor's outputs, for its parameters: these, not what stands for them."""
    domain, tensors = mesh["domain_h"], mesh["domain_w"]
    whole = model().blocks[0].up
    cut = parallel(tensors).blocks[0].up
    x = torch.randn(5, 7, 6, dtype=torch.float64)
    part = shard(x, domain, [Shard(1)], {1: uneven(7, 2)})
    inside = DTensor.from_local(part, tensors, [Replicate()])
    loss = torch.nn.functional.linear(inside, cut.weight, cut.bias).square().sum()
    found = torch.autograd.grad(loss, [cut.weight, cut.bias])
    expected = torch.autograd.grad(whole(x).square().sum(), [whole.weight, whole.bias])
    for mine, alone in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor(), alone)
