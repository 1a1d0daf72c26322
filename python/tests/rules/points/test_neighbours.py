"""knn and radius_search: the same neighbours however points and queries are cut."""

import itertools

import pytest
import torch
from layouts import placements_of, sweep
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.autograd import forward_ad
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor.nn.functional import knn, radius_search

TRANSPORTS = ("ring", "boxes")


def cloud(*shape, whole=False, grad=True):
    """With `whole` coordinates there are ties and duplicates."""
    x = torch.randint(0, 4, shape).double() if whole else torch.rand(*shape).double()
    return x.requires_grad_(grad)


def by_sorting(points, queries):
    """All distances of each query, ascending, ties by row."""
    squares = sum(
        (points[..., None, :, d] - queries[..., :, None, d]) ** 2
        for d in range(points.shape[-1])
    )
    return squares.sqrt().sort(dim=-1, stable=True)


def pairs(mesh, points, queries):
    """Layouts of points and queries, each swept while the other has two."""
    fixed = placements_of(mesh, points.dim() - 2), None
    whole = [Replicate()] * mesh.ndim, None
    for layout in sweep(mesh, points.shape):
        yield layout, fixed
        yield layout, whole
    for layout in sweep(mesh, queries.shape):
        yield fixed, layout
        yield whole, layout


# ---- one device -------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dims", [1, 2, 3, 5])
def test_knn_of_plain_tensors(batch, dims):
    for whole, k in itertools.product([False, True], [1, 3, 40]):
        points = cloud(*batch, 40, dims, whole=whole, grad=False)
        queries = cloud(*batch, 17, dims, whole=whole, grad=False)
        distances, indices = by_sorting(points, queries)
        found = knn(points, queries, k)
        assert torch.equal(found[0], indices[..., :k])
        torch.testing.assert_close(found[1], distances[..., :k])


def test_radius_search_of_plain_tensors():
    points, queries = cloud(50, 3, grad=False), cloud(20, 3, grad=False)
    distances, order = by_sorting(points, queries)
    inside = distances <= 0.3
    query, slot = inside.nonzero(as_tuple=True)
    indices, near, away = radius_search(points, queries, 0.3, None, True, True)
    assert torch.equal(indices, torch.stack([query, order[query, slot]]))
    assert torch.equal(near, points[indices[1]])
    torch.testing.assert_close(away, distances[query, slot])
    indices, away = radius_search(points, queries, 0.3, 4, return_dists=True)
    used = inside[:, :4]
    assert torch.equal(indices, order[:, :4].where(used, 0))
    torch.testing.assert_close(away, distances[:, :4].where(used, 0.0))
    indices, near = radius_search(points, queries, 0.3, 4, return_points=True)
    assert torch.equal(near, points[indices] * used[..., None])


def test_numbers_of_neighbours():
    points, queries = cloud(2, 50, 3, grad=False), cloud(2, 20, 3, grad=False)
    inside = (by_sorting(points, queries)[0] <= 0.3).sum(-1)
    for most, expected in ((None, inside), (4, inside.clamp(max=4))):
        found = radius_search(points, queries, 0.3, most, return_counts=True)
        assert len(found) == 2 and torch.equal(found[1], expected)
        found = radius_search(
            points[0], queries[0], 0.3, most, True, True,
            index_dtype=torch.int32, return_counts=True,
        )  # fmt: skip
        assert len(found) == 4 and torch.equal(found[3], expected[0].int())


def test_pairs_of_a_batch_name_their_entry():
    points, queries = cloud(2, 9, 2, grad=False), cloud(2, 5, 2, grad=False)
    batch, query, point = radius_search(points, queries, 0.5)
    for entry in range(2):
        alone = radius_search(points[entry], queries[entry], 0.5)
        assert torch.equal(torch.stack([query, point])[:, batch == entry], alone)


def test_gradients():
    points, queries = cloud(12, 2), cloud(7, 2)
    own = knn(points, points, 3)[1]  # each point is its own nearest one
    assert torch.isfinite(torch.autograd.grad(own.sum(), points)[0]).all()
    torch.autograd.gradcheck(lambda p, q: knn(p, q, 3)[1], (points, queries))
    torch.autograd.gradgradcheck(lambda p, q: knn(p, q, 3)[1], (points, queries))

    def near(p, q):
        return radius_search(p, q, 0.4, 3, return_dists=True, return_points=True)[1:]

    torch.autograd.gradcheck(near, (points, queries))
    torch.autograd.gradgradcheck(near, (points, queries))


def test_second_derivatives_of_a_point_itself_are_finite():
    points = cloud(6, 2)
    distances = knn(points, points, 2)[1]
    (grad,) = torch.autograd.grad(distances.square().sum(), points, create_graph=True)
    assert torch.isfinite(torch.autograd.grad(grad.square().sum(), points)[0]).all()


