"""PyTorch Geometric's layers as they stand, nodes and edges cut; skipped without it."""

import pytest
import rig
import torch
from ranks import assert_close, check_op, ranks, shard, sharded, uneven
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor

NODES, EDGES, CHANNELS = 40, 130, 8

CONVOLUTIONS = {
    "GCN": lambda g: g.GCNConv(CHANNELS, 8),
    "GAT": lambda g: g.GATConv(CHANNELS, 8, heads=2, concat=False),
    "GATv2": lambda g: g.GATv2Conv(CHANNELS, 8, heads=2),
    "SAGE": lambda g: g.SAGEConv(CHANNELS, 8, aggr=["mean", "max"]),
    "GIN": lambda g: g.GINConv(nn.Linear(CHANNELS, 8)),
    "Edge": lambda g: g.EdgeConv(nn.Linear(2 * CHANNELS, 8)),
    "Transformer": lambda g: g.TransformerConv(CHANNELS, 8, heads=2),
    "Graph": lambda g: g.GraphConv(CHANNELS, 8),
    "TAG": lambda g: g.TAGConv(CHANNELS, 8),
    "Cheb": lambda g: g.ChebConv(CHANNELS, 8, K=2),
    "GatedGraph": lambda g: g.GatedGraphConv(CHANNELS, 2),
    "ResGated": lambda g: g.ResGatedGraphConv(CHANNELS, 8),
    "PNA": lambda g: g.PNAConv(
        CHANNELS,
        8,
        aggregators=["mean", "max", "std"],
        scalers=["identity", "amplification"],
        deg=torch.tensor([0, 5, 10, 20, 10]),
    ),
    "GEN": lambda g: g.GENConv(CHANNELS, 8),
    "CG": lambda g: g.CGConv(CHANNELS),
    "ARMA": lambda g: g.ARMAConv(CHANNELS, 8),
    "APPNP": lambda g: g.APPNP(2, 0.1),
    "MF": lambda g: g.MFConv(CHANNELS, 8),
    "FiLM": lambda g: g.FiLMConv(CHANNELS, 8),
    "TopK": lambda g: g.TopKPooling(CHANNELS),
    "SAG": lambda g: g.SAGPooling(CHANNELS),
}


class OfNodes(nn.Module):
    """A layer that wants no index."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, _):
        return self.layer(x)


# Of the nodes of four graphs in one batch.
OF_BATCHES = {
    "BatchNorm": lambda g: OfNodes(g.BatchNorm(CHANNELS)),
    "GraphNorm": lambda g: g.GraphNorm(CHANNELS),
    "LayerNorm": lambda g: g.LayerNorm(CHANNELS),
    "InstanceNorm": lambda g: g.InstanceNorm(CHANNELS),
    "PairNorm": lambda g: g.PairNorm(),
    "GraphSizeNorm": lambda g: g.GraphSizeNorm(),
    "MeanSubtraction": lambda g: g.MeanSubtractionNorm(),
    "mean": lambda g: g.global_mean_pool,
    "max": lambda g: g.global_max_pool,
    "add": lambda g: g.global_add_pool,
    "attention": lambda g: g.AttentionalAggregation(nn.Linear(CHANNELS, 1)),
    "softmax": lambda g: g.SoftmaxAggregation(learn=True),
    "std": lambda g: g.StdAggregation(),
    "Set2Set": lambda g: g.Set2Set(CHANNELS, 2),
}


class Layer(nn.Module):
    """A layer, or a function, in double precision."""

    def __init__(self, layer):
        super().__init__()
        is_module = isinstance(layer, nn.Module)
        self.layer = layer.double() if is_module else None
        self.call = self.layer or layer

    def forward(self, x, index):
        found = (self.layer or self.call)(x, index)
        return found[:2] if isinstance(found, tuple) else found  # chosen rows, edges


@ranks(2, 3)
@pytest.mark.parametrize("kind", ["convolutions", "of batches"])
def test_layers_are_those_of_one_device_and_gather_nothing(mesh, kind):
    geometric = pytest.importorskip("torch_geometric.nn")
    x = torch.rand(NODES, CHANNELS, dtype=torch.float64, requires_grad=True)
    edges = torch.randint(NODES, (2, EDGES))
    graphs = torch.randint(4, (NODES,)).sort().values
    rows = {0: uneven(NODES, mesh.size())}
    nodes = sharded(x, [Shard(0)], rows)
    index = sharded(edges, [Shard(1)], {1: uneven(EDGES, mesh.size())})
    if kind == "of batches":
        index = sharded(graphs, [Shard(0)], rows)
    layers = CONVOLUTIONS if kind == "convolutions" else OF_BATCHES
    for make in layers.values():
        with shardtensor.fallback_mode("error"):
            check_op(Layer(make(geometric)).to(x.device), nodes, index, mesh=mesh)


@ranks(2, 3)
@pytest.mark.parametrize("kind", ["GCN", "GAT", "GATv2", "Cheb", "ARMA", "TAG"])
def test_a_second_step_of_a_static_graph_plans_nothing(mesh, kind):
    """Though the layers make indices of it, with loops or without, in each."""
    geometric = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(sum(kind.encode()))  # edges that no other kind has a plan of
    layer = CONVOLUTIONS[kind](geometric).to(rig.DEVICE, torch.float64)
    edges = torch.randint(NODES, (2, EDGES))
    edges[1, :5] = edges[0, :5]
    x = torch.rand(NODES, CHANNELS, dtype=torch.float64)
    nodes = shard(x, mesh, [Shard(0)]).requires_grad_()
    index = shard(edges, mesh, [Shard(1)], {1: uneven(EDGES, mesh.size())})

    def plans():
        shardtensor.reset_comm_stats()
        layer(nodes, index).sum().backward()
        return shardtensor.comm_stats().plans

    plans()
    assert plans() == 0
    index[0, 9] = (edges[0, 9] + 1) % NODES
    assert plans() > 0
    assert_close(layer(nodes, index), layer(x, index.full_tensor()))
