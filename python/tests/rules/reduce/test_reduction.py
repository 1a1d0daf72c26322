"""Reductions over sharded and unsharded dims."""

import math

import pytest
import rig
import torch
from layouts import sweep
from oracle import WHOLE, every
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Partial, Replicate, Shard

NAN, INF = math.nan, math.inf

# name: (reduction(x, dim, keepdim), second-order gradients exist)
DIMENSIONAL = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "var": torch.var,
    "std": lambda x, dim, keepdim: torch.std(x, dim, keepdim=keepdim, correction=0),
    "var_mean": torch.var_mean,
    "std_mean": torch.std_mean,
    "norm": lambda x, dim, keepdim: torch.linalg.vector_norm(x, 2, dim, keepdim),
    "norm_1": lambda x, dim, keepdim: torch.linalg.vector_norm(x, 1, dim, keepdim),
    "norm_3": lambda x, dim, keepdim: torch.norm(x, 3, dim, keepdim),
    "norm_inf": lambda x, dim, keepdim: torch.linalg.vector_norm(x, INF, dim, keepdim),
    "norm_low": lambda x, dim, keepdim: torch.linalg.vector_norm(x, -INF, dim, keepdim),
    "norm_half": lambda x, dim, keepdim: torch.linalg.vector_norm(x, 0.5, dim, keepdim),
    "norm_0": lambda x, dim, keepdim: torch.linalg.vector_norm(x, 0, dim, keepdim),
    "norm_aten": lambda x, dim, keepdim: torch.ops.aten.norm(x, 3, dim, keepdim),
    "logsumexp": torch.logsumexp,
    "nansum": torch.nansum,
    "nanmean": torch.nanmean,
}
# One dim, or everything.
SINGLE = {
    "max": torch.max,
    "min": torch.min,
    "prod": torch.prod,
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "median": torch.median,
}
LOGICAL = {"any": torch.any, "all": torch.all, "count_nonzero": torch.count_nonzero}

DIMS = [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)]


def values(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype).requires_grad_()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("name", DIMENSIONAL)
def test_over_every_dim_of_every_cut(mesh, name, cut):
    import shardtensor

    shardtensor.set_fallback_mode("error")
    x = values(5, 4, 6)
    for sizes in partitions(x.shape[cut], mesh.size()):
        part = sharded(x, [Shard(cut)], {cut: sizes})
        for dims in DIMS:
            for keepdim in (False, True) if WHOLE else (sizes[0] > 1,):
                check_op(
                    lambda x, d=dims, k=keepdim: DIMENSIONAL[name](x, d, keepdim=k),
                    part, mesh=mesh, second_order=not keepdim or WHOLE,
                )  # fmt: skip


@ranks("2x2")
@pytest.mark.parametrize("dims", [(0, 1), (1, 1), (None, 0), (2, None)])
@pytest.mark.parametrize("name", DIMENSIONAL)
def test_on_a_grid_of_ranks(mesh, name, dims):
    x = values(5, 4, 6)
    placements = [Replicate() if d is None else Shard(d) for d in dims]
    for reduced in DIMS:
        check_op(
            lambda x, d=reduced: DIMENSIONAL[name](x, d, keepdim=False),
            sharded(x, placements), mesh=mesh, second_order=True,
        )  # fmt: skip


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", [*SINGLE, *LOGICAL])
def test_over_one_dim(mesh, name):
    import shardtensor

    if name in LOGICAL:
        shardtensor.set_fallback_mode("error")
    reduce = SINGLE.get(name) or LOGICAL[name]
    x = values(5, 4, 6)
    if name in LOGICAL:
        x = (x.detach() > 1).double()
    for cut in range(3):
        for sizes in partitions(x.shape[cut], mesh.size()):
            part = sharded(x, [Shard(cut)], {cut: sizes})
            for dim in (0, 1, -1):
                check_op(lambda x, d=dim: reduce(x, d), part, mesh=mesh)
                if name != "count_nonzero":
                    check_op(
                        lambda x, d=dim: reduce(x, d, keepdim=True), part, mesh=mesh
                    )
            check_op(reduce, part, mesh=mesh)


def whole(x):
    return (
        x.sum(), x.mean(), x.amax(), x.amin(), x.max(), x.min(), x.prod(), x.var(),
        x.std(), x.norm(), x.norm(3), torch.linalg.vector_norm(x),
    )  # fmt: skip


@ranks(1, 2, 3, "2x2")
def test_over_everything(mesh):
    x = values(5, 4, 6)
    placements = [Shard(0), Shard(1)][: mesh.ndim]
    check_op(whole, sharded(x, placements), mesh=mesh, second_order=True)
    check_op(whole, sharded(values(), [Replicate()] * mesh.ndim), mesh=mesh)


