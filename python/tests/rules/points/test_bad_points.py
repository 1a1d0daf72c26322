"""What no function of points takes is one error that names it, on every rank."""

import pytest
import torch
from layouts import placements_of
from oracle import every
from ranks import ranks, shard

import shardtensor
from shardtensor import partition_nodes
from shardtensor.nn.functional import (
    ball_query,
    farthest_point_sampling,
    grid_subsample,
    interpolate_neighbors,
    knn,
    partition_points,
    radius_search,
    signed_distance_field,
)

POINTS = 9
FACES = torch.tensor([[0, 2, 1], [0, 1, 3]])

SEARCHES = {
    "knn": lambda p, q: knn(p, q, 2),
    "radius_search": lambda p, q: radius_search(p, q, 0.5, 2),
    "radius_search of pairs": lambda p, q: radius_search(p, q, 0.5),
    "ball_query": lambda p, q: ball_query(p, q, 0.5, 2),
    "interpolate_neighbors": lambda p, q: interpolate_neighbors(p, p, q),
    "signed_distance_field": lambda p, q: signed_distance_field(p, FACES, q),
}
OF_ONE_CLOUD = {
    "farthest_point_sampling": lambda p: farthest_point_sampling(p, 3),
    "grid_subsample": lambda p: grid_subsample(p, 0.5),
    "partition_points": lambda p: partition_points(p, p.device_mesh),
    "partition_points by a curve": lambda p: partition_points(
        p, p.device_mesh, "hilbert"
    ),
    "partition_points of partition_nodes": lambda p: partition_nodes(
        p.device_mesh, points=p
    ),
}


def cut(x, mesh):
    return shard(x, mesh, placements_of(mesh, 0))


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("number", every(3, [torch.nan, torch.inf, -torch.inf]))
def test_coordinates_that_are_not_finite(mesh, number):
    """In one row alone, which one rank has."""
    good, bad = torch.rand(POINTS, 3), torch.rand(POINTS, 3)
    bad[-1, 1] = number
    for transport in ("ring", "boxes"):
        with shardtensor.point_transport(transport):
            for name, search in SEARCHES.items():
                told = f"{name.split()[0]}: expected finite coordinates"
                for points, queries in ((good, bad), (bad, good)):
                    with pytest.raises(ValueError, match=told):
                        search(cut(points, mesh), cut(queries, mesh))
                    with pytest.raises(ValueError, match=told):
                        search(points, queries)
                search(cut(good, mesh), cut(good, mesh))
    for name, call in OF_ONE_CLOUD.items():
        told = f"{name.split()[0]}: expected finite coordinates"
        with pytest.raises(ValueError, match=told):
            call(cut(bad, mesh))
        call(cut(good, mesh))


@ranks(1, 2, 3, "2x2")
def test_more_neighbours_than_points(mesh):
    """More than a piece has are found."""
    points = cut(torch.rand(POINTS, 3), mesh)
    told = f"expected 1 <= {{}} <= {POINTS}, the number of points"
    for k in (0, -1, POINTS + 1):
        for call, name in (
            (lambda k: knn(points, points, k), "k"),
            (lambda k: interpolate_neighbors(points, points, points, k), "k"),
            (lambda k: farthest_point_sampling(points, k), "count"),
        ):
            with pytest.raises(ValueError, match=told.format(name)):
                call(k)
    assert knn(points, points, POINTS)[0].shape == (POINTS, POINTS)


@ranks(1, 2, 3, "2x2")
def test_faces_of_no_vertices(mesh):
    points = torch.rand(POINTS, 3)
    for wrong in (POINTS, -1):
        faces = torch.tensor([[0, 2, 1], [0, 1, 3], [0, 1, wrong]])
        for given in (faces, faces.int().flatten()):
            told = f"mesh_indices has {wrong}, expected a row of {POINTS} vertices"
            with pytest.raises(IndexError, match=told):
                signed_distance_field(cut(points, mesh), cut(given, mesh), points)


@ranks(1, 2, 3, "2x2")
def test_points_of_different_dims_and_dtypes(mesh):
    points = torch.rand(POINTS, 3)
    for name, search in SEARCHES.items():
        if name != "signed_distance_field":
            with pytest.raises(ValueError, match=r"expected points \(\[B,\] N, D\)"):
                search(cut(points, mesh), cut(points[:, :2], mesh))
        with pytest.raises(TypeError, match="of one dtype"):
            search(cut(points, mesh), cut(points.double(), mesh))
        with pytest.raises(TypeError, match="of one dtype, float32 or float64"):
            search(cut(points.half(), mesh), cut(points.half(), mesh))


@ranks(2, "2x2")
def test_check_mode_compares_the_numbers_of_a_search(mesh):
    points = cut(torch.rand(POINTS, 3), mesh)
    other = 1 + (mesh.get_rank() == 1)
    with shardtensor.check_mode():
        for name, call in (
            ("knn with k", lambda: knn(points, points, other)),
            ("ball_query with radius", lambda: ball_query(points, points, other, 2)),
            ("ball_query with k", lambda: ball_query(points, points, 1.0, other)),
            ("radius_search with radius", lambda: radius_search(points, points, other)),
            ("sampling with count", lambda: farthest_point_sampling(points, other)),
        ):
            with pytest.raises(ValueError, match=rf"the same call(.|\n)*{name} 2"):
                call()
        assert knn(points, points, 2)[0].shape == (POINTS, 2)
