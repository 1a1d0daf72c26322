"""One processor step of MeshGraphNet: 200 k nodes, 1.2 M edges, 128 channels,
forward and backward; and what it costs to plan a static graph."""

import torch
import torch.distributed as dist
from report import Table
from timing import block, compare
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardGraph, ShardTensor, partition_nodes

SIDE, CHANNELS = 447, 128
PLANNED_SIDE = 1291  # 10 M edges
ROUNDS = 3


def table(mesh):
    sent, needed, plans = traffic(mesh)  # before the plans of its index are made
    rows = {"nodes and edges cut": compare(variants(mesh), ROUNDS, calls=1)}
    seconds, again = planning(mesh)
    by_owner = cutting(mesh)
    note = (
        "Ceiling: as many nodes and edges on each rank, none of which knows another "
        f"rank's. A step sends {sent / 2**10:.1f} KiB of halos per rank, "
        f"{needed / 2**10:.1f} KiB are the features of nodes that the cut separates "
        "from an edge's target, forth and back; the first step makes "
        f"{plans[0]} plans of rows, the second {plans[1]}. Planning a graph of 10 M "
        "edges, at the first "
        f"use of one of its two rows, takes {seconds:.1f} s per rank; all later calls "
        f"plan nothing ({again:.2f} s with the reading of one channel). `ShardGraph` "
        "of the same graph, its nodes and edges in random order, each rank with a "
        f"piece of the edges: {by_owner:.1f} s."
    )
    return Table(
        f"MeshGraphNet step, {SIDE}² nodes, {CHANNELS} channels", "ceiling", rows, note
    )


class Processor(nn.Module):
    def __init__(self):
        super().__init__()
        self.edge, self.node = perceptron(3), perceptron(2)

    def forward(self, x, e, source, target):
        e = e + self.edge(torch.cat([e, x[source], x[target]], -1))
        total = torch.zeros_like(x).index_add(0, target, e)
        return x + self.node(torch.cat([x, total], -1))


def perceptron(inputs):
    return nn.Sequential(
        nn.Linear(inputs * CHANNELS, CHANNELS),
        nn.SiLU(),
        nn.Linear(CHANNELS, CHANNELS),
        nn.LayerNorm(CHANNELS),
    )


def triangles(rows, columns):
    """The edges of a triangulated rectangle, both ways, by target: (2, edges)."""
    number = torch.arange(rows * columns).view(rows, columns)
    pairs = [
        (number[:, 1:], number[:, :-1]),
        (number[1:], number[:-1]),
        (number[1:, 1:], number[:-1, :-1]),
    ]
    forth = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], 1)
    edges = torch.cat([forth, forth.flip(0)], 1)
    return edges[:, edges[1].argsort(stable=True)]


def cut(mesh, side):
    """The nodes of each rank, the edges that end in own ones, how many all have."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    rows = [side // ranks + (r < side % ranks) for r in range(ranks)]
    nodes = [n * side for n in rows]
    begins = [sum(nodes[:r]) for r in range(ranks)]
    edges = triangles(side, side)
    owner = torch.bucketize(edges[1], torch.tensor(begins[1:]), right=True)
    counts = torch.bincount(owner, minlength=ranks).tolist()
    return nodes, edges[:, owner == rank], counts


def planning(mesh):
    nodes, edges, counts = cut(mesh, PLANNED_SIDE)
    shards = sharded(mesh, nodes, edges, counts, 1)
    return [block(lambda: shards[0][shards[2]], calls=1) for _ in range(2)]


def cutting(mesh):
    """Renumbers, sends each edge to its target's owner and finds the halo."""
    edge_index, nodes = scattered(mesh, PLANNED_SIDE)
    return block(lambda: ShardGraph(edge_index, nodes), calls=1)


def scattered(mesh, side):
    """Each rank's piece of a graph whose nodes and edges stand in random order, and
    which rank shall own which node."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    torch.manual_seed(0)
    number = torch.randperm(side * side)
    edges = number[triangles(side, side)]
    piece = edges[:, torch.randperm(edges.size(1))].tensor_split(ranks, 1)[rank]
    owners = torch.empty_like(number)
    owners[number] = torch.arange(side * side) * ranks // (side * side)
    nodes = partition_nodes(mesh, owners=owners)
    return ShardTensor.from_local(piece.contiguous(), mesh, [Shard(1)]), nodes


def traffic(mesh):
    """Bytes of halos that a rank sends in a step, as many as the cut asks for, mean
    over ranks, and the plans of the first two steps. Parameters' gradients are left
    to others, as under DDP."""
    nodes, edges, counts = cut(mesh, SIDE)
    rank = mesh.get_local_rank()
    begin, end = sum(nodes[:rank]), sum(nodes[: rank + 1])
    sources = edges[0]
    halo = sources[(sources < begin) | (sources >= end)].unique()
    run = step(Processor(), *sharded(mesh, nodes, edges, counts, CHANNELS))
    plans = []
    with shardtensor.gradient_policy("deferred"):
        for _ in range(2):
            shardtensor.reset_comm_stats()
            run()
            plans.append(shardtensor.comm_stats().plans)
    sent, needed = shardtensor.comm_stats().bytes, 2 * 4 * CHANNELS * len(halo)
    both = torch.tensor([sent, needed], dtype=torch.float64)
    dist.all_reduce(both)
    return *(both / mesh.size()).tolist(), plans


def variants(mesh):
    nodes, edges, counts = cut(mesh, SIDE)
    rank = mesh.get_local_rank()
    begin, own = sum(nodes[:rank]), nodes[rank]
    torch.manual_seed(0)
    model = Processor()
    inside = (edges - begin).remainder(own)
    local = features(own), features(edges.size(1))
    return {
        "ceiling": step(model, *local, *inside),
        "ShardTensor": step(model, *sharded(mesh, nodes, edges, counts, CHANNELS)),
    }


def features(rows, channels=CHANNELS):
    return torch.randn(rows, channels).requires_grad_()


def sharded(mesh, nodes, edges, counts, channels):
    def shard(local, sizes):
        return ShardTensor.from_local(
            local.detach(), mesh, [Shard(0)], sharding_shapes={0: sizes}
        )

    x = features(nodes[mesh.get_local_rank()], channels)
    e = features(edges.size(1), channels)
    return (
        shard(x, [(n, channels) for n in nodes]).requires_grad_(),
        shard(e, [(n, channels) for n in counts]).requires_grad_(),
        *(shard(row, [(n,) for n in counts]) for row in edges),
    )


def step(model, x, e, source, target):
    def run():
        x.grad = e.grad = None
        model.zero_grad()
        model(x, e, source, target).sum().backward()

    return run
