"""nn.SyncBatchNorm over data x domain is one device's BatchNorm."""

import pytest
import rig
import torch
import torch.distributed as dist
from data_by_domain import make, part, whole
from oracle import every
from ranks import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.optim.swa_utils import AveragedModel, update_bn

import shardtensor
from shardtensor import ShardTensor, check_replicas, parallelize

PRELOAD = ("torch._inductor.compile_fx",)


def net():
    """Without biases, which the norms take away: AdamW would follow their rounding."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.Conv2d(6, 4, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(4, momentum=None, affine=False),
    ).double()


def train(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for x in batches:
        (model(x) - 0.3).pow(4).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@ranks(4)
@pytest.mark.parametrize("name", every(2, ["2x2", "4x1", "2x1x2", "1x2x2"]))
def test_steps_are_those_of_one_device(mesh, name):
    mesh, axes, domain = make(name)
    for data in ("ddp", "fsdp"):
        reference = net()
        model = nn.SyncBatchNorm.convert_sync_batchnorm(net())
        model = parallelize(model, mesh, data, axes)
        batches = [torch.randn(4, 2, 9, 6).double() for _ in range(10)]
        train(reference, batches)
        train(model, [part(x, mesh, domain) for x in batches])
        state = getattr(model, "module", model).state_dict()
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(
                whole(state[key]), value, rtol=1e-9, atol=1e-9, msg=f"{data}: {key}"
            )
        check_replicas(model, mesh)
        found = model.eval()(part(batches[0], mesh, domain)).full_tensor()
        rank, expected = mesh.get_local_rank(0), reference.eval()(batches[0])
        torch.testing.assert_close(found, expected.chunk(mesh.size(0))[rank])


@ranks(4)
def test_averages_of_it_are_those_of_one_device(mesh):
    mesh, axes, domain = make("2x2")
    reference = net()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net())
    model = parallelize(model, mesh, "ddp", axes).module
    batches = [torch.randn(4, 2, 9, 6).double() for _ in range(4)]
    parts = [part(x, mesh, domain) for x in batches]
    averages = []
    for each, given in ((reference, batches), (model, parts)):
        averages.append(AveragedModel(each))
        for factor in (0.9, 1.1):
            with torch.no_grad():
                each[0].weight.mul_(factor)
            averages[-1].update_parameters(each)
        update_bn(given, averages[-1])
    expected, found = (each.module.state_dict() for each in averages)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


@ranks(4)
def test_derivatives_and_groups(mesh):
    """Values, gradients and second derivatives in any layout, by the group that has
    all ranks and by the one that has a rank of each domain."""
    mesh = init_device_mesh(rig.DEVICE, (2, 2), mesh_dim_names=("data", "domain"))
    data, domain = mesh.get_local_rank("data"), mesh["domain"]
    batch = torch.randn(4, 3, 5, 2).double()
    mine = slice(0, 1) if data == 0 else slice(1, 4)  # uneven over data, too
    x = batch.clone().requires_grad_()
    reference = nn.BatchNorm2d(3).double()
    expected = derivatives(reference, x, list(reference.parameters()))
    for group in (None, mesh.get_group("data")):
        for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
            layer = nn.SyncBatchNorm(3, process_group=group).double()
            one = ShardTensor.from_local(batch[mine], domain, [Replicate()])
            one = one.redistribute(placements=[placement]).detach().requires_grad_()
            found = derivatives(layer, one, list(layer.parameters()))
            for f, e in zip(found[:3], expected[:3], strict=True):
                torch.testing.assert_close(f.full_tensor(), e[mine])
            for f, e in zip(found[3:], expected[3:], strict=True):
                f = f.full_tensor() if hasattr(f, "full_tensor") else f.clone()
                dist.all_reduce(f, group=mesh.get_group("data"))
                torch.testing.assert_close(f, e)
            for key, value in reference.state_dict().items():
                torch.testing.assert_close(layer.state_dict()[key], value)


def derivatives(layer, x, parameters):
    y = layer(x)
    first = torch.autograd.grad(
        (y.sin() * x).sum(), [x, *parameters], create_graph=True
    )
    penalty = first[0].pow(2).sum()
    second = torch.autograd.grad(penalty, [x, *parameters])
    return [y, first[0], second[0], *first[1:], *second[1:]]


@ranks(2, 3)
def test_sums_of_16_bits_and_errors(mesh):
    batch = (torch.randn(2, 3, 64, 8) + 30).bfloat16()
    x = ShardTensor.from_local(
        batch.chunk(mesh.size(), 2)[mesh.get_local_rank()], mesh, [Shard(2)]
    )
    layer, reference = nn.SyncBatchNorm(3), nn.BatchNorm2d(3)
    shardtensor.reset_comm_stats()
    y = layer(x)
    assert shardtensor.comm_stats().all_reduces == 4  # over the domain, over the group
    assert y.dtype == torch.bfloat16
    expected = reference(batch.float())
    torch.testing.assert_close(y.full_tensor().float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(layer.running_var, reference.running_var)
    one = ShardTensor.from_local(torch.ones(1, 3, 1, 1), mesh, [Replicate()])
    with pytest.raises(ValueError, match="more than 1 value per channel, got 1"):
        layer(one)


@ranks(4)
def test_groups_that_cut_a_domain(mesh):
    half = dist.new_subgroups(2)[0]
    x = ShardTensor.from_local(torch.randn(2, 3, 4), mesh, [Shard(2)])
    with pytest.raises(ValueError, match="process_group has 2 of the 4 ranks"):
        nn.SyncBatchNorm(3, process_group=half)(x)
