"""Networks on graphs and clouds of points, another sample on each index of a data
axis: the losses, gradients and parameters of one device that has all samples."""

import copy

import pytest
import torch
from data_by_domain import make, over_data, whole
from networks import (
    ByHand,
    DynamicGraph,
    Gino,
    GraphAttention,
    GraphNeuralOperator,
    MeshGraphNet,
    PointNet2,
    Transolver,
)
from ranks import ranks, shard, uneven
from torch.distributed.tensor import Shard

from shardtensor import ShardGraph, check_replicas, parallelize, partition_nodes

# Nodes and edges of the sample of each index of the data axis.
SIZES = [(40, 130), (31, 90)]
STEPS = 4


def rows(x, domain):
    return shard(x, domain, [Shard(0)], {0: uneven(len(x), domain.size())})


def graph_sample(nodes, edges):
    x, truth = torch.randn(nodes, 4).double(), torch.randn(nodes, 1).double()
    return (x, torch.randint(nodes, (2, edges))), truth


def cut_edges(sample, domain):
    """Nodes and edges in the pieces in which they came."""
    (x, edges), truth = sample
    sizes = {1: uneven(edges.size(1), domain.size())[::-1]}
    edge_index = shard(edges, domain, [Shard(1)], sizes)
    return (rows(x, domain), edge_index), rows(truth, domain)


def by_owners(sample, domain):
    """Edges go to the owners of their targets."""
    (x, edges), truth = sample
    nodes = partition_nodes(domain, points=rows(x[:, :2], domain))
    graph = ShardGraph(shard(edges, domain, [Shard(1)]), nodes)
    return (rows(x, domain)[nodes], graph), rows(truth, domain)[nodes]


def edges_by_owners(sample, domain):
    (x, graph), truth = by_owners(sample, domain)
    return (x, graph.edge_index), truth


def cloud_sample(dims):
    def sample(points, _):
        x, truth = torch.rand(points, 3).double(), torch.rand(points, 1).double()
        return (torch.rand(points, dims).double(), x), truth

    return sample


def cut_cloud(sample, domain):
    given, truth = sample
    return [rows(x, domain) for x in given], rows(truth, domain)


def grid_sample(points, _):
    (at, x), truth = cloud_sample(2)(points, _)
    axes = torch.arange(6).add(0.5).div(6).double()
    return (at, x, torch.cartesian_prod(axes, axes).view(6, 6, 2)), truth


CASES = {
    "MeshGraphNet": (MeshGraphNet, graph_sample, cut_edges),
    "MeshGraphNet by owners": (MeshGraphNet, graph_sample, edges_by_owners),
    "graph attention": (GraphAttention, graph_sample, edges_by_owners),
    "by hand": (ByHand, graph_sample, by_owners),
    "PointNet++": (PointNet2, cloud_sample(3), cut_cloud),
    "DGCNN": (DynamicGraph, cloud_sample(3), cut_cloud),
    "Transolver": (Transolver, cloud_sample(3), cut_cloud),
    "GNO": (GraphNeuralOperator, cloud_sample(3), cut_cloud),
    "GINO": (Gino, grid_sample, cut_cloud),
}


def train(model, samples, value_of):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        terms = [(model(*given) - truth).square().mean() for given, truth in samples]
        loss = sum(terms) / len(terms)
        loss.backward()
        optimizer.step()
        losses.append(value_of(loss).item())
    return losses


def cases():
    """FSDP's own hooks ask little of a network, and take long."""
    for name in CASES:
        yield "ddp", name
        yield pytest.param("fsdp", name, marks=pytest.mark.tail)


@ranks("2x2")
@pytest.mark.parametrize("data, name", [*cases()])
def test_steps_are_those_of_one_device(mesh, data, name):
    mesh, _, domain = make("2x2")
    network, sample_of, cut = CASES[name]
    model = network().double()
    samples = [sample_of(*sizes) for sizes in SIZES]
    reference = copy.deepcopy(model)
    # Weights that are used by hand are whole in the forward of all.
    model = parallelize(model, mesh, data, units=[] if network is ByHand else None)
    mine = cut(samples[mesh.get_local_rank(0)], domain)
    found = train(model, [mine], lambda loss: over_data(loss, mesh))
    expected = train(reference, samples, lambda loss: loss)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    inner = getattr(model, "module", model)
    pairs = zip(inner.named_parameters(), reference.parameters(), strict=True)
    for (what, p), q in pairs:
        for a, b in ((p.grad, q.grad), (p, q)):
            close = torch.allclose(whole(a), b, rtol=1e-8, atol=1e-10)
            assert close, f"{what}: {whole(a)}, expected {b}"
    # Running statistics are those of the samples of one index of the data axis.
    statistics = any(isinstance(m, torch.nn.BatchNorm1d) for m in model.modules())
    check_replicas(model, domain if statistics else mesh)
