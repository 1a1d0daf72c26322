"""signed_distance_field: the nearest point of a surface, inside or outside."""

import itertools

import pytest
import torch
from layouts import placements_of, sweep
from ranks import assert_close, check_op, ranks, shard, sharded
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.nn.functional import signed_distance_field


def cube():
    """The unit cube's corners, and two triangles for each side, seen from outside."""
    corners = torch.tensor(
        list(itertools.product((0.0, 1.0), repeat=3)), dtype=torch.float64
    )
    sides = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4)]
    sides.append((1, 5, 7, 3))
    faces = [t for a, b, c, d in sides for t in ((a, b, c), (a, c, d))]
    return corners, torch.tensor(faces)


def away_from_cube(points):
    """Exactly."""
    outside = (points - points.clamp(0, 1)).norm(dim=-1)
    inside = torch.minimum(points, 1 - points).amin(dim=-1)
    return torch.where(outside > 0, outside, -inside)


@pytest.mark.parametrize("winding", [False, True])
def test_a_cube(winding):
    vertices, faces = cube()
    points = torch.rand(5, 40, 3, dtype=torch.float64) * 3 - 1
    distances, nearest, face = signed_distance_field(
        vertices, faces, points, use_sign_winding_number=winding
    )
    torch.testing.assert_close(distances, away_from_cube(points))
    torch.testing.assert_close((points - nearest).norm(dim=-1), distances.abs())
    normals = torch.linalg.cross(
        vertices[faces[:, 1]] - vertices[faces[:, 0]],
        vertices[faces[:, 2]] - vertices[faces[:, 0]],
    )
    above = nearest - vertices[faces[face, 0]]
    assert (above * normals[face]).sum(-1).abs().max() < 1e-12
    flat = signed_distance_field(
        vertices.float(), faces.int().flatten(), points.float()
    )
    torch.testing.assert_close(flat[0], away_from_cube(points).float())


def test_a_soup_of_many_triangles():
    """Against all triangles one by one, and by the winding number of a sphere."""
    angles = torch.linspace(0, torch.pi, 25, dtype=torch.float64)
    around = torch.linspace(0, 2 * torch.pi, 41, dtype=torch.float64)
    a, b = torch.meshgrid(angles, around, indexing="ij")
    sphere = torch.stack([a.sin() * b.cos(), a.sin() * b.sin(), a.cos()], dim=-1)
    i, j = (
        x.flatten()
        for x in torch.meshgrid(torch.arange(24), torch.arange(40), indexing="ij")
    )
    at = i * 41 + j
    faces = torch.cat(
        [torch.stack([at, at + 41, at + 42], 1), torch.stack([at, at + 42, at + 1], 1)]
    )
    points = torch.randn(60, 3, dtype=torch.float64)
    distances, nearest, face = signed_distance_field(
        sphere.reshape(-1, 3), faces, points, use_sign_winding_number=True
    )
    # Between the inner ball of the faces and the outer one of the corners.
    radius = points.norm(dim=-1)
    assert ((distances < 0) == (radius < 0.99))[(radius - 1).abs() > 0.02].all()
    assert (distances - (radius - 1)).abs().max() < 0.02
    each = [
        signed_distance_field(sphere.reshape(-1, 3), f[None], points)[0].abs()
        for f in faces
    ]
    torch.testing.assert_close(distances.abs(), torch.stack(each).amin(dim=0))


def test_nothing_beyond_max_dist():
    vertices, faces = cube()
    points = torch.tensor([[0.5, 0.5, 1.25], [0.5, 0.5, 1.75]], dtype=torch.float64)
    distances, nearest, face = signed_distance_field(vertices, faces, points, 0.5)
    assert distances[0] == 0.25 and distances[1].isnan()
    assert nearest[1].isnan().all() and face.tolist()[1] == -1
    empty = signed_distance_field(vertices, faces[:0], points)
    assert empty[0].isnan().all() and (empty[2] == -1).all()