@ranks(2, "2x2")
@pytest.mark.parametrize("name", ["max", "min", "median", "amax"])
def test_gradients_of_an_extreme_stay_where_the_elements_are(mesh, name):
    import shardtensor

    x = shard(values(40, 50), mesh, [Shard(0)] * mesh.ndim)
    extreme = getattr(torch, name)(x)
    shardtensor.reset_comm_stats()
    extreme.backward()
    assert shardtensor.comm_stats().bytes <= 64  # how many elements are as large
    assert x.grad.placements == x.placements


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("median", [torch.median, torch.nanmedian])
def test_medians_of_everything(mesh, median):
    import shardtensor

    shardtensor.set_fallback_mode("error")
    ties = torch.tensor([[3.0, -1], [-INF, 3], [-2, -0.0], [INF, 3], [0, -7]])
    some_nan = torch.tensor([NAN, -3.0, 2, NAN, 1, -NAN]).view(3, 2)
    for x in (
        values(5, 4, 6), values(7), values(6, 3), ties, ties[1:], some_nan,
        some_nan * NAN, torch.zeros(0, 3), values(1, 1), values(3, 3) * 1e300,
    ):  # fmt: skip
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            y = x.detach().to(dtype).requires_grad_()
            step = 4 if dtype == torch.float64 else 9
            for layout in every(step, sweep(mesh, y.shape)):
                check_op(
                    median, sharded(y, *layout), mesh=mesh,
                    second_order=dtype == torch.float64,
                )  # fmt: skip
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        limits = torch.iinfo(dtype)
        x = torch.randint(limits.min, limits.max, (5, 4), dtype=dtype)
        for layout in every(9, sweep(mesh, x.shape)):
            check_op(median, sharded(x, *layout), mesh=mesh)
    if rig.DEVICE != "cuda":  # which has them of truth values
        with pytest.raises(RuntimeError, match="not implemented for 'Bool'"):
            median(shard(ties > 0, mesh, [Shard(0)] * mesh.ndim))


@ranks(1, 2, 3, "2x2")
def test_truth_of_everything_moves_a_number(mesh):
    import shardtensor

    shardtensor.set_fallback_mode("error")
    x = torch.zeros(5, 4, dtype=torch.bool)
    for given in (x, ~x, x.clone().fill_diagonal_(True), x[:0]):
        for layout in sweep(mesh, given.shape):
            check_op(
                lambda x: (torch._is_all_true(x), torch._is_any_true(x)),
                sharded(given, *layout), mesh=mesh,
            )  # fmt: skip
    spread = shard(torch.rand(5, 4) + 1, mesh, [Shard(0)] * mesh.ndim)
    torch.distributions.Normal(spread, spread).log_prob(spread)


@ranks(2, 3)
def test_products_with_zeros_have_the_right_gradient(mesh):
    x = values(5, 3)
    with torch.no_grad():
        x[3, 0] = 0
        x[1, 1] = x[4, 1] = 0
    for placement in (Shard(0), Shard(1)):
        check_op(
            lambda x: (x.prod(0), x.prod(1, keepdim=True), x.prod()),
            sharded(x, [placement]), mesh=mesh, second_order=True,
        )  # fmt: skip


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_of_integers_and_truth_values(mesh, dtype):
    x = torch.randint(0, 3, (5, 4)).to(dtype)

    def reductions(x):
        results = [x.sum(), x.sum(0), x.prod(0), x.prod(), x.any(1), x.all(), x.all(0)]
        results += [x.amax(0), x.amin((0, 1)), x.max(), x.min(), x.max(1).values]
        results += [x.count_nonzero(), x.sum(1, dtype=torch.float32)]
        results += [x.any(), torch.any(x, (0, 1)), x.max(0).indices]
        results += [torch.any(x, ()), torch.all(x, ()), x.prod(0, dtype=torch.int32)]
        if dtype != torch.bool:
            results += [x.argmax(), x.argmin(0), x.double().mean(0)]
        return results

    for placement in (Shard(0), Shard(1)):
        check_op(reductions, sharded(x, [placement]), mesh=mesh)


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_accumulate_in_float32(mesh, dtype):
    x = (torch.randn(300, 7) + 4).to(dtype).requires_grad_()
    check_op(
        lambda x: (
            x.sum(), x.sum(0), x.mean(), x.mean(0), x.var(0), x.std(), x.norm(),
            x.amax(0), x.sum(dtype=torch.float32), x.mean(1, dtype=torch.float64),
            x[:5].detach().prod(0),
        ),
        sharded(x, [Shard(0)]), mesh=mesh,
    )  # fmt: skip
    check_op(
        lambda x: (x.logsumexp(0), x.nansum(0), x.nansum(0, dtype=dtype)),
        sharded(x, [Shard(0)]),
        mesh=mesh,
    )


