"""Networks on clouds of points as users write them: one device's losses."""

import copy

import pytest
import torch
from ranks import ranks, shard, uneven
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor.nn.functional import (
    ball_query,
    farthest_point_sampling,
    interpolate_neighbors,
    knn,
)

POINTS, CHANNELS = 48, 8


def perceptron(inputs, outputs=CHANNELS):
    return nn.Sequential(
        nn.Linear(inputs, CHANNELS), nn.GELU(), nn.Linear(CHANNELS, outputs)
    )


class PointNet2(nn.Module):
    """Sampled points gather what is around them; features go back by distance."""

    def __init__(self):
        super().__init__()
        self.group, self.up = perceptron(6), perceptron(CHANNELS + 3)
        self.decode = nn.Linear(CHANNELS, 1)

    def forward(self, points, x):
        centers = points[farthest_point_sampling(points, 13)]
        around, _ = ball_query(points, centers, 0.4, 6)
        offsets = points[around] - centers.unsqueeze(1)
        h = self.group(torch.cat([offsets, x[around]], -1)).amax(1)
        back = interpolate_neighbors(centers, h, points)
        return self.decode(self.up(torch.cat([back, x], -1)))


class DynamicGraph(nn.Module):
    """DGCNN: edges to the nearest in space, then in features."""

    def __init__(self):
        super().__init__()
        self.edges = nn.ModuleList([perceptron(6), perceptron(2 * CHANNELS)])
        self.norm = nn.BatchNorm1d(CHANNELS)
        self.decode = nn.Linear(2 * CHANNELS, 1)

    def forward(self, points, x):
        outputs = []
        for edge in self.edges:
            around, _ = knn(x.detach(), x.detach(), 5)
            center = x.unsqueeze(1).expand(-1, 5, -1)
            x = edge(torch.cat([center, x[around] - center], -1)).amax(1)
            x = self.norm(x)
            outputs.append(x)
        return self.decode(torch.cat(outputs, -1))


class Transolver(nn.Module):
    """Points are summed up in slices, which attend to each other."""

    def __init__(self, slices=4):
        super().__init__()
        self.lift, self.slice = perceptron(6), nn.Linear(CHANNELS, slices)
        self.norm = nn.LayerNorm(CHANNELS)
        self.attend = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.decode = perceptron(CHANNELS, 1)

    def forward(self, points, x):
        x = self.lift(torch.cat([points, x], -1))
        weights = self.slice(self.norm(x)).softmax(-1)
        tokens = weights.t() @ x / (weights.sum(0).unsqueeze(-1) + 1e-5)
        query, key, value = self.attend(tokens).chunk(3, -1)
        tokens = nn.functional.scaled_dot_product_attention(
            query[None], key[None], value[None]
        )[0]
        return self.decode(x + weights @ tokens)


def losses(model, points, x, truth):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(points, x) - truth).square().mean()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("network", [PointNet2, DynamicGraph, Transolver])
def test_training(mesh, network):
    model = network().double()
    points, x, truth = (torch.rand(POINTS, n).double() for n in (3, 3, 1))
    rows = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    sizes = {0: uneven(POINTS, mesh.size(-1))}
    with shardtensor.fallback_mode("error"):
        cut = losses(
            copy.deepcopy(model),
            *(shard(t, mesh, rows, sizes) for t in (points, x, truth)),
        )
    whole = losses(model, points, x, truth)
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=0)
