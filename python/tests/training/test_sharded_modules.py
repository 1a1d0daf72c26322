"""distribute_module: parameters are ShardTensors, and train as on one device."""

import copy

import pytest
import torch
from ranks import assert_close, ranks, shard, uneven
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor, distribute_module, distribute_tensor


class Net(nn.Module):
    """Tied weights, running statistics, positions along the cut dim."""

    def __init__(self, rows):
        super().__init__()
        self.place = nn.Parameter(torch.randn(rows, 1))
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 4)
        self.last = nn.Linear(4, 6, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x):
        x = self.norm(self.first(x + self.place)).tanh()
        return self.last(self.second(x)) * self.frozen


def net(rows, seed=0):
    torch.manual_seed(seed)
    return Net(rows).double()


def steps(model, x, target):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
    return loss


@pytest.mark.parametrize("rows", [7, 2])  # of 3 ranks one is left empty
@ranks(2, 3)
def test_trains_as_on_one_device(mesh, rows):
    whole = net(rows)
    # Ranks that seeded otherwise: the mesh's first rank counts.
    model = net(rows, mesh.get_rank())
    sizes = uneven(rows, mesh.size())

    def cut(name, submodule, device_mesh):
        assert device_mesh is mesh
        if name == "":
            placed = distribute_tensor(
                submodule.place, mesh, [Shard(0)], sizes={0: sizes}
            )
            submodule.place = nn.Parameter(placed)
        if name == "second":  # a row of weights at a time
            submodule.weight = nn.Parameter(
                distribute_tensor(submodule.weight, mesh, [Shard(0)])
            )

    assert distribute_module(model, mesh, cut) is model
    assert model.last.weight is model.first.weight
    assert not model.frozen.requires_grad
    assert list(model.state_dict()) == list(whole.state_dict())
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        assert isinstance(x, ShardTensor), name
        is_cut = name in ("place", "second.weight")
        assert x.placements == (Shard(0) if is_cut else Replicate(),), name

    torch.manual_seed(100)
    x, target = torch.randn(rows, 4).double(), torch.randn(rows, 6).double()
    expected = steps(whole, x, target)
    loss = steps(
        model, shard(x, mesh, [Shard(0)], {0: sizes}), shard(target, mesh, [Shard(0)])
    )
    torch.testing.assert_close(loss.full_tensor(), expected)
    for name, parameter in whole.named_parameters():
        assert_close(model.get_parameter(name), parameter)
        if parameter.grad is not None:
            part = model.get_parameter(name)
            assert part.grad.placements == part.placements, name
            assert_close(part.grad, parameter.grad)
    for name, buffer in whole.named_buffers():
        assert_close(model.get_buffer(name), buffer)


@ranks("2x2")
def test_functions_before_and_after_forward(mesh):
    whole = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model = copy.deepcopy(whole)
    seen = []

    def enter(submodule, inputs, device_mesh):
        seen.append((submodule, device_mesh))
        return tuple(
            distribute_tensor(x, device_mesh, [Shard(0), Replicate()]) for x in inputs
        )

    def leave(submodule, output, device_mesh):
        seen.append((submodule, device_mesh))
        return output.full_tensor()

    with mesh:  # the mesh of calls that name none
        distribute_module(model, input_fn=enter, output_fn=leave)
    x = torch.randn(5, 3)
    result = model(x)
    assert type(result) is torch.Tensor
    torch.testing.assert_close(result, whole(x))
    assert seen == [(model, mesh), (model, mesh)]


@ranks(2)
def test_what_is_distributed_stays(mesh):
    model = nn.Linear(3, 4)
    torch.distributed.tensor.distribute_module(model, mesh)
    model._distribute_module_applied = False
    distribute_module(model, mesh)
    assert isinstance(model.weight, DTensor)


@ranks(2)
def test_numbers_that_nobody_has(mesh):
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    distribute_module(model, mesh)
    assert model.weight.is_meta
    assert model.weight.placements == (Replicate(),)


def one(values):
    return values


def two(values, device_mesh):
    return values


@ranks(2, 3)
def test_functions_without_the_submodule(mesh):
    def enter(inputs, device_mesh):
        return ShardTensor.from_local(inputs[0], device_mesh, [Shard(0)])

    def leave(output, device_mesh):
        assert device_mesh is mesh
        return output.to_local()

    model = nn.Linear(3, 2)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    rows = torch.arange(15.0).view(5, 3)[: mesh.get_rank()]  # none on the first
    with pytest.warns(FutureWarning, match="(input|output)_fn of two arguments"):
        distribute_module(model, mesh, input_fn=enter, output_fn=leave)
    torch.testing.assert_close(model(rows), rows @ weight.T + bias)


@ranks(2)
def test_errors_are_those_of_all_ranks(mesh):
    first = mesh.get_rank() == 0
    with pytest.raises(TypeError, match="expected an nn.Module, got Tensor"):
        distribute_module(torch.ones(1) if first else nn.Linear(1, 1), mesh)
    for name in ("partition_fn", "input_fn", "output_fn"):
        model = nn.Linear(1, 1)
        function = two if name == "partition_fn" else one
        with pytest.raises(TypeError, match=f"expected three arguments of {name} "):
            distribute_module(model, mesh, **{name: function})
        assert type(model.weight) is nn.Parameter
    with pytest.raises(ValueError, match="distribute_module: .*differ"):
        distribute_module(nn.Linear(1, 1 if first else 2), mesh)
    with pytest.raises(ValueError, match="distribute_module: .*differ"):
        distribute_module(nn.Linear(1, 1, bias=first), mesh)
    model = shardtensor.distribute_module(nn.Linear(1, 1), mesh)
    with pytest.raises(RuntimeError, match="this Linear is distributed already"):
        distribute_module(model, mesh)
