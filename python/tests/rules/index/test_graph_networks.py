"""Networks on graphs as users write them, nodes and edges cut: one device's losses."""

import copy

import pytest
import torch
from networks import GraphAttention, MeshGraphNet
from ranks import ranks, shard, uneven
from torch.distributed.tensor import Replicate, Shard

import shardtensor

NODES, EDGES = 40, 130


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
