"""Networks on clouds of points as users write them: one device's losses."""

import copy

import pytest
import torch
from networks import DynamicGraph, Gino, GraphNeuralOperator, PointNet2, Transolver
from ranks import ranks, shard, uneven
from torch.distributed.tensor import Replicate, Shard

import shardtensor

POINTS = 48


def losses(model, given, truth):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(*given) - truth).square().mean()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


def rows_of(mesh):
    return [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]


@ranks(1, 2, 3, 4, "2x2")
@pytest.mark.parametrize(
    "network", [PointNet2, DynamicGraph, Transolver, GraphNeuralOperator]
)
def test_training(mesh, network):
    model = network().double()
    points, x, truth = (torch.rand(POINTS, n).double() for n in (3, 3, 1))
    sizes = {0: uneven(POINTS, mesh.size(-1))}
    with shardtensor.fallback_mode("error"):
        *given, wanted = (
            shard(t, mesh, rows_of(mesh), sizes) for t in (points, x, truth)
        )
        cut = losses(copy.deepcopy(model), given, wanted)
    whole = losses(model, (points, x), truth)
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=0)


def grid(rows, columns):
    axes = (torch.arange(n).add(0.5).div(n) for n in (rows, columns))
    return torch.cartesian_prod(*axes).view(rows, columns, 2).double()


@ranks(1, 2, 3, 4, "2x2")
def test_a_grid_between_points(mesh):
    """GINO, with an uneven grid: no rank holds all of its places."""
    model = Gino().double()
    points, x, truth = (torch.rand(POINTS, n).double() for n in (2, 3, 1))
    places = grid(7, 6)
    sizes = {0: uneven(POINTS, mesh.size(-1))}
    *given, wanted = (shard(t, mesh, rows_of(mesh), sizes) for t in (points, x, truth))
    given.append(shard(places, mesh, rows_of(mesh)))
    with shardtensor.new_tensors_on(mesh), shardtensor.fallback_mode("error"):
        cut = losses(copy.deepcopy(model), given, wanted)
    whole = losses(model, (points, x, places), truth)
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=0)
