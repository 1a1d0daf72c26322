"""Small models with plain parameters, their data, and one device's gradients."""

import copy

import torch
import torch.nn as nn
from ranks import shard
from torch.distributed.tensor import Replicate, Shard


def network(width=6, layers=3):
    torch.manual_seed(0)
    parts = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*parts).double()


def data(rows=7, width=6):
    torch.manual_seed(1)
    return torch.randn(rows, width, dtype=torch.double)


def rows_on(mesh, x, requires_grad=False):
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return shard(x, mesh, placements).requires_grad_(requires_grad)


def assert_same_gradients(model, reference):
    for (name, p), q in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert type(p.grad) is torch.Tensor, name
        torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=name: f"{n}: {m}")


def pair():
    model = network()
    return model, copy.deepcopy(model)
