"""PhysicsNeMo's own functions of points come here: their operators, as they declare
them, on tensors that are cut."""

import pytest
import torch
from layouts import placements_of, sweep
from oracle import every
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor import ShardTensor
from shardtensor.nn.functional import register_physicsnemo

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("physicsnemo::radius_search_warp", mutates_args=())
def radius_search_warp(
    points: torch.Tensor,
    queries: torch.Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
) -> Four:
    """Stands for theirs, which knows plain tensors; here the nearest come first."""
    away, order = torch.cdist(queries, points).sort(dim=-1, stable=True)
    inside = away <= radius
    none = points.new_empty(0)
    if max_points is None:
        place = inside.nonzero(as_tuple=True)
        rows = order[place]
        near = points[(*place[:-2], rows)]
        indices = torch.stack([*place[:-1], rows]).int()
        return (
            indices,
            near if return_points else points.new_empty(0, 3),
            away[place] if return_dists else none,
            torch.empty(0, dtype=torch.int32),
        )
    inside, order, away = (x[..., :max_points] for x in (inside, order, away))
    rows = order.where(inside, 0)
    batch = [torch.arange(len(points)).view(-1, 1, 1)] * (points.dim() - 2)
    near = points[(*batch, rows)]
    return (
        rows.int(),
        near * inside[..., None]
        if return_points
        else points.new_empty(0, max_points, 3),
        away.where(inside, 0) if return_dists else none,
        inside.sum(-1).int(),
    )


def radius_search(
    points, queries, radius, max_points=None, return_dists=False, return_points=False
):
    """As their function drops what was not asked for."""
    given = points, queries, radius, max_points, return_dists, return_points
    indices, near, away, _ = radius_search_warp(*given)
    found = (indices, *([near] * return_points), *([away] * return_dists))
    return found if len(found) > 1 else indices


@torch.library.custom_op("physicsnemo::knn_scipy", mutates_args=())
def knn_scipy(
    points: torch.Tensor, queries: torch.Tensor, k: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    away, order = torch.cdist(queries.double(), points.double()).sort(dim=-1)
    return order[:, :k].clone(), away[:, :k].to(points.dtype)


@torch.library.custom_op("physicsnemo::signed_distance_field", mutates_args=())
def signed_distance_field(
    mesh_vertices: torch.Tensor,
    mesh_indices: torch.Tensor,
    input_points: torch.Tensor,
    max_dist: float = 1e8,
    use_sign_winding_number: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Newer versions leave out the faces."""
    given = mesh_vertices, mesh_indices, input_points, max_dist, use_sign_winding_number
    found = shardtensor.nn.functional.signed_distance_field(*given)
    return found[0].clone(), found[1].clone()


class registered:
    def __enter__(self):
        register_physicsnemo()

    def __exit__(self, *_):
        for name in [*ShardTensor._named_function_registry]:
            ShardTensor.unregister_named_function_handler(name)


def layouts(mesh, x):
    rows = x.dim() - 2
    yield from sweep(mesh, x.shape, dims=[rows])


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("max_points", [3, None])
def test_radius_search(mesh, batch, max_points):
    points, queries = torch.rand(*batch, 11, 3), torch.rand(*batch, 6, 3)
    whole = [Replicate()] * mesh.ndim
    with registered(), shardtensor.fallback_mode("error"):
        flags = [(True, True), (False, True), (True, False), (False, False)]
        for wanted in every(3, flags):
            expected = radius_search_warp(points, queries, 0.5, max_points, *wanted)
            for placements, sizes in layouts(mesh, points):
                for of in (whole, placements_of(mesh, len(batch))):
                    at = shard(points, mesh, placements, sizes)
                    near = shard(queries, mesh, of)
                    found = radius_search_warp(at, near, 0.5, max_points, *wanted)
                    for actual, right in zip(found, expected, strict=True):
                        assert_close(actual, right)
                    if max_points and of == [Shard(0)]:
                        assert found[0].placements == (Shard(0),)
        assert_close(
            radius_search(at, near, 0.5, max_points),
            radius_search(points, queries, 0.5, max_points),
        )


@ranks(2)
def test_derivatives_of_points_that_are_cut(mesh):
    points, queries = torch.rand(11, 3), torch.rand(6, 3)
    at, near = (shard(x, mesh, [Shard(0)]).requires_grad_() for x in (points, queries))
    points.requires_grad_()
    rows = radius_search_warp(points.detach(), queries, 0.6, 4, False, True)
    used = torch.arange(4) < rows[3][:, None]
    (points[rows[0].long()] * used[..., None]).sin().sum().backward()
    with registered():
        radius_search(at, near, 0.6, 4, return_points=True)[1].sin().sum().backward()
    assert_close(at.grad, points.grad)


@ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_knn(mesh, dtype):
    points, queries = torch.rand(11, 3).to(dtype), torch.rand(6, 3).to(dtype)
    with registered():
        found = knn_scipy(
            shard(points, mesh, [Shard(0)]), shard(queries, mesh, [Shard(0)]), k=9
        )
    expected = knn_scipy(points, queries, 9)
    assert found[0].dtype == torch.int64 and found[1].dtype == dtype
    assert_close(found[1], expected[1])
    assert all(x.placements == (Shard(0),) for x in found)


@ranks(1, 2, "2x2")
def test_signed_distance_field(mesh):
    corners = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    faces = torch.tensor(
        [[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]], dtype=torch.int32
    )
    points = torch.rand(4, 3, 3)
    for given in (faces, faces.flatten()):
        expected = signed_distance_field(corners, given, points, 0.4)
        with registered():
            found = signed_distance_field(
                corners.double(),
                shard(given, mesh, [Replicate()] * mesh.ndim),
                shard(points, mesh, placements_of(mesh, 0, 1)),
                0.4,
                use_sign_winding_number=False,
            )
        for actual, right in zip(found, expected, strict=True):
            assert_close(actual, right)
            assert list(actual.placements) == placements_of(mesh, 0, 1)


@ranks(2)
def test_plain_tensors_stay_theirs(mesh):
    with registered():
        found = knn_scipy(torch.rand(5, 3), torch.rand(2, 3), 2)
    assert type(found[0]) is torch.Tensor
