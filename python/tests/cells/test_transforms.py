"""Meshes, clouds of points and graphs under torch.func: the numbers of autograd."""

import pytest
import torch
from layouts import placements_of
from ranks import assert_close, ranks, shard, uneven
from torch.utils._pytree import tree_leaves

import shardtensor
from shardtensor import mesh as cm
from shardtensor.nn import functional as sf


def block():
    """A bent plate: points in the plane, and its cells as quads and triangles."""
    rows = torch.arange(12).view(4, 3)
    axes = [torch.linspace(0, 1, n, dtype=torch.float64) for n in (4, 3)]
    points = torch.cartesian_prod(*axes)
    points = points + 0.1 * (points * torch.tensor([5.0, 3.0])).sin().flip(1)
    corners = rows[:-1, :-1], rows[1:, :-1], rows[1:, 1:], rows[:-1, 1:]
    quads = torch.stack(corners, -1).reshape(-1, 4)
    return points, quads, torch.cat([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]])


def waves(*sizes):
    return torch.arange(1.0, 1 + torch.Size(sizes).numel()).double().sin().view(sizes)


def calls(cut):
    """Functions and what is differentiated; `cut` makes tensors ShardTensors."""
    points, quads, triangles = block()
    heights = torch.cat([points, points.prod(1, keepdim=True)], 1)
    quads, triangles = cut(quads), cut(triangles)
    faces = cm.cell_faces({"triangle": triangles}, 12)
    of_points, of_cells = cut(waves(12, 2)), cut(waves(12, 2))
    queries, plane = cut(waves(7, 2).square()), cut(points)
    space, above = cut(heights), cut(waves(5, 3).square())
    corners = {"least_squares": triangles, "green_gauss": quads}
    kinds = {"least_squares": "triangle", "green_gauss": "quad"}

    def gradients(how):
        return lambda p, v: cm.cell_gradients(p, corners[how], kinds[how], v, how)

    def centered(how):
        return lambda p, v: cm.cell_centered_gradients(
            p, {"triangle": triangles}, faces, v, how
        )

    def checked(p):
        cm.check_cells(p, quads, "quad")
        return cm.cell_centers(p, triangles, "triangle")

    def near(p, q):
        rows, counts = sf.ball_query(p, q, 0.5, 4)
        return p[rows] * counts.unsqueeze(-1).unsqueeze(-1)

    return {
        "cell_measures": (lambda p: cm.cell_measures(p, quads, "quad"), plane),
        "check_cells": (checked, plane),
        "cell_normals": (lambda p: cm.cell_normals(p, quads, "quad"), space),
        "cell_gradients": (gradients("green_gauss"), plane, of_points),
        "cell_gradients, fitted": (gradients("least_squares"), plane, of_points),
        "centered, fitted": (centered("least_squares"), plane, of_cells),
        "centered": (centered("green_gauss"), plane, of_cells),
        "apply_mass": (
            lambda p, v: cm.apply_mass(p, triangles, "triangle", v), plane, of_points,
        ),
        "apply_stiffness": (
            lambda p, v: cm.apply_stiffness(p, quads, "quad", v), plane, of_points,
        ),
        "topology": (
            lambda p: p[cm.cell_edges({"quad": quads}, 12)[0]], plane,
        ),
        "merge_corners": (
            lambda p: p * cm.merge_corners(p.unsqueeze(1))[1], plane,
        ),
        "knn": (lambda p, q: sf.knn(p, q, 3)[1], plane, queries),
        "radius_search": (
            lambda p, q: sf.radius_search(p, q, 0.5, 4, True, True)[1:], plane, queries,
        ),
        "all pairs": (
            lambda p, q: sf.radius_search(p, q, 0.5, None, True, True, return_counts=1),
            plane,
            queries,
        ),
        "interpolate_neighbors": (sf.interpolate_neighbors, plane, of_points, queries),
        "ball_query": (near, plane, queries),
        "farthest_point_sampling": (
            lambda p: p[sf.farthest_point_sampling(p, 5)], plane,
        ),
        "grid_subsample": (
            lambda p, v: sf.grid_subsample(p, 0.4, v)[:2], plane, of_points,
        ),
        "voxelize": (
            lambda p, v: sf.voxelize(p, v, (0, 0), (1, 1), (4, 3)), plane, of_points,
        ),
        "devoxelize": (
            lambda x, p: sf.devoxelize(x, p, (0, 0), (1, 1)),
            cut(waves(2, 4, 3)),
            plane,
        ),
        "signed_distance_field": (
            lambda p, q: sf.signed_distance_field(p, triangles, q)[:2], space, above,
        ),
    }  # fmt: skip


def total(function):
    return lambda *given: sum(
        x.sin().sum() for x in tree_leaves(function(*given)) if x.is_floating_point()
    )


def slopes(function, given):
    return torch.func.grad(total(function), tuple(range(len(given))))(*given)


def twice(function, given):
    return slopes(lambda *given: slopes(function, given), given)


def pulled(function, given):
    out, pull = torch.func.vjp(total(function), *given)
    return pull(out.cos())


def pushed(function, given):
    return torch.func.jvp(total(function), given, tuple(x.cos() for x in given))


def forward_over_reverse(function, given):
    along = tuple(x.cos() for x in given)
    return torch.func.jvp(lambda *given: slopes(function, given), given, along)


def rows_of_jacobian(function, given):
    numbers = tuple(range(len(given)))
    return torch.func.jacrev(
        lambda *given: torch.stack([total(function)(*given)] * 2), numbers
    )(*given)


