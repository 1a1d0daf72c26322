"""Graphs cut over ranks: none holds more than its nodes and their edges.

See docs/graphs.md.
"""

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C
from shardtensor.agree import agree
from shardtensor.create import scatter_tensor
from shardtensor.nn.points import description, partition_points
from shardtensor.shard_tensor import ShardTensor


class ShardGraph:
    """A graph on all ranks of a mesh. Each rank has its own nodes, the edges that
    end in them and a list of the halo, the sources of these edges that others own.

        nodes = partition_nodes(mesh, points=coordinates)  # or owners=...
        graph = ShardGraph(edge_index, nodes)
        x = features[nodes]  # in the graph's order of nodes
        e = weights[graph.edge_permutation]  # and of edges
        y = conv(x, graph.edge_index)  # any network: ShardTensors as operands
        table = graph.halo(x)  # or by hand: this rank's rows, then the halo's
        sources, targets = graph.local_edge_index

    `edge_index` (2, E), sources and targets in the numbers before, is cut along E or
    the same on all ranks. `nodes` (N) says whose nodes are whose, and their order:
    node i was node nodes[i]. In a graph that leads from one set of nodes to another
    (grid to mesh) these are the targets; `sources` is the other set's. Graphs of
    several kinds of edges share their `nodes`.

    Thread safety / ordering: all ranks make the same calls in the same order.
    Communication of the constructor: each edge once, four numbers for each end."""

    def __init__(
        self,
        edge_index: torch.Tensor,
        nodes: ShardTensor,
        sources: ShardTensor | None = None,
    ):
        self.nodes = nodes
        self.sources = nodes if sources is None else sources
        self._core = _C.ShardGraph(edge_index, self.nodes, self.sources)

    @property
    def edge_index(self) -> ShardTensor:
        """(2, E) in the new numbers, cut along E: each rank's edges end in its own
        nodes. Interior edges stand first, whose source is an own node, too."""
        return self._core.edge_index

    @property
    def edge_permutation(self) -> ShardTensor:
        """(E), cut alike: edge i was edge edge_permutation[i]."""
        return self._core.edge_permutation

    @property
    def local_edge_index(self) -> torch.Tensor:
        """Plain, (2, own edges): sources among the rows of `halo`, targets among the
        own nodes."""
        return self._core.local_edge_index

    @property
    def interior_edges(self) -> int:
        """How many of the own edges, the first ones, need no halo."""
        return self._core.interior_edges

    @property
    def halo_nodes(self) -> torch.Tensor:
        """Plain: the new numbers of the halo's nodes, ascending, so that those of one
        owner stand together."""
        return self._core.halo_nodes

    def halo(
        self,
        x: ShardTensor,
        meanwhile: Callable[[torch.Tensor], object] | None = None,
    ):
        """The own rows of `x` (sources, ...) and behind them the halo's, a plain
        tensor. Differentiable to any order: gradients of the halo's rows are added
        where these came from. Communication: one message to and from each rank
        concerned.

        With `meanwhile`, a function of the own rows that runs while the messages
        travel (the work of the interior edges): a pair of the rows and its result.
        It must not communicate; for what it raises on one rank others do not wait
        here, but at their next message."""
        if meanwhile is None:
            return self._core.halo(x)
        results = []
        rows = self._core.halo_during(x, lambda own: results.append(meanwhile(own)))
        return rows, results[0]

    def node_tensor(self, local: torch.Tensor) -> ShardTensor:
        """A row for each own (target) node, as a ShardTensor of all."""
        return self._core.node_tensor(local)

    def edge_tensor(self, local: torch.Tensor) -> ShardTensor:
        """A row for each own edge, as a ShardTensor of all."""
        return self._core.edge_tensor(local)


def partition_nodes(
    mesh: DeviceMesh,
    *,
    owners: torch.Tensor | None = None,
    points: torch.Tensor | None = None,
    edge_index: torch.Tensor | None = None,
    nodes: int | None = None,
    method: str | None = None,
    weights: torch.Tensor | None = None,
) -> ShardTensor:
    """Which rank owns which node, as the order of the nodes: (N), int64, cut by all
    axes of the mesh; node i was node result[i]. One of

    - `owners` (N): the position in the mesh of each node's owner;
    - `points` (N, D): the nodes' coordinates; `method` is "rcb" (the default) or
      "hilbert", as in `partition_points`, and `weights` (N) balance work;
    - `edge_index` (2, E) and the number of `nodes`: METIS cuts few edges. It needs
      the package pymetis, and the first rank of the mesh gathers the graph for it."""
    given = {"owners": owners, "points": points, "edge_index": edge_index}
    told = error = None
    try:
        told = _way(given, nodes, method, weights)
    except (IndexError, TypeError, ValueError) as problem:
        error = problem
    agree(mesh, error, told, "partition_nodes: ")
    if points is not None:
        return partition_points(points, mesh, method or "rcb", weights)[1]
    if edge_index is not None:
        owners = _owners_by_metis(edge_index, nodes, mesh)
    places = torch.zeros_like(owners, dtype=torch.float32).unsqueeze(-1)
    return partition_points(places, mesh, "given", owners=owners)[1]


