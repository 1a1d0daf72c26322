"""Corners of cells that are one point: one device's order, however they are cut."""

import math

import pytest
import rig
import torch
from layouts import sweep
from oracle import every
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import mesh as cm


def by_first_place(corners):
    """Points and cells, one corner after the other."""
    numbers, points, cells = {}, [], []
    for corner in corners.flatten(0, 1).tolist():
        key = tuple(x + 0.0 for x in corner)  # zero has one sign
        if key not in numbers:
            numbers[key] = len(points)
            points.append(corner)
        cells.append(numbers[key])
    shape = corners.shape
    points = torch.tensor(points, dtype=corners.dtype).reshape(-1, shape[2])
    return points, torch.tensor(cells, dtype=torch.int64).reshape(shape[:2])


def soup(cells=40, corners=3, dims=3, dtype=torch.float32):
    """Cells on few points, some of which differ in one coordinate alone."""
    generator = rig.generator(cells + corners + dims)
    numbers = torch.randint(-2, 3, (cells, corners, dims), generator=generator)
    return numbers.to(dtype) / 3


def test_equal_corners_are_one_point():
    line = torch.tensor([[[5.0], [0], [1]], [[1], [-0.0], [7]]])
    points, cells = cm.merge_corners(line)
    assert points.tolist() == [[5.0], [0.0], [1.0], [7.0]]
    assert cells.tolist() == [[0, 1, 2], [2, 1, 3]]
    for corners in (soup(), soup(9, 4, 2, torch.float64), soup(0), soup(1, 1, 1)):
        for actual, wanted in zip(
            cm.merge_corners(corners), by_first_place(corners), strict=True
        ):
            assert torch.equal(actual, wanted)


@ranks(1, 2, 3, "2x2")
def test_corners_merge_in_pieces(mesh):
    with shardtensor.fallback_mode("error"):
        for corners in (soup(), soup(7, 4, 2, torch.float64), soup(2)):
            expected = by_first_place(corners)
            for layout in every(2, sweep(mesh, corners.shape)):
                found = cm.merge_corners(shard(corners, mesh, *layout))
                for actual, wanted in zip(found, expected, strict=True):
                    assert_close(actual, wanted)


@ranks(2)
def test_corners_that_are_none(mesh):
    for wrong in (torch.ones(3, 3), torch.ones(2, 3, 3, dtype=torch.int64)):
        for corners in (wrong, shard(wrong, mesh, [Shard(0)])):
            with pytest.raises(ValueError, match=r"expected corners \(C, corners, D\)"):
                cm.merge_corners(corners)


@ranks(1, 2)
def test_all_nan_are_one(mesh):
    nan = torch.tensor(math.nan)
    line = torch.stack([nan, -nan, torch.tensor(1.0), -nan]).view(2, 2, 1)
    assert line.signbit().flatten().tolist() == [False, True, False, True]
    for corners in (line, shard(line, mesh, [Shard(0)])):
        points, cells = cm.merge_corners(corners)
        assert_close(cells, torch.tensor([[0, 0], [1, 0]]))


@ranks(2)
def test_coefficients_of_other_dtypes(mesh):
    points = torch.tensor([[0.0, 0], [1, 0], [0, 1], [1.5, 1]]).double()
    cells = torch.tensor([[0, 1, 2], [2, 1, 3]])
    coefficients = torch.tensor([3.0, 4.0])
    values = torch.randn(4).double()
    kind = "triangle"
    expected = cm.apply_mass(points, cells, kind, values, coefficients.double())
    cut = shard(cells, mesh, [Shard(0)])
    for given in coefficients, coefficients.long():
        assert_close(cm.apply_mass(points, cut, kind, values, given), expected)
    for apply in cm.apply_mass, cm.apply_stiffness:
        with pytest.raises(TypeError, match="expected coefficients that the .* Float"):
            apply(points.float(), cut, kind, values.float(), coefficients.double())
