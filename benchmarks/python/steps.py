"""Small steps, forward and backward: (x * y).sum() and a two-layer perceptron
on 64 rows per rank."""

import device
import torch
import torch.distributed as dist
from halo import sum_gradients
from report import Table
from timing import compare
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module

from shardtensor import ShardTensor


def table(mesh):
    alone = mesh_of_one()
    rows = {
        "(x * y).sum(), backward": compare(products(mesh)),
        "MLP step on a mesh of one rank": compare(perceptrons(alone)),
        "MLP step": compare(perceptrons(mesh)),
    }
    return Table("Small steps", "plain", rows)


def mesh_of_one():
    """Every rank works alone: what the library costs without any message."""
    shape = (dist.get_world_size(), 1)
    names = ("each", "alone")
    return init_device_mesh(device.DEVICE, shape, mesh_dim_names=names)["alone"]


def products(mesh):
    pieces = [torch.randn(8, 8) for _ in range(2)]

    def step(x, y):
        x.grad = y.grad = None
        (x * y).sum().backward()

    def on(make):
        x, y = (make(p).detach().requires_grad_() for p in pieces)
        return lambda: step(x, y)

    return {
        "plain": on(torch.clone),
        "ShardTensor": on(lambda p: ShardTensor.from_local(p, mesh, (Shard(0),))),
        "DTensor": on(lambda p: DTensor.from_local(p, mesh, (Shard(0),))),
    }


def perceptrons(mesh):
    """Parameters are replicated; their gradients are complete in backward,
    except for plain, which has no communication at all."""
    piece = torch.randn(64, 32)

    def on(make, prepare=lambda model: model):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model, x = prepare(model), make(piece)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step

    return {
        "plain": on(torch.clone),
        "ShardTensor": on(lambda p: ShardTensor.from_local(p, mesh, (Shard(0),))),
        "DTensor": on(
            lambda p: DTensor.from_local(p, mesh, (Shard(0),)),
            prepare=lambda model: distribute_module(model, mesh),
        ),
        "by hand": by_hand(piece, mesh),
    }


def by_hand(piece, mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        model(piece).square().mean().backward()
        if mesh.size() > 1:
            sum_gradients(model)
        optimizer.step()

    return step
