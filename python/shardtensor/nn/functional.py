"""Clouds of points: neighbours, the same on any number of ranks.

Points ([B,] N, D) and queries ([B,] M, D) are plain tensors or ShardTensors in
any layout. What is found lies as the queries do; indices are rows of the whole
cloud. See docs/points.md.
"""

import torch

from shardtensor import _ops


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
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The points within `radius` of each query, nearest first: indices, then, as
    asked for, points and distances. With `max_points` the nearest of them, ([B,] M,
    max_points), zeros in unused slots; without, all pairs: indices (2, pairs) of
    query and point, (3, pairs) with the batch entry before them."""
    found = _ops.radius_search(
        points, queries, radius, max_points, return_dists, return_points
    )
    return found[0] if len(found) == 1 else tuple(found)
