"""interpolate_neighbors: values at queries, however points and queries are cut."""

import math

import pytest
import torch
from layouts import placements_of, sweep
from ranks import assert_close, check_op, ranks, shard, sharded
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.nn.functional import interpolate_neighbors


def by_sorting(points, values, queries, k, power):
    away = torch.cdist(queries, points, compute_mode="donot_use_mm_for_euclid_dist")
    away, rows = away.sort(dim=-1, stable=True)
    weights = away[..., :k] ** -power
    weights = weights / weights.sum(-1, keepdim=True)
    return (values[rows[..., :k]] * weights[..., None]).sum(-2)


def clouds(points=11, queries=6, channels=2):
    shapes = (points, 3), (points, channels), (queries, 3)
    return [torch.rand(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("k, power", [(1, 2.0), (3, 2.0), (5, 1.0)])
def test_plain_tensors(k, power):
    points, values, queries = clouds()
    found = interpolate_neighbors(points, values, queries, k, power)
    expected = by_sorting(points, values, queries, k, power)
    torch.testing.assert_close(found, expected)
    inputs = points, values, queries
    grad = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, inputs, grad, allow_unused=True),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b)


def test_a_point_has_its_own_value():
    points, values, _ = clouds()
    found = interpolate_neighbors(points, values, points)
    torch.testing.assert_close(found, values)
    (grad,) = torch.autograd.grad(found.square().sum(), points, create_graph=True)
    assert torch.isfinite(grad).all()


@ranks(1, 2, 3, "2x2")
def test_in_pieces(mesh):
    points, values, queries = clouds()
    fixed = [
        sharded(x, placements_of(mesh, 0), None) for x in (points, values, queries)
    ]
    with shardtensor.fallback_mode("error"):
        for place, x in enumerate((points, values, queries)):
            for layout in sweep(mesh, x.shape):
                inputs = list(fixed)
                inputs[place] = sharded(x, *layout)
                check_op(interpolate_neighbors, *inputs, mesh=mesh, second_order=True)


@ranks("2x2")
def test_a_batch(mesh):
    inputs = [
        torch.rand(2, n, c, dtype=torch.float64, requires_grad=True)
        for n, c in ((7, 2), (7, 3), (5, 2))
    ]
    for dims in ((0, 1), (1, 0), (1, 1), (0, 0)):
        parts = [sharded(x, placements_of(mesh, *dims)) for x in inputs]
        check_op(interpolate_neighbors, *parts, mesh=mesh)


@ranks(2)
def test_errors_are_the_same_on_all_ranks(mesh):
    points, values, queries = clouds()
    part = shard(points, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="expected values"):
        interpolate_neighbors(part, values[:5], queries)
    with pytest.raises(ValueError, match="k is 12, expected 1 <= k <= 11"):
        interpolate_neighbors(part, values, queries, 12)
    with pytest.raises(ValueError, match="power is 0, expected a finite number > 0"):
        interpolate_neighbors(part, values, queries, 3, 0.0)
    with pytest.raises(TypeError, match="values of the points' dtype"):
        interpolate_neighbors(part, values.float(), queries)


@ranks(1, 2)
def test_a_query_at_a_point_has_its_value_whatever_others_have(mesh):
    points = torch.tensor([[0.0, 0], [1, 0], [0, 1]])
    values = torch.tensor([[1.0], [math.nan], [math.inf]], requires_grad=True)
    cut = shard(points, mesh, [Shard(0)])
    for at, given in ((points, values), (cut, shard(values, mesh, [Shard(0)]))):
        found = interpolate_neighbors(at, given, at, 3)
        assert_close(found, values)
        (slope,) = torch.autograd.grad(found[0].sum(), given)
        assert_close(slope, torch.tensor([[1.0], [0], [0]]))
