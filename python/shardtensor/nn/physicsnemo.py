"""Programs that call PhysicsNeMo's searches among points on ShardTensors."""

import torch

from shardtensor.nn.points import knn, radius_search, signed_distance_field
from shardtensor.shard_tensor import ShardTensor


def register_physicsnemo() -> None:
    """From now on PhysicsNeMo's operators `knn_scipy`, `knn_cuml`,
    `radius_search_warp` and `signed_distance_field`, which its functions call, are
    ours where they are called with ShardTensors: results lie as the queries do, and
    all arguments work on points that are cut. Coordinates in 16 bits are searched in
    float32, as there. Registers handlers by name, so PhysicsNeMo need not be there."""
    for name, search in _SEARCHES.items():
        ShardTensor.register_named_function_handler(
            f"physicsnemo.{name}.default", _handler(search)
        )


def _handler(search):
    def handle(func, types, args, kwargs):
        # Versions differ in how many results the operator has.
        return search(*args, **kwargs)[: len(func._schema.returns)]

    return handle


def _in_float32(*tensors):
    """Of one dtype in which we search."""
    exact = all(x.dtype == torch.float64 for x in tensors)
    return [x if exact else x.float() for x in tensors]


def _knn(points, queries, k=3):
    indices, distances = knn(*_in_float32(points, queries), k)
    return indices, distances.to(points.dtype)


def _radius_search(
    points,
    queries,
    radius,
    max_points=None,
    return_dists=False,
    return_points=False,
    variant=None,  # which of its kernels to take
):
    """Indices, points, distances and numbers of neighbours; empty ones for what is
    not asked for."""
    found = iter(
        radius_search(
            *_in_float32(points, queries),
            radius,
            max_points,
            return_dists,
            return_points,
            index_dtype=torch.int32,
            return_counts=True,
        )
    )

    def empty(*shape, dtype=points.dtype):
        return torch.empty(shape, dtype=dtype, device=points.device)

    indices = next(found)
    dims = () if max_points is None else (max_points,)
    near = next(found).to(points.dtype) if return_points else empty(0, *dims, 3)
    away = next(found).to(points.dtype) if return_dists else empty(0)
    counts = empty(0, dtype=torch.int32) if max_points is None else next(found)
    return indices, near, away, counts


def _signed_distance_field(
    mesh_vertices,
    mesh_indices,
    input_points,
    max_dist=1e8,
    use_sign_winding_number=False,
):
    vertices, points = _in_float32(mesh_vertices, input_points)
    distances, nearest, faces = signed_distance_field(
        vertices, mesh_indices, points, max_dist, use_sign_winding_number
    )
    dtype = input_points.dtype
    return distances.to(dtype), nearest.to(dtype), faces


_SEARCHES = {
    "knn_scipy": _knn,
    "knn_cuml": _knn,
    "radius_search_warp": _radius_search,
    "signed_distance_field": _signed_distance_field,
}
