"""Samples and groups of points: one device's rows, however the cloud is cut."""

import pytest
import torch
from layouts import sweep
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.nn.functional import ball_query, farthest_point_sampling


def farthest(points, count, start=0):
    """Row by row, of equally far ones the first."""
    rows, away = [start], torch.full(points.shape[:1], torch.inf).to(points)
    while len(rows) < count:
        away = torch.minimum(away, (points - points[rows[-1]]).square().sum(-1))
        rows.append(int((away == away.max()).nonzero()[0]))
    return torch.tensor(rows)


def balls(points, queries, radius, most):
    squares = (queries[:, None] - points).square().sum(-1)
    order = squares.argsort(dim=-1, stable=True)
    counts = (squares <= radius**2).sum(-1).clamp(max=most)
    slots = torch.arange(most).expand(len(queries), -1)
    rows = order.gather(1, torch.where(slots < counts[:, None], slots, 0))
    return rows.masked_fill(counts[:, None] == 0, 0), counts


def cloud():
    points = torch.randint(5, (17, 3)).double()  # many are equally far
    return points


def test_plain_tensors():
    points = cloud()
    assert torch.equal(farthest_point_sampling(points, 9, 2), farthest(points, 9, 2))
    batch = torch.stack([points, points.flip(0)])
    expected = torch.stack([farthest(entry, 5) for entry in batch])
    assert torch.equal(farthest_point_sampling(batch, 5), expected)
    for a, b in zip(
        ball_query(points, points[:6] + 0.5, 1.0, 4),
        balls(points, points[:6] + 0.5, 1.0, 4),
        strict=True,
    ):
        assert torch.equal(a, b)


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("batched", [False, True])
def test_the_same_rows_from_any_layout(mesh, batched):
    points = cloud()
    expected = farthest(points, 9, 4)
    groups = balls(points, points[::3], 1.0, 3)
    if batched:
        points = torch.stack([points, points.flip(1)])
        expected, groups = (
            expected.expand(2, -1),
            [x.expand(2, *x.shape) for x in groups],
        )
    with shardtensor.fallback_mode("error"):
        for placements, sizes in sweep(
            mesh, points.shape, dims=range(points.dim() - 1)
        ):
            cut = shard(points, mesh, placements, sizes)
            rows = farthest_point_sampling(cut, 9, start=4)
            assert_close(rows, expected)
            if list(placements) == [Shard(points.dim() - 2)] * mesh.ndim:
                assert list(rows.placements) == list(placements)
            queries = shard(points[..., ::3, :], mesh, placements)
            for transport in ("ring", "boxes"):
                with shardtensor.point_transport(transport):
                    for found, wanted in zip(ball_query(cut, queries, 1.0, 3), groups):
                        assert_close(found, wanted)


@ranks(2)
def test_bad_arguments_are_one_error_on_all_ranks(mesh):
    points = shard(cloud(), mesh, [Shard(0)])
    for count, start, text in (
        (0, 0, "1 <= count <= 17"),
        (18, 0, "1 <= count <= 17"),
        (3, 17, "a row of 17 points"),
    ):
        with pytest.raises(ValueError, match=text):
            farthest_point_sampling(points, count, start)
    with pytest.raises(ValueError, match="at least 1"):
        ball_query(points, points, 1.0, 0)
    with pytest.raises(ValueError, match="finite number >= 0"):
        ball_query(points, points, -1.0, 2)
    wrong = cloud()
    wrong[-1, 0] = torch.nan
    with pytest.raises(ValueError, match="finite coordinates"):
        farthest_point_sampling(shard(wrong, mesh, [Shard(0)]), 3)