def test_derivatives():
    vertices, faces = cube()
    vertices = vertices + torch.rand_like(vertices) * 0.1
    # Over a face, an edge and a corner, inside and outside.
    points = torch.tensor(
        [[0.4, 0.5, 1.4], [0.4, 1.5, 1.6], [1.5, 1.6, 1.7], [0.5, 0.4, 0.8]],
        dtype=torch.float64,
    )
    inputs = vertices.requires_grad_(), points.requires_grad_()

    def call(v, p):
        return signed_distance_field(v, faces, p)[:2]

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@ranks(1, 2, 3, "2x2")
def test_in_pieces(mesh):
    vertices, faces = cube()
    vertices.requires_grad_()
    points = (torch.rand(7, 3, dtype=torch.float64) * 3 - 1).requires_grad_()
    corners = sharded(vertices, placements_of(mesh, 0))
    triangles = sharded(faces, placements_of(mesh, 0))

    def call(v, f, p):
        return signed_distance_field(v, f, p)[:2]

    expected = signed_distance_field(vertices.detach(), faces, points.detach())[2]
    with shardtensor.fallback_mode("error"):
        for placements, sizes in sweep(mesh, points.shape):
            given = sharded(points, placements, sizes)
            check_op(call, corners, triangles, given, mesh=mesh, second_order=True)
            cut = shard(points.detach(), mesh, placements, sizes)
            face = signed_distance_field(vertices.detach(), faces, cut)[2]
            assert_close(face, expected)
            if placements[0] == Shard(0) and mesh.ndim == 1:
                assert face.placements == (Shard(0),)


@ranks(2)
def test_errors_are_the_same_on_all_ranks(mesh):
    vertices, faces = cube()
    points = torch.rand(6, 3, dtype=torch.float64)
    cut = shard(points, mesh, [Shard(0)])
    with pytest.raises(IndexError, match="mesh_indices has 8, expected a row of 8"):
        signed_distance_field(vertices, faces + 1, cut)
    with pytest.raises(ValueError, match=r"expected mesh_indices \(F, 3\)"):
        signed_distance_field(vertices, faces[:, :2], cut)
    with pytest.raises(ValueError, match=r"expected input_points \(..., 3\)"):
        signed_distance_field(vertices, faces, cut[:, :2])
    with pytest.raises(ValueError, match="max_dist is -1"):
        signed_distance_field(vertices, faces, cut, -1.0)
    with pytest.raises(TypeError, match="of one dtype"):
        signed_distance_field(vertices.float(), faces, cut)
    for vertex, face in ((vertices.to("meta"), faces), (vertices, faces.to("meta"))):
        with pytest.raises(ValueError, match="indices and points on one device, got"):
            signed_distance_field(vertex, face, cut)
    points[-1, 0] = torch.nan
    with pytest.raises(ValueError, match="finite coordinates"):
        signed_distance_field(vertices, faces, shard(points, mesh, [Shard(0)]))


@pytest.mark.parametrize("height", [1e-3, 1e-4, 1e-6])
def test_slivers(height):
    for _ in range(50):
        turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0].float()
        corners = torch.tensor([[0, 0, 0], [1, 0, 0], [0.5, height, 0]]) @ turn
        point = corners.mean(0) + 0.1 * turn[2]
        distance, nearest, _ = signed_distance_field(
            corners, torch.tensor([[0, 1, 2]]), point
        )
        assert abs(abs(distance.item()) - 0.1) < 1e-5
        assert (nearest - corners.mean(0)).norm() < 1e-3


def test_slivers_whose_area_is_no_difference():
    """Of the products of its edges, even in double."""
    corners = torch.tensor([[0, 0, 0], [1, 0, 0], [0.5, 1e-9, 0]], dtype=torch.float64)
    point = torch.tensor([0.5, 5e-10, 1], dtype=torch.float64, requires_grad=True)
    distance, nearest, _ = signed_distance_field(
        corners, torch.tensor([[0, 1, 2]]), point
    )
    assert distance.item() == 1 and nearest.tolist() == [0.5, 5e-10, 0]
    (way,) = torch.autograd.grad(distance, point)
    assert way.tolist() == [0, 0, 1]