WAYS = {
    f.__name__: f
    for f in (slopes, twice, pulled, pushed, forward_over_reverse, rows_of_jacobian)
}


@pytest.mark.parametrize("name", calls(lambda x: x))
def test_of_one_device(name):
    function, *given = calls(lambda x: x)[name]
    leaves = [x.clone().requires_grad_() for x in given]
    first = torch.autograd.grad(
        total(function)(*leaves), leaves, create_graph=True, materialize_grads=True
    )
    for found, expected in zip(slopes(function, given), first, strict=True):
        torch.testing.assert_close(found, expected)
    again = torch.autograd.grad(
        sum(x.sin().sum() for x in first), leaves, materialize_grads=True
    )
    for found, expected in zip(twice(function, given), again, strict=True):
        torch.testing.assert_close(found, expected)
    along = sum((x * y.cos()).sum() for x, y in zip(first, given, strict=True))
    torch.testing.assert_close(pushed(function, tuple(given))[1], along.detach())


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("way", WAYS)
def test_of_pieces(mesh, way):
    def cut(x, sizes=None):
        sizes = {0: sizes or uneven(x.shape[0], mesh.size())}
        return shard(x, mesh, placements_of(mesh, 0), sizes)

    def on_the_first(x):
        return cut(x, [x.shape[0]] + [0] * (mesh.size() - 1))

    whole = calls(lambda x: x)
    expected = {
        name: tree_leaves(WAYS[way](function, tuple(given)))
        for name, (function, *given) in whole.items()
    }
    for pieces in (cut, on_the_first):
        for name, (function, *given) in calls(pieces).items():
            found = tree_leaves(WAYS[way](function, tuple(given)))
            for part, of_all in zip(found, expected[name], strict=True):
                assert_close(part, of_all)


@ranks(2, 3)
def test_of_graphs(mesh):
    """The halo of features."""
    order = torch.arange(12).flip(0)
    edges = torch.stack([torch.arange(12), (torch.arange(12) * 5 + 1) % 12])
    sizes = {0: uneven(12, mesh.size())}
    nodes = shard(order, mesh, placements_of(mesh, 0), sizes)
    graph = shardtensor.ShardGraph(edges, nodes)
    x = waves(12, 2)
    cut = shard(x, mesh, placements_of(mesh, 0), sizes)

    def messages(x, meanwhile=None):
        rows = graph.halo(x, meanwhile)
        rows = rows if meanwhile is None else rows[0]
        source, target = graph.local_edge_index
        own = rows.new_zeros(graph.nodes.to_local().shape[0], 2)
        own = own.index_add(0, target, rows[source].sin())
        return graph.node_tensor(own).square().sum()

    def on_one_device(x):
        place = torch.empty_like(order)
        place[order] = torch.arange(12)
        source, target = place[edges]
        sums = torch.zeros_like(x).index_add(0, target, x[source].sin())
        return sums.square().sum()

    for meanwhile in None, torch.sum:
        function = lambda x, meanwhile=meanwhile: messages(x, meanwhile)  # noqa: E731
        for way in slopes, twice, forward_over_reverse:
            expected = tree_leaves(way(on_one_device, (x,)))
            for a, e in zip(tree_leaves(way(function, (cut,))), expected, strict=True):
                assert_close(a, e)


@ranks(2, 3)
def test_samples_of_slopes(mesh):
    """vmap over grad, whose searches have rows of their own for each sample."""
    points, queries = waves(9, 2), torch.stack([waves(4, 2), waves(4, 2).cos()])
    of_one = torch.func.vmap(
        lambda p, q: slopes(lambda q: sf.knn(p, q, 2)[1], (q,))[0], (None, 0)
    )
    sizes = {0: uneven(9, mesh.size())}
    cut = shard(points, mesh, placements_of(mesh, 0), sizes)
    assert_close(of_one(cut, queries), of_one(points, queries))
    with pytest.raises(NotImplementedError, match="vmap gives each sample values of"):
        torch.func.vmap(
            lambda p, q: slopes(
                lambda q: sf.radius_search(p, q, 1, None, True)[1], (q,)
            ),
            (None, 0),
        )(cut, queries)


@ranks(2, 3)
def test_constants_of_a_level(mesh):
    """ShardTensors from outside stay what they are where a transform is entered."""
    x = waves(6, 4)
    cut = shard(x, mesh, placements_of(mesh, 0), {0: uneven(6, mesh.size())})

    def function(scale):
        moved = cut.redistribute(mesh, placements_of(mesh, 1))
        again = shardtensor.ShardTensor.from_local(
            moved.to_local(), mesh, moved.placements, moved._spec.sharding_shapes()
        )
        points, _ = sf.partition_points(cut, mesh, "hilbert")
        return (again * scale).sin().sum() + points.sum() * scale

    scale = torch.tensor(1.5).double()
    for way in slopes, twice:
        expected = way(
            lambda scale: (x * scale).sin().sum() + x.sum() * scale, (scale,)
        )
        assert_close(way(function, (scale,))[0], expected[0])


@ranks(2)
def test_batched_gradients_are_refused(mesh):
    x = shard(waves(6, 4), mesh, placements_of(mesh, 0)).requires_grad_()
    with pytest.raises(RuntimeError, match="rule not implemented for aten::detach"):
        torch.autograd.grad(x.sum(0), x, torch.eye(4).double(), is_grads_batched=True)
