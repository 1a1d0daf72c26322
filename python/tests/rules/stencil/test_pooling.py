"""Pooling with fixed and adaptive windows."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
EXTENTS = [9, 6, 7]


def leaf(*sizes):
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_max_pool1d_sweeps_windows_and_cuts(mesh, kernel, ceil_mode):
    cuts = partitions(9, mesh.size())
    for stride, dilation in itertools.product([1, 2, 3], [1, 2]):
        for padding, sizes in itertools.product([0, kernel // 2], cuts):
            check_op(
                F.max_pool1d,
                sharded(leaf(2, 2, 9), [Shard(2)], {2: sizes}),
                *(kernel, stride, padding, dilation, ceil_mode, True),
                mesh=mesh,
                second_order=sizes == cuts[-1],
            )


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_avg_pool1d_sweeps_windows_and_cuts(mesh, kernel, ceil_mode):
    cuts = partitions(9, mesh.size())
    for stride, count in itertools.product([1, 2, 3], [False, True]):
        for padding, sizes in itertools.product([0, kernel // 2], cuts):
            check_op(
                F.avg_pool1d,
                sharded(leaf(2, 2, 9), [Shard(2)], {2: sizes}),
                *(kernel, stride, padding, ceil_mode, count),
                mesh=mesh,
                second_order=sizes == cuts[-1],
            )


def layouts(mesh, dims):
    if mesh.ndim == 1:
        return [[Shard(d)] for d in range(dims + 2)]
    return [
        [Shard(2), Shard(dims + 1)],
        [Shard(dims + 1), Shard(2)],
        [Shard(1), Shard(2)],
        [Replicate(), Shard(2)],
    ]


@ranks(2, 4, "2x2")
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_dim_can_be_sharded(mesh, dims):
    for placements in layouts(mesh, dims):
        x = leaf(3, 2, *EXTENTS[:dims])
        check_op(
            lambda x: MAX[dims](x, 3, 2, 1, return_indices=True),
            sharded(x, placements),
            mesh=mesh,
        )
        check_op(lambda x: MAX[dims](x, 2), sharded(x, placements), mesh=mesh)
        check_op(
            lambda x: AVG[dims](x, 3, 2, 1, count_include_pad=False),
            sharded(x, placements),
            mesh=mesh,
        )


@ranks(2)
def test_divisor_and_no_batch(mesh):
    for placements in [[Shard(0)], [Shard(1)], [Shard(2)]]:
        check_op(
            lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=7),
            sharded(leaf(2, 9, 6), placements),
            mesh=mesh,
        )
        check_op(
            lambda x: F.max_pool2d(x, 3, return_indices=True),
            sharded(leaf(2, 9, 6), placements),
            mesh=mesh,
        )


@ranks(2)
def test_padding_is_no_candidate_and_nan_is(mesh):
    x = -torch.rand(1, 1, 8, 4) - 1
    x[0, 0, 5, 2] = float("nan")
    x[0, 0, 2, :] = -float("inf")
    expected = F.max_pool2d(x, 3, 1, 1, return_indices=True)
    actual = F.max_pool2d(shard(x, mesh, [Shard(2)]), 3, 1, 1, return_indices=True)
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])


@ranks(2)
def test_even_cuts_need_no_messages(mesh):
    import shardtensor

    x = shard(torch.randn(1, 2, 8, 8), mesh, [Shard(2)])
    shardtensor.reset_comm_stats()
    F.max_pool2d(x, 2)
    F.avg_pool2d(x, 2)
    F.adaptive_avg_pool2d(x, 4)
    assert shardtensor.comm_stats().messages == 0


@ranks(2)
def test_wrong_arguments_raise_pytorchs_errors(mesh):
    x = shard(torch.randn(1, 2, 8, 8), mesh, [Shard(2)])
    with pytest.raises(RuntimeError, match="pad should be at most half"):
        F.max_pool2d(x, 3, padding=2)
    with pytest.raises(RuntimeError, match="Output size is too small"):
        F.avg_pool2d(x, 9)


# ---- adaptive windows -------------------------------------------------------

ADAPTIVE_AVG = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}
ADAPTIVE_MAX = {
    1: F.adaptive_max_pool1d,
    2: F.adaptive_max_pool2d,
    3: F.adaptive_max_pool3d,
}


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("outputs", [1, 2, 3, 5, 6, 7, 12, 13])
def test_adaptive_windows_and_cuts(mesh, outputs):
    cuts = partitions(12, mesh.size())
    for sizes in cuts:
        x = sharded(leaf(2, 2, 12), [Shard(2)], {2: sizes})
        second = sizes == cuts[-1]
        check_op(
            lambda x: F.adaptive_avg_pool1d(x, outputs),
            x,
            mesh=mesh,
            second_order=second,
        )
        check_op(
            lambda x: F.adaptive_max_pool1d(x, outputs, return_indices=True),
            x,
            mesh=mesh,
            second_order=second,
        )


@ranks(2, "2x2")
@pytest.mark.parametrize("outputs", [(0,), (3, 0), (0, 2, 0)])
def test_adaptive_pooling_to_nothing(mesh, outputs):
    dims = len(outputs)
    for placements in layouts(mesh, dims):
        x = sharded(leaf(2, 3, *(6, 5, 4)[:dims]).detach(), placements)
        check_op(lambda x: ADAPTIVE_AVG[dims](x, outputs), x, mesh=mesh)
        check_op(lambda x: ADAPTIVE_MAX[dims](x, outputs), x, mesh=mesh)


@ranks(2, 4, "2x2")
@pytest.mark.parametrize(
    "dims, outputs",
    [
        (dims, outputs)
        for dims in (1, 2, 3)
        for outputs in ([1, 1, 1], [3, 3, 2], [1, 4, 3], [None, 3, 5])
        if dims > 1 or outputs[0]  # PyTorch takes no None for one dim
    ],
)
def test_adaptive_pooling_over_every_dim(mesh, dims, outputs):
    size = outputs[0] if dims == 1 else outputs[:dims]
    for placements in layouts(mesh, dims):
        x = leaf(3, 2, *EXTENTS[:dims])
        check_op(
            lambda x: ADAPTIVE_AVG[dims](x, size),
            sharded(x, placements),
            mesh=mesh,
        )
        check_op(
            lambda x: ADAPTIVE_MAX[dims](x, size, return_indices=True),
            sharded(x, placements),
            mesh=mesh,
        )


@ranks(2)
def test_the_first_of_equal_maxima_counts(mesh):
    x = torch.zeros(1, 1, 6, 7, dtype=torch.float64, requires_grad=True)
    for placements in [[Shard(2)], [Shard(3)]]:
        for size in [(4, 2), (3, 5), (4, 4)]:
            check_op(
                F.adaptive_max_pool2d,
                sharded(x, placements),
                *(size, True),
                mesh=mesh,
            )


@ranks(2, 3, "2x2")
def test_the_last_of_several_nan_counts(mesh):
    x = torch.arange(42.0).view(1, 1, 6, 7)
    x[..., 1:3, 2:5] = x[..., 5, 0] = x[..., 4, 6] = math.nan
    for placements in layouts(mesh, 2):
        part = shard(x, mesh, placements)
        for size in [(4, 2), (3, 5), (4, 4), (1, 1)]:
            expected = F.adaptive_max_pool2d(x, size, True)
            for a, b in zip(F.adaptive_max_pool2d(part, size, True), expected):
                assert_close(a, b)


@ranks(2)
def test_averaging_everything_gathers_nothing(mesh):
    import shardtensor

    x = shard(torch.randn(1, 2, 64, 64), mesh, [Shard(2)])
    shardtensor.reset_comm_stats()
    y = F.adaptive_avg_pool2d(x, 1)
    assert shardtensor.comm_stats().bytes <= 16
    assert y.shape == (1, 2, 1, 1)


@ranks(2, "2x2")
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_mean_of_complex_numbers(mesh, dims):
    x = torch.randn(2, 3, *[5, 4, 6][:dims], dtype=torch.complex128)
    for placements in layouts(mesh, dims):
        part = sharded(x.requires_grad_(), placements)
        check_op(getattr(F, f"adaptive_avg_pool{dims}d"), part, 1, mesh=mesh)


@ranks(1, 2)
def test_one_window_over_no_rows(mesh):
    for shape in ((2, 0), (2, 3, 0), (0, 3, 4)):
        x = torch.zeros(shape, requires_grad=True)
        for dim in range(len(shape)):
            s = sharded(x, [Shard(dim)])
            check_op(lambda x: F.adaptive_avg_pool1d(x, 1), s, mesh=mesh)


@ranks(2)
@pytest.mark.parametrize("kind", ["adaptive_avg", "adaptive_max"])
def test_no_channels_of_one_sample(mesh, kind):
    """PyTorch takes the first dim for samples, of which there may be none."""
    for dims in (1, 2, 3):
        part = sharded(leaf(0, *[4] * dims), [Shard(1)])
        check_op(getattr(F, f"{kind}_pool{dims}d"), part, 2, mesh=mesh)