@ranks(1, 2, 3)
def test_nan_wins_wherever_it_is(mesh):
    x = torch.randn(6, 4)
    for row in range(6):
        y = x.clone()
        y[row, 1] = NAN
        part = shard(y, mesh, [Shard(0)])
        for reduce in (torch.amax, torch.amin, torch.sum, torch.mean, torch.logsumexp):
            assert_close(reduce(part, 0), reduce(y, 0))
        for reduce in (torch.max, torch.min):
            assert_close(reduce(part), reduce(y))
            actual, expected = reduce(part, 0), reduce(y, 0)
            assert_close(actual.values, expected.values)
            assert_close(actual.indices, expected.indices)
        assert_close(part.argmax(0), y.argmax(0))
    infinite = torch.tensor([[INF], [NAN], [1.0], [2.0], [3.0], [-INF]])
    assert_close(shard(infinite, mesh, [Shard(0)]).nansum(0), infinite.nansum(0))


@ranks(1, 2, 3, 4)
def test_ties_share_the_gradient_or_go_to_the_first(mesh):
    x = torch.tensor([[1.0, 2], [3, 2], [3, 1], [0, 2], [3, 2]], requires_grad=True)
    for sizes in partitions(5, mesh.size()):
        part = sharded(x, [Shard(0)], {0: sizes})
        check_op(
            lambda x: (x.amax(0), x.amin(0), x.max(), x.min(), x.norm(INF)),
            part, mesh=mesh,
        )  # fmt: skip
        check_op(lambda x: (*x.max(0), *x.min(0, keepdim=True)), part, mesh=mesh)
        check_op(lambda x: (x.argmax(0), x.argmin(0), x.argmax()), part, mesh=mesh)


@ranks(2, 3, 4)
def test_extremes_of_merged_dims_are_where_one_device_finds_them(mesh):
    x = torch.tensor([[0.0, 1, 2, 3, 4], [9, 8, 7, 6, 5]], requires_grad=True)
    wide = torch.randn(2, 3, 5, requires_grad=True)
    for sizes in partitions(5, mesh.size()):
        check_op(
            lambda x: (
                x.flatten().argmax(0), x.flatten().argmin(0), x.flatten().argmax(),
                *x.flatten().max(0), *(-x).flatten().min(0, keepdim=True),
            ),
            sharded(x, [Shard(1)], {1: sizes}), mesh=mesh,
        )  # fmt: skip
        check_op(
            lambda x: (*x.view(2, 15).max(1), *x.view(2, 15).min(1), x.argmin()),
            sharded(wide, [Shard(2)], {2: sizes}), mesh=mesh,
        )  # fmt: skip


@ranks(2, 3)
def test_a_large_mean_leaves_the_variance_alone(mesh):
    x = torch.randn(64, 3) + 1e4
    part = shard(x, mesh, [Shard(0)])
    exact = x.double().var(0).float()
    assert_close(part.var(0), exact, rtol=1e-3, atol=0)


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_deviations_of_numbers_whose_squares_are_infinite(mesh, dtype):
    """PyTorch's kernels on the CPU take the root in float64, a variance is rounded."""
    x = (torch.rand(7, 6, dtype=torch.float64) * 1e30).to(dtype)
    rounding = 2 * torch.finfo(dtype).eps
    for sizes in partitions(7, mesh.size(0)):
        s = shard(x, mesh, [Shard(0)] + [Shard(1)] * (mesh.ndim - 1), {0: sizes})
        for dim in (None, 0, (0, 1)):
            assert_close(torch.var(s, dim), torch.var(x, dim))
            if rig.DEVICE != "cpu":
                continue  # whose root is in float32, too
            for mine, wanted in zip(
                (torch.std(s, dim), *torch.std_mean(s, dim)),
                (torch.std(x, dim), *torch.std_mean(x, dim)),
                strict=True,
            ):
                assert_close(mine, wanted, rtol=rounding, atol=0)


@ranks(2)
def test_without_elements(mesh):
    x = torch.zeros(0, 4)
    part = shard(x, mesh, [Shard(0)])
    for reduce in (torch.sum, torch.mean, torch.prod, torch.any, torch.all):
        assert_close(reduce(part), reduce(x))
        assert_close(reduce(part, 0), reduce(x, 0))
    assert_close(part.var(0), x.var(0))
    assert_close(part.amax(1), x.amax(1))
    assert_close(part.logsumexp(0), x.logsumexp(0))
    with pytest.raises(RuntimeError):
        shard(x, mesh, [Shard(1)], {1: [4, 0]}).max()
    for reduce in (torch.max, torch.amax, torch.min):
        with pytest.raises((RuntimeError, IndexError)):
            reduce(part)
        with pytest.raises((RuntimeError, IndexError)):
            reduce(part, 0)


