"""Networks on graphs as users write them, nodes and edges cut: one device's losses."""

import copy

import pytest
import torch
from ranks import ranks, shard, uneven
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardtensor

NODES, EDGES, CHANNELS = 40, 130, 8


def perceptron(inputs, outputs=CHANNELS):
    return nn.Sequential(
        nn.Linear(inputs, CHANNELS), nn.SiLU(), nn.Linear(CHANNELS, outputs)
    )


class Processor(nn.Module):
    """One step of MeshGraphNet: edges, then nodes, both with a residual."""

    def __init__(self):
        super().__init__()
        self.edge = nn.Sequential(perceptron(3 * CHANNELS), nn.LayerNorm(CHANNELS))
        self.node = nn.Sequential(perceptron(2 * CHANNELS), nn.LayerNorm(CHANNELS))

    def forward(self, x, e, edges):
        source, target = edges
        e = e + self.edge(torch.cat([e, x[source], x[target]], dim=-1))
        total = torch.zeros_like(x).index_add(0, target, e)
        return x + self.node(torch.cat([x, total], dim=-1)), e


class MeshGraphNet(nn.Module):
    def __init__(self, steps=3):
        super().__init__()
        self.encode_nodes, self.encode_edges = perceptron(4), perceptron(2)
        self.steps = nn.ModuleList(Processor() for _ in range(steps))
        self.decode = perceptron(CHANNELS, 1)

    def forward(self, x, edges):
        source, target = edges
        e = self.encode_edges(x[source, :2] - x[target, :2])
        x = self.encode_nodes(x)
        for step in self.steps:
            x, e = step(x, e, edges)
        return self.decode(x)


class GraphAttention(nn.Module):
    """Scores of edges, normalised over the edges that meet in a node."""

    def __init__(self):
        super().__init__()
        self.lift, self.score = nn.Linear(4, CHANNELS), nn.Linear(2 * CHANNELS, 1)
        self.norm, self.decode = nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 1)

    def forward(self, x, edges):
        source, target = edges
        x = self.lift(x)
        scores = self.score(torch.cat([x[source], x[target]], -1)).squeeze(-1)
        zeros = scores.new_zeros(x.size(0))
        highest = zeros.scatter_reduce(0, target, scores, "amax", include_self=False)
        weights = (scores - highest[target]).exp()
        weights = weights / zeros.scatter_add(0, target, weights)[target]
        rows = weights.unsqueeze(-1) * x[source]
        wide = target.view(-1, 1).expand_as(rows)
        x = torch.zeros_like(x).scatter_add_(0, wide, rows)
        return self.decode(self.norm(x).relu())


def losses(model, x, edges, truth):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(x, edges) - truth).square().mean()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


LAYOUTS = {
    1: ([Shard(0)], [Shard(1)]),
    2: ([Replicate(), Shard(0)], [Replicate(), Shard(1)]),
}


@ranks(1, 2, 3, 4, "2x2")
@pytest.mark.parametrize("network", [MeshGraphNet, GraphAttention])
def test_training(mesh, network):
    model = network().double()
    x, truth = torch.randn(NODES, 4).double(), torch.randn(NODES, 1).double()
    edges = torch.randint(NODES, (2, EDGES))
    nodes, cut = LAYOUTS[mesh.ndim]
    pieces = mesh.size(-1)
    sizes = {0: uneven(NODES, pieces)}
    with shardtensor.fallback_mode("error"):
        sharded = losses(
            copy.deepcopy(model),
            shard(x, mesh, nodes, sizes),
            shard(edges, mesh, cut, {1: uneven(EDGES, pieces)[::-1]}),
            shard(truth, mesh, nodes, sizes),
        )
    expected = losses(model, x, edges, truth)
    torch.testing.assert_close(sharded, expected, rtol=1e-9, atol=0)
