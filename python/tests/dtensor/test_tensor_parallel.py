"""parallelize_module on an axis beside the domain."""

import copy

import pytest
import torch
from dtensor_checks import distributed
from ranks import assert_close, ranks, shard, uneven
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
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
    # foreach, the default on GPUs, takes no DTensors beside plain parameters.
    options = {"lr": 0.01, "foreach": False}
    optimizers = [torch.optim.AdamW(m.parameters(), **options) for m in (whole, cut)]
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
def test_samples_along_the_tensor_axis_gather_no_domain(mesh):
    """Between modules, as sequence parallelism has it; rows of tokens lie along the
    domain's axis, those of their table along the tensors'."""
    domain, tensors = mesh["domain_h"], mesh["domain_w"]
    samples, all_of_them = Shard(0), Replicate()
    plan = {
        "0": RowwiseParallel(input_layouts=all_of_them, output_layouts=samples),
        "1": ColwiseParallel(input_layouts=samples),
        "3": RowwiseParallel(output_layouts=samples),
        "4": ColwiseParallel(input_layouts=samples, output_layouts=all_of_them),
    }
    layers = nn.Embedding(9, 6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)
    whole = nn.Sequential(*layers, nn.Linear(6, 4)).double()
    cut = parallelize_module(copy.deepcopy(whole), tensors, plan)
    tokens = torch.randint(9, (4, 7))
    for dim in (0, 1):
        part = shard(tokens, domain, [Shard(dim)], {dim: uneven(tokens.shape[dim], 2)})
        with shardtensor.fallback_mode("error"):
            found, expected = cut(part), whole(tokens)
            assert_close(found, expected)
            found.square().mean().backward()
        expected.square().mean().backward()
        check(found, expected, cut.parameters(), whole.parameters())


@pytest.mark.parametrize("dim", [0, 1])
@ranks("2x2")
def test_norms_between_pieces_of_the_sequence(mesh, dim):
    """Of samples or rows that lie along the tensors' axis, the domain along either."""
    domain, tensors = mesh["domain_h"], mesh["domain_w"]
    rows, all_of_them = Shard(dim), Replicate()
    stay = {"output_layouts": rows, "use_local_output": False}
    plan = {
        "0": RowwiseParallel(input_layouts=all_of_them, **stay),
        "1": SequenceParallel(sequence_dim=dim),
        "2": ColwiseParallel(input_layouts=rows),
        "3": RowwiseParallel(**stay),
        "4": SequenceParallel(sequence_dim=dim),
        "5": ColwiseParallel(input_layouts=rows, output_layouts=all_of_them),
    }
    norms = nn.LayerNorm(6), nn.LayerNorm(6, bias=False)
    layers = nn.Linear(6, 6), norms[0], nn.Linear(6, 8), nn.Linear(8, 6), norms[1]
    whole = nn.Sequential(*layers, nn.Linear(6, 4)).double()
    cut = parallelize_module(copy.deepcopy(whole), tensors, plan)
    for cut_dim in (0, 1):
        x = torch.randn(4, 8, 6, dtype=torch.float64, requires_grad=True)
        sizes = {cut_dim: uneven(x.shape[cut_dim], 2)}
        part = shard(x, domain, [Shard(cut_dim)], sizes)
        with shardtensor.fallback_mode("error"):
            found, expected = cut(part), whole(x)
            assert_close(found, expected)
            found.square().mean().backward()
        expected.square().mean().backward()
        check(found, expected, cut.parameters(), whole.parameters())
        assert_close(part.grad, x.grad)
        cut.zero_grad()
        whole.zero_grad()


@ranks(2, "2x2")
def test_axes_that_cut_the_domain_are_refused(mesh):
    """Rows of parameters and pieces of the domain would mix."""
    tensors = mesh["domain_w"] if mesh.ndim == 2 else mesh
    cut, x = parallel(tensors), torch.randn(6, 6).double()
    message = "DTensor.from_local: expected a ShardTensor that is the same along"
    with pytest.raises(ValueError, match=message):
        cut(shard(x, mesh, [Shard(0)] * mesh.ndim))
    with pytest.raises(ValueError, match=message):
        term = shard(x, mesh, [Partial()] * mesh.ndim)
        DTensor.from_local(term, tensors, [Replicate()])
    if mesh.ndim == 2:
        assert_close(cut(shard(x, mesh, [Shard(0), Replicate()])), model()(x))


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