# ---- in pieces --------------------------------------------------------------


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_knn(mesh, transport):
    points, queries = cloud(11, 3, whole=True), cloud(6, 3, whole=True)
    with shardtensor.point_transport(transport), shardtensor.fallback_mode("error"):
        for at, of in pairs(mesh, points, queries):
            check_op(
                lambda p, q: knn(p, q, 7),
                sharded(points, *at),
                sharded(queries, *of),
                mesh=mesh,
                second_order=True,
            )


@ranks("2x2")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_knn_of_a_batch(mesh, transport):
    points, queries = cloud(3, 5, 2), cloud(3, 4, 2)
    with shardtensor.point_transport(transport), shardtensor.fallback_mode("error"):
        for at, of in pairs(mesh, points, queries):
            check_op(
                lambda p, q: knn(p, q, 4),
                sharded(points, *at),
                sharded(queries, *of),
                mesh=mesh,
            )


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("max_points", [3, None])
def test_radius_search(mesh, max_points):
    points, queries = cloud(11, 2), cloud(6, 2)

    def search(p, q):
        return radius_search(p, q, 0.4, max_points, True, True, return_counts=True)

    for transport in TRANSPORTS:
        with shardtensor.point_transport(transport):
            for at, of in pairs(mesh, points, queries):
                parts = sharded(points, *at), sharded(queries, *of)
                check_op(search, *parts, mesh=mesh, second_order=True)


@ranks("2x2")
def test_radius_search_of_a_batch(mesh):
    points, queries = cloud(3, 5, 2), cloud(3, 4, 2)

    def search(p, q):
        return radius_search(p, q, 0.4, None, True, True, return_counts=True)

    for at, of in pairs(mesh, points, queries):
        check_op(search, sharded(points, *at), sharded(queries, *of), mesh=mesh)


@ranks(3, "2x2")
def test_results_lie_as_the_queries_do(mesh):
    points, queries = cloud(11, 3, grad=False), cloud(6, 3, grad=False)
    for sizes in partitions(6, mesh.size()):
        near = shard(queries, mesh, placements_of(mesh, 0), {0: sizes})
        for transport in ("auto", *TRANSPORTS):
            with shardtensor.point_transport(transport):
                for placements in ([Shard(0)] * mesh.ndim, [Replicate()] * mesh.ndim):
                    found = knn(shard(points, mesh, placements), near, 5)
                    for result in found:
                        assert result._spec.placements == near._spec.placements
                        assert result._spec.partition(0) == near._spec.partition(0)


@ranks(2)
def test_radius_search_gives_int32_where_asked(mesh):
    points, queries = cloud(9, 3, grad=False), cloud(5, 3, grad=False)
    cut = [shard(x, mesh, [Shard(0)]) for x in (points, queries)]
    for most in (3, None):
        expected = radius_search(points, queries, 0.5, most)
        found = radius_search(*cut, 0.5, most, index_dtype=torch.int32)
        assert_close(found, expected.int())
    with pytest.raises(
        TypeError, match="index_dtype is Short, expected int64 or int32"
    ):
        radius_search(*cut, 0.5, 3, index_dtype=torch.int16)


@ranks(2)
def test_a_plain_operand_is_whole(mesh):
    points, queries = cloud(11, 3), cloud(6, 3)
    check_op(lambda p, q: knn(p, q, 5), points, sharded(queries, [Shard(0)]), mesh=mesh)
    check_op(lambda p, q: knn(p, q, 5), sharded(points, [Shard(0)]), queries, mesh=mesh)


@ranks(2, 3)
@pytest.mark.parametrize("count", [500, 2250])
def test_large_clouds_in_any_order(mesh, count):
    """More points than a leaf holds, on both sides. For few queries a tree for each
    piece, for many, on three ranks, one for two pieces and one for the third."""
    points, queries = cloud(3000, 3, grad=False), cloud(count, 3, grad=False)
    distances, indices = by_sorting(points, queries)
    for ordered in (False, True):
        if ordered:
            points = points[points[:, 0].argsort()]
            queries = queries[queries[:, 0].argsort()]
            distances, indices = by_sorting(points, queries)
        parts = shard(points, mesh, [Shard(0)]), shard(queries, mesh, [Shard(0)])
        near = (distances <= 0.1).nonzero()
        for transport in ("auto", *TRANSPORTS):
            with shardtensor.point_transport(transport):
                found = knn(*parts, 16)
                assert_close(found[0], indices[:, :16])
                assert_close(found[1], distances[:, :16])
                query, point = radius_search(*parts, 0.1).full_tensor()
                assert torch.equal(query, near[:, 0])
                assert torch.equal(point, indices[near[:, 0], near[:, 1]])


@ranks(2, 3)
def test_ordered_points_hardly_travel(mesh):
    """Auto sends queries where boxes are apart, and passes pieces elsewhere."""
    points = cloud(40000, 2, grad=False)
    ordered = points[points[:, 0].argsort()]

    def moved(x):
        part = shard(x, mesh, [Shard(0)])
        shardtensor.reset_comm_stats()
        knn(part, part, 8)
        return shardtensor.comm_stats().bytes

    assert moved(ordered) < moved(points) / 4


