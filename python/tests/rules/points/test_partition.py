"""partition_points: balanced pieces of points that are near each other."""

import pytest
import rig
import torch
from layouts import sweep
from oracle import every
from ranks import ranks, shard
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.nn.functional import knn, partition_points


def counts(x):
    return torch.tensor(x._spec.partition(0).sizes)


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("method", ["rcb", "hilbert"])
def test_the_same_order_from_any_layout(mesh, method):
    points = torch.randn(23, 3).double()
    points[5:9] = points[4]  # equal ones go to different ranks, if they must
    expected = None
    for placements, sizes in every(2, sweep(mesh, points.shape, dims=[0])):
        part = shard(points, mesh, placements, sizes)
        ordered, permutation = partition_points(part, mesh, method)
        rows = permutation.full_tensor()
        assert torch.equal(rows.sort().values, torch.arange(23))
        assert torch.equal(ordered.full_tensor(), points[rows])
        assert counts(ordered).max() - counts(ordered).min() <= 1
        assert ordered._spec.partition(0) == permutation._spec.partition(0)
        expected = rows if expected is None else expected
        assert torch.equal(rows, expected)
    plain = partition_points(points, mesh, method)[1]
    assert torch.equal(plain.full_tensor(), expected)


@ranks(2, 3)
def test_bisection_goes_across_the_widest_dim(mesh):
    points = torch.rand(600, 3) * torch.tensor([1.0, 10.0, 1.0])
    ordered, _ = partition_points(shard(points, mesh, [Shard(0)]), mesh)
    cuts = counts(ordered).cumsum(0)[:-1].tolist()
    pieces = ordered.full_tensor()[:, 1].tensor_split(cuts)
    for low, high in zip(pieces, pieces[1:], strict=False):
        assert low.max() <= high.min()


@ranks(2, "2x2")
@pytest.mark.parametrize("method", ["rcb", "hilbert"])
def test_weights_are_balanced(mesh, method):
    points, weights = torch.rand(200, 2), torch.rand(200)
    for given in (weights, shard(weights, mesh, [Shard(0)] * mesh.ndim)):
        part = shard(points, mesh, [Shard(0)] * mesh.ndim)
        ordered, permutation = partition_points(part, mesh, method, given)
        cuts = counts(ordered).cumsum(0)[:-1].tolist()
        sums = [w.sum() for w in weights[permutation.full_tensor()].tensor_split(cuts)]
        assert max(sums) - min(sums) <= 3 * weights.max()


@ranks(1, 3)
def test_given_owners(mesh):
    points = torch.rand(10, 2)
    owners = torch.arange(10) % mesh.size()
    part = shard(points, mesh, [Shard(0)])
    ordered, permutation = partition_points(part, mesh, "given", owners=owners)
    rows = owners.argsort(stable=True)
    assert torch.equal(permutation.full_tensor(), rows)
    assert torch.equal(ordered.full_tensor(), points[rows])
    assert torch.equal(counts(ordered), owners.bincount())


@ranks(2)
def test_gradients_go_back(mesh):
    points = torch.rand(9, 2, dtype=torch.float64, requires_grad=True)
    part = shard(points, mesh, [Shard(0)], {0: [7, 2]})
    ordered, permutation = partition_points(part, mesh)
    weights = torch.rand(9, 2, dtype=torch.float64)
    (grad,) = torch.autograd.grad((ordered**3 * weights).sum(), part, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), part)
    own = torch.empty_like(weights)
    own[permutation.full_tensor()] = weights
    torch.testing.assert_close(grad.full_tensor(), 3 * points**2 * own)
    torch.testing.assert_close(second.full_tensor(), 6 * points * own)


@ranks(2)
def test_neighbours_of_partitioned_points_are_near(mesh):
    if rig.DEVICE != "cpu":
        pytest.skip("on a device points travel, not queries")
    points = torch.rand(40000, 2)
    part = shard(points, mesh, [Shard(0)])
    ordered, _ = partition_points(part, mesh)

    def moved(x):
        shardtensor.reset_comm_stats()
        knn(x, x, 8)
        return shardtensor.comm_stats().bytes

    assert moved(ordered) < moved(part) / 4


@ranks(2)
def test_errors_are_the_same_on_all_ranks(mesh):
    part = shard(torch.rand(6, 2), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="expected method 'rcb', 'hilbert'"):
        partition_points(part, mesh, "metis")
    with pytest.raises(ValueError, match="expected owners with method 'given'"):
        partition_points(part, mesh, "given")
    with pytest.raises(ValueError, match="expected 6 weights"):
        partition_points(part, mesh, weights=torch.ones(5))
    with pytest.raises(ValueError, match=r"expected owners in \[0, 2\)"):
        partition_points(part, mesh, "given", owners=torch.arange(6))
    with pytest.raises(ValueError, match="expected finite weights >= 0"):
        partition_points(part, mesh, weights=torch.arange(6.0) - 1)
    for method in ("rcb", "hilbert"):
        with pytest.raises(ValueError, match="expected a weight > 0, got 6 of 0"):
            partition_points(part, mesh, method, weights=torch.zeros(6))
    partition_points(part[:0], mesh, weights=torch.zeros(0))
    bad = shard(torch.full((6, 2), float("inf")), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="expected finite coordinates"):
        partition_points(bad, mesh)