@ranks(2, 3)
def test_partial_inputs(mesh):
    x = values(5, 4)
    part = sharded(x, [Partial()])
    check_op(
        lambda x: (
            x.sum(0), x.sum(), x.mean(1), x.amax(0), x.var(0), x.norm(), x.prod(0),
            x.max(), x.logsumexp(1), x.softmax(0),
        ),
        part, mesh=mesh, second_order=True,
    )  # fmt: skip


@ranks(2, 3, "2x2")
def test_sums_of_sums_in_another_dtype(mesh):
    """A sum's whole part is not that of its terms, nor is what is true."""
    part = shard(torch.full((6, 3), 0.5), mesh, [Shard(0)] * mesh.ndim)
    for dtype in (torch.int64, torch.bool, torch.float64, torch.bfloat16):
        expected = torch.full((3,), 3.0).sum(dtype=dtype)
        assert_close(part.sum(0).sum(dtype=dtype), expected)
        assert_close(part.sum(0).sum(0, dtype=dtype).sum(), expected.sum())
    truth = part.sum(0, dtype=torch.bool)
    assert_close(truth.sum(), torch.tensor(3))
    assert_close(truth * 2 + truth, torch.full((3,), 3))


@ranks(2)
def test_the_variance_of_one_number_without_dims(mesh):
    for value in (1.0, INF, NAN):
        x = torch.tensor(value)
        part = shard(x, mesh, [Replicate()])
        for correction in (0, 1):
            assert_close(part.var(correction=correction), x.var(correction=correction))
            assert_close(part.std(correction=correction), x.std(correction=correction))


@ranks(2)
def test_sums_move_nothing_until_they_are_needed(mesh):
    import shardtensor

    part = shard(torch.ones(4, 6), mesh, [Shard(0)])
    shardtensor.reset_comm_stats()
    total = (part.sum(0) * 2).sum()
    assert shardtensor.comm_stats().all_reduces == 0
    assert total.item() == 48
    assert shardtensor.comm_stats().all_reduces == 1


@ranks(2)
def test_wrong_dims_are_pytorchs_errors(mesh):
    part = shard(torch.ones(4, 6), mesh, [Shard(0)])
    for reduce in (torch.sum, torch.mean, torch.amax, torch.var, torch.logsumexp):
        with pytest.raises(
            IndexError, match=r"(expected dims in|Dimension out of range)"
        ):
            reduce(part, 2)
        with pytest.raises(RuntimeError, match="appears (twice|multiple)"):
            reduce(part, (0, -2))
    for reduce in (torch.sum, torch.mean, torch.std_mean, torch.linalg.vector_norm):
        with pytest.raises(RuntimeError, match="appears (twice|multiple)"):
            reduce(part.sum(), dim=(0, -1))
    with pytest.raises(RuntimeError, match="mean"):
        part.long().mean()


COUNTS = {
    "bincount": lambda x: torch.bincount(x.mul(3).abs().long().flatten(), minlength=9),
    "bincount_weighted": lambda x: torch.bincount(
        x.mul(3).abs().long()[:, 0, 0], weights=x.detach()[:, 0, 0]
    ),
    "histc": lambda x: torch.histc(x.detach(), 5),
    "histc_between": lambda x: torch.histc(x.detach(), 4, -1, 0.5),
    "histc_of_one_value": lambda x: torch.histc(x.detach() * 0, 3),
    "trace": lambda x: torch.trace(x[:, 0]),
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", COUNTS)
def test_counts_and_traces(mesh, name):
    x = values(5, 4, 6)
    for cut in range(3):
        for sizes in partitions(x.shape[cut], mesh.size()):
            check_op(COUNTS[name], sharded(x, [Shard(cut)], {cut: sizes}), mesh=mesh)


@ranks(2)
def test_bins_are_checked_on_all_ranks(mesh):
    part = shard(torch.tensor([3, 1, -1]), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="non-negative integral inputs"):
        torch.bincount(part)


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_under_autocast(mesh, dtype):
    """Of devices in float32, which holds more than half precision."""
    x = torch.full((4, 6), 5000.0, dtype=dtype)
    part = shard(x, mesh, [Shard(0)])
    for sum_up in (
        torch.sum,
        torch.trace,
        lambda x: x.sum(0),
        lambda x: x.sum((0, 1), keepdim=True),
        lambda x: x.sum(dtype=dtype),
    ):
        with rig.autocast(dtype):
            expected = sum_up(x)
            y = sum_up(part.requires_grad_())
        assert y.dtype == expected.dtype
        assert_close(y, expected)
        assert torch.autograd.grad(y.float().sum(), part)[0].dtype == dtype
