"""Clouds of points: neighbours, the same on any number of ranks.

Points ([B,] N, D) and queries ([B,] M, D) are plain tensors or ShardTensors in
any layout. What is found lies as the queries do; indices are rows of the whole
cloud. See docs/points.md.
"""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C, _ops
from shardtensor.agree import agree
from shardtensor.shard_tensor import ShardTensor


def knn(
    points: torch.Tensor, queries: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k nearest points of each query, nearest first, equal distances by row:
    indices and distances, ([B,] M, k). Distances are differentiable, twice."""
    return _ops.knn(points, queries, k)


def radius_search(
    points: torch.Tensor,
    queries: torch.Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
    *,
    index_dtype: torch.dtype | None = None,
    return_counts: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The points within `radius` of each query, nearest first: indices, then, as
    asked for, points, distances and numbers of neighbours ([B,] M). With `max_points`
    the nearest of them, ([B,] M, max_points), zeros in unused slots; without, all
    pairs: indices (2, pairs) of query and point, (3, pairs) with the batch entry
    before them. Indices and numbers are int64, or of `index_dtype`: int32, as
    PhysicsNeMo gives them."""
    found = _ops.radius_search(
        points,
        queries,
        radius,
        max_points,
        return_dists,
        return_points,
        index_dtype,
        return_counts,
    )
    return found[0] if len(found) == 1 else tuple(found)


def ball_query(
    points: torch.Tensor, queries: torch.Tensor, radius: float, max_points: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of neighbours: for each query the `max_points` nearest points within
    `radius`, ([B,] M, max_points), and how many they are, ([B,] M). Where there are
    fewer the nearest stands again, 0 where there is none."""
    return _ops.ball_query(points, queries, radius, max_points)


def farthest_point_sampling(
    points: torch.Tensor, count: int, start: int = 0
) -> torch.Tensor:
    """`count` rows of the points ([B,] N, D), from `start` on each the one that is
    farthest from those before: ([B,] count), cut as the points' rows are."""
    return _ops.farthest_point_sampling(points, count, start)


def interpolate_neighbors(
    points: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    k: int = 3,
    power: float = 2,
) -> torch.Tensor:
    """Values ([B,] N, C) of the points, at the queries: ([B,] M, C), the mean of the k
    nearest points' values weighted by 1 / distance**power; at a point its own value.
    Differentiable to any order in all three."""
    return _ops.interpolate_neighbors(points, values, queries, k, power)


def grid_subsample(
    points: torch.Tensor, size: float, values: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    """One point for each cube of edge `size` that has any of the points ([B,] N, D),
    which begin at the least coordinates: the mean of its points (M, D), of their values
    ([B,] N, C), how many they are (M), and the row of each point's cube ([B,] N). Of a
    batch, whose entries have cubes of their own, also the entry of each cube (M). Cubes
    stand entry by entry in row-major order, cut by the axes that cut the points. Means
    are differentiable, to any order."""
    means, of_values, *others, entries = _ops.grid_subsample(points, size, values)
    if points.dim() == 3:
        others.append(entries)
    return means, None if values is None else of_values, *others


def voxelize(
    points: torch.Tensor,
    values: torch.Tensor,
    low: Sequence[float],
    high: Sequence[float],
    shape: Sequence[int],
    reduce: str = "mean",
) -> torch.Tensor:
    """The mean, or "sum", of the values ([B,] N, C) of the points in each of the
    `shape` voxels of a box: ([B,] C, *shape), zero where there are none, the first dim
    of space cut by the axes that cut the points. Points outside, with coordinates
    below `low` or from `high` on, count nowhere."""
    return _ops.voxelize(points, values, low, high, shape, reduce)


def devoxelize(
    voxels: torch.Tensor,
    points: torch.Tensor,
    low: Sequence[float],
    high: Sequence[float],
    mode: str = "linear",
) -> torch.Tensor:
    """Voxels ([B,] C, *shape) of a box at the points: ([B,] N, C), linear between the
    centers of voxels and constant beyond the outermost, or "nearest": of the voxel
    that a point is in. Differentiable, to any order, in voxels and points."""
    return _ops.devoxelize(voxels, points, low, high, mode)


def signed_distance_field(
    mesh_vertices: torch.Tensor,
    mesh_indices: torch.Tensor,
    input_points: torch.Tensor,
    max_dist: float = 1e8,
    use_sign_winding_number: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distances (...) of points (..., 3) from a surface of triangles, negative inside,
    the nearest points on it (..., 3) and the faces those are on (...); NaN, NaN and -1
    beyond `max_dist`. Vertices (V, 3) and faces (F, 3) or (3 F) are gathered to all
    ranks; results lie as the points do. Inside is behind the nearest face, or with
    `use_sign_winding_number` where the surface, which may have holes, winds around the
    point. Differentiable, to any order, in vertices and points. The search is the
    host's: three copies from another device, three back."""
    return _ops.signed_distance_field(
        mesh_vertices, mesh_indices, input_points, max_dist, use_sign_winding_number
    )


def partition_points(
    points: torch.Tensor,
    mesh: DeviceMesh,
    method: str = "rcb",
    weights: torch.Tensor | None = None,
    *,
    owners: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The points (N, D) in another order, so that each rank's are near each other,
    and the permutation: `result[i]` was `points[permutation[i]]`. Both are cut along
    dim 0 by all axes of the mesh.

    `method`: "rcb" halves the cloud across its widest dim, again and again,
    "hilbert" cuts a space-filling curve, each into parts of the same sum of
    `weights` (N; none: of the same number of points); "given" takes the positions
    in the mesh from `owners` (N). `points` are a ShardTensor on that mesh in any
    layout, or plain and the same on all ranks."""
    if not torch.compiler.is_compiling():
        _agree_on_partition(points, mesh, method, weights, owners)
    if not _C.is_shard_tensor(points):
        from torch.distributed.tensor import Replicate  # slow to import

        whole = [Replicate()] * mesh.ndim
        points = ShardTensor.from_local(points, mesh, whole, "chunk")
    return _ops.partition_points(points, method, weights, owners)


def _agree_on_partition(points, mesh, method, weights, owners):
    told = error = None
    given = {"points": points, "weights": weights, "owners": owners}
    try:
        told = method, [description(name, x) for name, x in given.items()]
        if points is None:
            raise TypeError("points: expected a tensor, got None")
        if _C.is_shard_tensor(points) and points.device_mesh != mesh:
            raise ValueError(f"expected points on {mesh}, got {points.device_mesh}")
    except (TypeError, ValueError) as problem:
        error = type(problem)(f"partition_points: {problem}")
    agree(mesh, error, told, "partition_points: ")


def description(name: str, x: torch.Tensor | None) -> str:
    """What ranks must have alike of an argument."""
    if x is None:
        return "None"
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {x!r}")
    return f"a {type(x).__name__} {[*x.shape]} of {x.dtype}"