@ranks(4)
def test_queries_travel_only_where_a_nearer_point_may_be(mesh):
    """Those of ordered points to next pieces: not a byte more."""
    ranks, rank, k = mesh.size(), mesh.get_local_rank(), 3
    points = cloud(800, 2, grad=False)
    points = points[points[:, 0].argsort()]
    pieces = points.chunk(ranks)

    def crossing(here, there):
        """How many queries of a piece could find a nearer point in another."""
        own = by_sorting(pieces[here], pieces[here])[0][:, k - 1]
        low, high = pieces[there].amin(0), pieces[there].amax(0)
        x = pieces[here]
        return int(((x - x.clamp(low, high)).norm(dim=1) <= own).sum())

    others = [r for r in range(ranks) if r != rank]
    queries = sum(crossing(rank, r) for r in others)
    answers = sum(crossing(r, rank) for r in others)
    assert all(crossing(rank, r) == 0 for r in others if abs(r - rank) > 1)
    assert queries > 0 and answers > 0
    part = shard(points, mesh, [Shard(0)])
    with shardtensor.point_transport("boxes"):
        shardtensor.reset_comm_stats()
        knn(part, part, k)
        sent = shardtensor.comm_stats().bytes
    agreed = 4  # that all coordinates are finite
    boxes, counts = 4 * 2 * 8 * len(others), 8 * len(others)
    assert sent == agreed + boxes + counts + queries * 3 * 8 + answers * k * 16


# ---- errors -----------------------------------------------------------------


@ranks(8)
@pytest.mark.parametrize("most", [3, None])
def test_nothing_is_made_for_ranks_that_are_far(mesh, most):
    x = torch.arange(80.0)[:, None]
    points = shard(x, mesh, [Shard(0)])

    def find(cloud):
        return radius_search(cloud, cloud, 1.5, most)

    with shardtensor.point_transport("boxes"):
        with torch.autograd.profiler.profile() as profile:
            found = find(points)
        assert_close(found, find(x))
    names = [event.name for event in profile.function_events]
    # Two neighbours' queries are taken from the own ones, and their answers.
    assert names.count("aten::index_select") < 2 * 8


@ranks(2)
def test_errors_are_the_same_on_all_ranks(mesh):
    points, queries = cloud(8, 3, grad=False), cloud(4, 3, grad=False)
    part = shard(points, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="k is 9, expected 1 <= k <= 8"):
        knn(part, queries, 9)
    with pytest.raises(ValueError, match="k is 0, expected 1 <= k <= 8"):
        knn(part, queries, 0)
    with pytest.raises(ValueError, match=r"expected points \(\[B,\] N, D\)"):
        knn(part, queries[:, :2], 1)
    with pytest.raises(TypeError, match="of one dtype"):
        knn(part, queries.float(), 1)
    with pytest.raises(ValueError, match="radius is -1, expected a finite number"):
        radius_search(part, queries, -1.0)
    with pytest.raises(ValueError, match="max_points is 0, expected at least 1"):
        radius_search(part, queries, 1.0, 0)
    points[0, 0] = float("nan")  # on one rank only
    with pytest.raises(ValueError, match="knn: expected finite coordinates"):
        knn(shard(points, mesh, [Shard(0)]), queries, 1)
    assert shardtensor.get_point_transport() == "auto"
    with pytest.raises(ValueError, match="got 'pigeon'"):
        shardtensor.set_point_transport("pigeon")


@ranks(2)
def test_no_points(mesh):
    none, queries = torch.zeros(0, 2), cloud(5, 2, grad=False).float()
    for transport in TRANSPORTS:
        with shardtensor.point_transport(transport):
            parts = shard(none, mesh, [Shard(0)]), shard(queries, mesh, [Shard(0)])
            assert radius_search(*parts, 1.0).shape == (2, 0)
            found = radius_search(*parts, 1.0, 2, True, True)
            assert [tuple(x.shape) for x in found] == [(5, 2), (5, 2, 2), (5, 2)]
            assert all((x.full_tensor() == 0).all() for x in found)


def test_distances_have_tangents():
    points, queries = cloud(9, 3), cloud(5, 3, grad=False)
    ways = torch.randn_like(points), torch.randn_like(queries)
    step = 1e-6
    moved = [
        knn(points.detach() + sign * step * ways[0], queries + sign * step * ways[1], 2)
        for sign in (1, -1)
    ]
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, (points.detach(), queries), ways)
        tangent = forward_ad.unpack_dual(knn(*duals, 2)[1]).tangent
    expected = (moved[0][1] - moved[1][1]) / (2 * step)
    torch.testing.assert_close(tangent, expected, rtol=1e-5, atol=1e-7)
