"""Points in voxels: means, sums and back, however points and voxels are cut."""

import pytest
import torch
import torch.nn.functional as F
from layouts import placements_of, sweep
from oracle import every
from ranks import assert_close, check_op, ranks, shard, sharded
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.nn.functional import devoxelize, grid_subsample, voxelize

LOW, HIGH, SHAPE = (0.0, -1.0), (1.0, 1.0), (5, 3)


def by_loop(points, values, reduce):
    """Point by point."""
    sums, counts = torch.zeros(*SHAPE, values.shape[1]), torch.zeros(*SHAPE, 1)
    for point, value in zip(points.tolist(), values):
        place = [
            int((x - low) * n // (high - low))
            for x, low, high, n in zip(point, LOW, HIGH, SHAPE, strict=True)
        ]
        if all(0 <= i < n for i, n in zip(place, SHAPE, strict=True)):
            sums[tuple(place)] += value
            counts[tuple(place)] += 1
    result = sums / counts.clamp(min=1) if reduce == "mean" else sums
    return result.movedim(-1, 0)


def cloud(points=23, channels=2, *batch):
    """Some are outside the box, some voxels empty."""
    at = torch.rand(*batch, points, 2, dtype=torch.float64) * 2.4 - 1.2
    at[..., 0] = at[..., 0].abs()
    return at, torch.randn(*batch, points, channels, dtype=torch.float64)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_one_device_voxelizes(reduce):
    points, values = cloud()
    found = voxelize(points, values, LOW, HIGH, SHAPE, reduce)
    torch.testing.assert_close(found.float(), by_loop(points, values, reduce))
    batch = voxelize(
        points.expand(2, -1, -1), values.expand(2, -1, -1), LOW, HIGH, SHAPE
    )
    torch.testing.assert_close(batch[1], voxelize(points, values, LOW, HIGH, SHAPE))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_one_device_devoxelizes_as_grid_sample(dims):
    shape = (4, 1, 3)[:dims]
    voxels = torch.randn(2, *shape, dtype=torch.float64)
    points = torch.rand(30, dims, dtype=torch.float64) * 3 - 1.5
    low, high = [-1.0] * dims, [1.0] * dims
    for mode, sampled in (("linear", "bilinear"), ("nearest", "nearest")):
        found = devoxelize(voxels, points, low, high, mode)
        # grid_sample has two or three dims, the last one first.
        image = voxels if dims > 1 else voxels[:, None]
        at = points.flip(-1) if dims > 1 else F.pad(points, (0, 1))
        expected = F.grid_sample(
            image[None],
            at.reshape(1, *[1] * (max(dims, 2) - 1), -1, max(dims, 2)),
            sampled,
            "border",
            align_corners=False,
        )
        torch.testing.assert_close(found, expected.reshape(2, -1).T)


def test_what_is_outside_counts_nowhere():
    points = torch.tensor([[0.1], [1.0], [-0.1]])
    found = voxelize(points, torch.ones(3, 1), [0.0], [1.0], [2], "sum")
    assert found.tolist() == [[1.0, 0.0]]


@ranks(1, 2, 3, "2x2")
def test_voxelize_in_pieces(mesh):
    points, values = cloud()
    values.requires_grad_()
    cloud_in_pieces = sharded(points, placements_of(mesh, 0))

    def call(p, v):
        return voxelize(p, v, LOW, HIGH, SHAPE)

    with shardtensor.fallback_mode("error"):
        for placements, sizes in sweep(mesh, values.shape):
            given = sharded(values, placements, sizes)
            check_op(call, cloud_in_pieces, given, mesh=mesh, second_order=True)
        for placements, sizes in sweep(mesh, points.shape, dims=[0]):
            cut = shard(points, mesh, placements, sizes)
            found = voxelize(cut, values.detach(), LOW, HIGH, SHAPE, "sum")
            assert_close(found, by_loop(points, values.detach(), "sum").double())
            if mesh.ndim == 1 and placements == [Shard(0)]:
                assert found.placements == (Shard(1),)


@ranks(1, 2, 3, "2x2")
def test_devoxelize_in_pieces(mesh):
    voxels = torch.randn(2, *SHAPE, dtype=torch.float64, requires_grad=True)
    points = cloud(9)[0].requires_grad_()

    def call(v, p):
        return devoxelize(v, p, LOW, HIGH)

    with shardtensor.fallback_mode("error"):
        for layout in sweep(mesh, voxels.shape, dims=[0, 1]):
            given = sharded(points, placements_of(mesh, 0))
            check_op(
                call, sharded(voxels, *layout), given, mesh=mesh, second_order=True
            )
        for layout in sweep(mesh, points.shape, dims=[0]):
            given = sharded(voxels, placements_of(mesh, 1))
            check_op(call, given, sharded(points, *layout), mesh=mesh)


@ranks("2x2")
def test_a_batch(mesh):
    points, values = cloud(7, 3, 2)
    for dims in ((0, 1), (1, 0), (1, 1), (0, 0)):
        layout = placements_of(mesh, *dims)
        cut = shard(points, mesh, layout)
        grid = voxelize(cut, shard(values, mesh, layout), LOW, HIGH, SHAPE)
        expected = voxelize(points, values, LOW, HIGH, SHAPE)
        assert_close(grid, expected)
        back = devoxelize(grid, cut, LOW, HIGH)
        assert_close(back, devoxelize(expected, points, LOW, HIGH))


# ---- one point for each cube --------------------------------------------------


def subsampled(points, size, values):
    """By torch.unique of whole coordinates."""
    cubes = ((points - points.amin(0)) / size).floor().long()
    _, inverse, counts = cubes.unique(dim=0, return_inverse=True, return_counts=True)
    rows = torch.zeros(len(counts), points.shape[1]).to(points)
    means = rows.index_add(0, inverse, points) / counts[:, None]
    rows = torch.zeros(len(counts), values.shape[1]).to(values)
    return means, rows.index_add(0, inverse, values) / counts[:, None], counts, inverse


def test_one_device_subsamples():
    points, values = torch.rand(50, 3), torch.randn(50, 2)
    for found, expected in zip(
        grid_subsample(points, 0.4, values),
        subsampled(points, 0.4, values),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
    assert grid_subsample(points, 0.4)[1] is None


def test_one_device_subsamples_each_entry_of_a_batch():
    """As it would alone, its cubes after those of the entry before."""
    points, values = torch.rand(3, 20, 2) * torch.tensor([1, 3]), torch.randn(3, 20, 2)
    points[1] += 5
    *found, cubes, entries = grid_subsample(points, 0.4, values)
    alone = [subsampled(p, 0.4, v) for p, v in zip(points, values)]
    before = 0
    for entry, (*expected, of_points) in enumerate(alone):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a[entries == entry], b)
        assert torch.equal(cubes[entry], of_points + before)
        before += len(expected[0])
    assert torch.equal(entries, entries.sort().values) and len(entries) == before


@ranks(1, 2, 3, "2x2")
def test_grid_subsample_in_pieces(mesh):
    points = torch.rand(19, 2, dtype=torch.float64, requires_grad=True)
    values = torch.randn(19, 1, dtype=torch.float64, requires_grad=True)
    expected = grid_subsample(points.detach(), 0.3, values.detach())
    with shardtensor.fallback_mode("error"):
        for layout in sweep(mesh, points.shape):
            check_op(
                lambda p, v: grid_subsample(p, 0.3, v)[:2],
                sharded(points, *layout),
                sharded(values, placements_of(mesh, 0)),
                mesh=mesh,
                second_order=True,
            )
            cut = shard(points.detach(), mesh, *layout)
            for found, wanted in zip(
                grid_subsample(cut, 0.3, values.detach()), expected
            ):
                assert_close(found, wanted)


@ranks(1, 2, 3, "2x2")
def test_grid_subsample_of_a_batch_in_pieces(mesh):
    points = torch.rand(2, 9, 2, dtype=torch.float64, requires_grad=True)
    values = torch.randn(2, 9, 1, dtype=torch.float64, requires_grad=True)
    expected = grid_subsample(points.detach(), 0.3, values.detach())
    layouts = [(placements_of(mesh, *dims), None) for dims in ((0, 1), (1, 0))]
    with shardtensor.fallback_mode("error"):
        for layout in [*every(3, sweep(mesh, points.shape)), *layouts]:
            for of_values in (placements_of(mesh, 1), placements_of(mesh, 0)):
                check_op(
                    lambda p, v: grid_subsample(p, 0.3, v)[:2],
                    sharded(points, *layout),
                    sharded(values, of_values),
                    mesh=mesh,
                    second_order=True,
                )
            cut = shard(points.detach(), mesh, *layout)
            for found, wanted in zip(
                grid_subsample(cut, 0.3, values.detach()), expected, strict=True
            ):
                assert_close(found, wanted)


@ranks(2)
def test_errors_are_the_same_on_all_ranks(mesh):
    points, values = cloud()
    cut = shard(points, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="expected low < high"):
        voxelize(cut, values, HIGH, LOW, SHAPE)
    with pytest.raises(ValueError, match="for the 2 dims of the points"):
        voxelize(cut, values, LOW, HIGH, (2, 3, 4))
    with pytest.raises(ValueError, match="expected values"):
        voxelize(cut, values[:5], LOW, HIGH, SHAPE)
    with pytest.raises(ValueError, match="'mean' or 'sum', got 'max'"):
        voxelize(cut, values, LOW, HIGH, SHAPE, "max")
    with pytest.raises(ValueError, match="'linear' or 'nearest', got 'cubic'"):
        devoxelize(torch.ones(1, *SHAPE), cut, LOW, HIGH, "cubic")
    with pytest.raises(ValueError, match="expected voxels"):
        devoxelize(torch.ones(1, 2, 2, 2), cut, LOW, HIGH)
    for size in (0.0, -1.0, torch.inf):
        with pytest.raises(ValueError, match="expected a finite number > 0"):
            grid_subsample(cut, size)
    for spread in (cut, shard(points.view(1, 23, 2), mesh, [Shard(1)])):
        with pytest.raises(ValueError, match="fewer than 2.62 cubes"):
            grid_subsample(spread, 1e-12)
    for wrong in (cut[0], cut[:0], cut.view(1, 1, 23, 2)):
        with pytest.raises(ValueError, match=r"expected points \(\[B,\] N, D\)"):
            grid_subsample(wrong, 0.5)
    for wrong in (values[:5], values[None], values[:, 0]):
        with pytest.raises(ValueError, match=r"expected values \(\[B,\] N, C\) of"):
            grid_subsample(cut, 0.5, wrong)
    with pytest.raises(ValueError, match="points and values on one device, got"):
        grid_subsample(cut, 0.5, values.to("meta"))
    grid = torch.ones(1, *SHAPE, dtype=points.dtype)
    for bad in (torch.nan, torch.inf):
        points[-1, 0] = bad
        cut = shard(points, mesh, [Shard(0)])
        for call, *operands in (
            (grid_subsample, cut, 0.5),
            (voxelize, cut, values, LOW, HIGH, SHAPE),
            (voxelize, points, values, LOW, HIGH, SHAPE),
            (devoxelize, grid, cut, LOW, HIGH, "nearest"),
            (devoxelize, shard(grid, mesh, [Shard(1)]), points, LOW, HIGH),
        ):
            with pytest.raises(ValueError, match="finite coordinates"):
                call(*operands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_last_number_of_a_box_is_inside(dtype):
    for _ in range(200):
        low, width = (torch.rand(2, dtype=dtype) * 9).tolist()
        high = torch.tensor(low + width + 0.1, dtype=dtype)
        last = torch.nextafter(high, torch.tensor(-99.0, dtype=dtype))
        points = torch.stack([high, last]).view(2, 1)
        ones = torch.ones_like(points)
        sums = voxelize(points, ones, [low], [high.item()], [3], "sum")
        assert sums.tolist() == [[0, 0, 1]]


@ranks(2, 3)
def test_means_of_complex_values(mesh):
    points = torch.rand(9, 2)
    values = torch.randn(9, 2, dtype=torch.complex64)
    parts = [shard(x, mesh, placements_of(mesh, 0)) for x in (points, values)]
    for reduce in "mean", "sum":
        box = (0, 0), (1, 1), (4, 3), reduce
        assert_close(voxelize(*parts, *box), voxelize(points, values, *box))
    means = voxelize(points, values, (0, 0), (1, 1), (1, 1))
    torch.testing.assert_close(means.flatten(), values.mean(0))
