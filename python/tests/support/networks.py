"""Networks on graphs and on clouds of points, as their users write them."""

import torch
from fourier import Spectral
from torch import nn
from torch.func import functional_call

from shardtensor import GradReducer, ShardGraph
from shardtensor.nn.functional import (
    ball_query,
    farthest_point_sampling,
    interpolate_neighbors,
    knn,
    radius_search,
)

CHANNELS = 8


def perceptron(inputs, outputs=CHANNELS, bias=True):
    return nn.Sequential(
        nn.Linear(inputs, CHANNELS), nn.SiLU(), nn.Linear(CHANNELS, outputs, bias)
    )


# ---- on graphs: x (N, 4), edges (2, E) to (N, 1) ------------------------------


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
    def __init__(self, steps=15):
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


class Hop(nn.Module):
    """From one set of nodes to another, with a residual."""

    def __init__(self):
        super().__init__()
        self.edge, self.node = perceptron(2 * CHANNELS), perceptron(2 * CHANNELS)

    def forward(self, sources, targets, edges):
        source, target = edges
        messages = self.edge(torch.cat([sources[source], targets[target]], dim=-1))
        total = torch.zeros_like(targets).index_add(0, target, messages)
        return targets + self.node(torch.cat([targets, total], dim=-1))


class Forecast(nn.Module):
    """GraphCast's way: a grid (G, 3) and a mesh (M, 2), edges from one to the other,
    in the mesh of two lengths, and back, to (G, 1)."""

    def __init__(self):
        super().__init__()
        self.grid, self.mesh = perceptron(3), perceptron(2)
        self.encode, self.decode = Hop(), Hop()
        self.steps = nn.ModuleList(Hop() for _ in range(4))
        self.out = perceptron(CHANNELS, 1)

    def forward(self, grid, mesh, to_mesh, short, long, to_grid):
        grid, mesh = self.grid(grid), self.mesh(mesh)
        mesh = self.encode(grid, mesh, to_mesh)
        for step, edges in zip(self.steps, (short, long) * 2):
            mesh = step(mesh, mesh, edges)
        return self.out(self.decode(mesh, grid, to_grid))


class GraphAttention(nn.Module):
    """Scores of edges, normalised over the edges that meet in a node."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(4, CHANNELS)
        self.score = nn.Linear(2 * CHANNELS, 1, bias=False)  # which softmax drops
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


class ByHand(nn.Module):
    """Layers on the rows that a rank has, where `edges` are a ShardGraph: messages
    of interior edges are computed while the halo travels. Its weights meet local
    tensors, so GradReducer completes their gradients."""

    def __init__(self, layers=2):
        super().__init__()
        self.lift, self.decode = nn.Linear(4, CHANNELS), nn.Linear(CHANNELS, 1)
        self.layers = nn.ModuleList(perceptron(2 * CHANNELS) for _ in range(layers))

    def forward(self, x, edges):
        x = self.lift(x)
        for layer in self.layers:
            if isinstance(edges, ShardGraph):
                x = self.of_own_rows(layer, x, edges)
            else:
                x = x.index_add(0, edges[1], self.messages(layer, x, x, *edges))
        return self.decode(x)

    def messages(self, layer, sources, targets, source, target):
        return layer(torch.cat([sources[source], targets[target]], dim=-1))

    def of_own_rows(self, layer, x, graph):
        weights = {
            name: GradReducer.apply(weight, x._spec)
            for name, weight in layer.named_parameters()
        }
        own = x.to_local()
        inner, border = graph.local_edge_index.tensor_split([graph.interior_edges], 1)

        def messages(rows, edges):
            return self.messages(
                lambda pairs: functional_call(layer, weights, pairs), rows, own, *edges
            )

        table, first = graph.halo(x, meanwhile=lambda rows: messages(rows, inner))
        every = torch.cat([first, messages(table, border)])
        return graph.node_tensor(own.index_add(0, graph.local_edge_index[1], every))


# ---- on clouds: points (N, D), x (N, 3) to (N, 1) -----------------------------


class PointNet2(nn.Module):
    """Sampled points gather what is around them; features go back by distance."""

    def __init__(self, dims=3):
        super().__init__()
        self.group, self.up = perceptron(dims + 3), perceptron(CHANNELS + 3)
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
        self.edges = nn.ModuleList(
            perceptron(inputs, bias=False) for inputs in (6, 2 * CHANNELS)
        )  # the norm would drop a bias
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

    def __init__(self, dims=3, slices=4):
        super().__init__()
        self.lift, self.slice = perceptron(dims + 3), nn.Linear(CHANNELS, slices)
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


class GraphOperator(nn.Module):
    """A GNO layer: the mean, over the points within a radius of a query, of their
    values times a kernel that is a perceptron of both places."""

    def __init__(self, dims, radius):
        super().__init__()
        self.radius, self.kernel = radius, perceptron(2 * dims)

    def forward(self, points, values, queries):
        query, point = radius_search(points, queries, self.radius)
        kernel = self.kernel(torch.cat([points[point], queries[query]], -1))
        zeros = torch.zeros_like(queries[:, :1])
        counts = zeros.index_add(0, query, torch.ones_like(kernel[:, :1]))
        sums = zeros.expand(-1, CHANNELS).index_add(0, query, kernel * values[point])
        return sums / counts.clamp(min=1)


class GraphNeuralOperator(nn.Module):
    def __init__(self, dims=3, radius=0.35):
        super().__init__()
        self.lift, self.decode = nn.Linear(3, CHANNELS), perceptron(CHANNELS, 1)
        self.layers = nn.ModuleList(GraphOperator(dims, radius) for _ in range(2))

    def forward(self, points, x):
        x = self.lift(x)
        for layer in self.layers:
            x = x + layer(points, x, points).tanh()
        return self.decode(x)


class Gino(nn.Module):
    """Points to a grid (rows, columns, 2) by a GNO, spectral layers there, and back
    by a GNO. A sharded grid is cut along its rows."""

    def __init__(self):
        super().__init__()
        self.lift, self.decode = nn.Linear(3, CHANNELS), perceptron(CHANNELS, 1)
        self.encode, self.sample = GraphOperator(2, 0.3), GraphOperator(2, 0.2)
        self.spectral = nn.ModuleList(Spectral(CHANNELS, 2) for _ in range(2))

    def forward(self, points, x, grid):
        places = grid.flatten(0, 1)
        x = self.encode(points, self.lift(x), places)
        x = x.unflatten(0, grid.shape[:2]).permute(2, 0, 1).unsqueeze(0)
        for layer in self.spectral:
            x = x + layer(x).tanh()
        x = x.squeeze(0).permute(1, 2, 0).flatten(0, 1)
        return self.decode(self.sample(places, x, points))
