"""Functions of whole domains, on plain tensors and ShardTensors."""

from shardtensor.nn.natten import register_natten
from shardtensor.nn.neighborhood import neighborhood_attention
from shardtensor.nn.physicsnemo import register_physicsnemo
from shardtensor.nn.points import (
    ball_query,
    devoxelize,
    farthest_point_sampling,
    grid_subsample,
    interpolate_neighbors,
    knn,
    partition_points,
    radius_search,
    signed_distance_field,
    voxelize,
)
from shardtensor.nn.sphere import pad_sphere

__all__ = [
    "ball_query",
    "devoxelize",
    "farthest_point_sampling",
    "grid_subsample",
    "interpolate_neighbors",
    "knn",
    "neighborhood_attention",
    "pad_sphere",
    "partition_points",
    "radius_search",
    "register_natten",
    "register_physicsnemo",
    "signed_distance_field",
    "voxelize",
]
