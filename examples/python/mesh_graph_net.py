"""MeshGraphNet (Pfaff et al., 2021) as one writes it for one device."""

import torch
from torch import nn


def perceptron(inputs, width):
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.LayerNorm(width),
    )


class Processor(nn.Module):
    """Edges learn from their ends, then nodes from the edges that end in them."""

    def __init__(self, width):
        super().__init__()
        self.edge = perceptron(3 * width, width)
        self.node = perceptron(2 * width, width)

    def forward(self, nodes, edges, source, target):
        ends = torch.cat([edges, nodes[source], nodes[target]], dim=-1)
        edges = edges + self.edge(ends)
        sums = torch.zeros_like(nodes).index_add(0, target, edges)
        return nodes + self.node(torch.cat([nodes, sums], dim=-1)), edges


class MeshGraphNet(nn.Module):
    """Features of nodes (N, inputs) and edges (E, edge_inputs) and the edge_index
    (2, E) to a value for each node, (N)."""

    def __init__(self, inputs, edge_inputs, width, depth):
        super().__init__()
        self.encode_nodes = perceptron(inputs, width)
        self.encode_edges = perceptron(edge_inputs, width)
        self.processors = nn.ModuleList(Processor(width) for _ in range(depth))
        self.decode = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, nodes, edges, edge_index):
        source, target = edge_index[0], edge_index[1]
        nodes, edges = self.encode_nodes(nodes), self.encode_edges(edges)
        for processor in self.processors:
            nodes, edges = processor(nodes, edges, source, target)
        return self.decode(nodes)[:, 0]