def _way(given, nodes, method, weights):
    """What all ranks must have alike."""
    names = [name for name, x in given.items() if x is not None]
    if len(names) != 1:
        raise ValueError(
            "partition_nodes: expected one of owners, points and edge_index, got "
            f"{len(names)}"
        )
    name, of_graph = names[0], names == ["edge_index"]
    if name != "points" and method not in (None, "metis" if of_graph else "given"):
        raise ValueError(
            "partition_nodes: expected no method, for owners are given, or 'metis' for "
            f"a graph, got {method!r}"
        )
    if name != "points" and weights is not None:
        raise ValueError(
            f"partition_nodes: weights balance points, expected none with {name}"
        )
    if not of_graph and nodes is not None:
        raise ValueError(
            f"partition_nodes: expected no number of nodes, for {name} tells it, got "
            f"{nodes}"
        )
    told = f"{name}: {description(name, given[name])}, nodes {nodes}, method {method}"
    if of_graph:
        _check_graph(given[name], nodes)
    return told


def _owners_by_metis(edge_index, nodes, mesh):
    """(N), cut by all axes; the mesh's first rank alone holds the graph for it."""
    from torch.distributed.tensor import Shard  # slow to import

    first = int(mesh.mesh.flatten()[0])
    edges = _on_first_rank(edge_index, mesh)
    owners = error = None
    if torch.distributed.get_rank() == first:
        try:
            owners = _metis_parts(edges.cpu(), nodes, mesh.size())
        except Exception as raised:
            error = raised
    agree(mesh, error)
    return scatter_tensor(owners, first, mesh, [Shard(0)] * mesh.ndim)


def _check_graph(edge_index, nodes):
    if not isinstance(nodes, int) or nodes < 0:
        raise ValueError(
            f"partition_nodes: expected the number of nodes, got nodes={nodes!r}"
        )
    shape = tuple(edge_index.shape)
    if len(shape) != 2 or shape[0] != 2 or edge_index.dtype != torch.int64:
        raise ValueError(
            "partition_nodes: expected edge_index (2, E) of int64, got "
            f"{shape} of {edge_index.dtype}"
        )


def _on_first_rank(edge_index, mesh):
    """The whole on the mesh's first rank, nothing on others."""
    from torch.distributed.tensor import Shard

    if not _C.is_shard_tensor(edge_index):
        return edge_index
    sizes = [edge_index.size(1)] + [0] * (mesh.size() - 1)
    cut = [Shard(1)] * mesh.ndim
    return edge_index.redistribute(mesh, cut, sizes={1: sizes}).to_local()


def _metis_parts(edges, nodes, parts):
    try:
        import pymetis
    except ImportError as error:
        raise ImportError(
            "partition_nodes: a partition of edge_index needs pymetis: "
            "pip install shardtensor[metis]"
        ) from error
    _check_edges(edges, nodes)
    begins, neighbours = _neighbours(edges, nodes)
    _, owners = pymetis.part_graph(
        parts, xadj=begins.tolist(), adjncy=neighbours.tolist()
    )
    return torch.tensor(owners, dtype=torch.int64, device="cpu")


def _check_edges(edges, nodes):
    if edges.numel() > 0:
        for index in (int(edges.min()), int(edges.max())):
            if not 0 <= index < nodes:
                raise IndexError(
                    f"partition_nodes: edge_index names node {index}, expected one of "
                    f"{nodes} nodes"
                )


def _neighbours(edges, nodes):
    """Each node's neighbours, both ways, once: as METIS reads them."""
    source, target = torch.cat([edges, edges.flip(0)], dim=1)
    pairs = (source * nodes + target)[source != target].unique()
    counts = torch.bincount(pairs // nodes, minlength=nodes)
    begins = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return begins, pairs % nodes
