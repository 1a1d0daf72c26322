"""torch.compile(fullgraph=True) over searches in clouds: one device's results."""

import pytest
import torch
from layouts import placements_of
from ranks import assert_close, ranks, shard

from shardtensor.nn.functional import interpolate_neighbors, knn, radius_search

PRELOAD = ("torch._inductor.compile_fx",)


def clouds():
    return torch.rand(13, 3), torch.rand(7, 3)


def search(points, queries):
    indices, distances = knn(points, queries, 3)
    near, away = radius_search(points, queries, 0.6, max_points=4, return_dists=True)
    return indices, distances.sin(), near, away * 2


def smooth(points, queries):
    return interpolate_neighbors(points, points * 2, queries).sin()


def compiled(fn):
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


def test_plain_tensors():
    points, queries = clouds()
    for found, expected in zip(
        compiled(search)(points, queries), search(points, queries), strict=True
    ):
        torch.testing.assert_close(found, expected)


@ranks(1, 2, "2x2")
def test_in_pieces(mesh):
    points, queries = clouds()
    cut = [shard(x, mesh, placements_of(mesh, 0)) for x in (points, queries)]
    for found, expected in zip(
        compiled(search)(*cut), search(points, queries), strict=True
    ):
        assert_close(found, expected)


@ranks(2)
def test_gradients_in_pieces(mesh):
    points, queries = clouds()
    whole = [x.clone().requires_grad_() for x in (points, queries)]
    cut = [
        shard(x, mesh, placements_of(mesh, 0)).requires_grad_()
        for x in (points, queries)
    ]
    expected = smooth(*whole)
    found = compiled(smooth)(*cut)
    assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    for part, all_of_it in zip(cut, whole, strict=True):
        assert_close(part.grad, all_of_it.grad)


def test_all_pairs_have_no_size_that_a_compiler_knows():
    points, queries = clouds()
    with pytest.raises(Exception, match="expected max_points"):
        compiled(lambda p, q: radius_search(p, q, 0.5))(points, queries)
