"""Activations and the like: element by element, where the elements are."""

import functools

import pytest
import torch
import torch.nn.functional as F
from layouts import ALL, check_native, placements_of, sweep
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor

aten = torch.ops.aten


def values(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


# ---- PReLU ------------------------------------------------------------------


@ranks(*ALL)
@pytest.mark.parametrize("channels", [1, 4])
def test_prelu_of_a_parameter(mesh, channels):
    module = nn.PReLU(channels).double()
    with torch.no_grad():
        module.weight.copy_(torch.rand(channels))
    check_native(mesh, (2, 4, 5, 3), module, second_order=True)


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("channels", [1, 4])
def test_prelu_of_a_sharded_weight(mesh, channels):
    w = values(channels)
    weights = [sharded(w, [Replicate()] * mesh.ndim)]
    for sizes in partitions(channels, mesh.size()):
        weights.append(sharded(w, placements_of(mesh, 0), {0: sizes}))
    for weight in weights:
        check_native(mesh, (2, 4, 6), F.prelu, weight, dims=[1, 2], second_order=True)
    check_native(mesh, (5,), F.prelu, sharded(values(1), [Replicate()] * mesh.ndim))


@ranks(2)
def test_prelu_of_a_plain_input(mesh):
    x, w = values(2, 4, 5), values(4)
    for placement in (Shard(0), Replicate()):
        check_op(F.prelu, x, sharded(w, [placement]), mesh=mesh, second_order=True)
    with pytest.raises(RuntimeError, match="Mismatch of parameter numbers"):
        F.prelu(shard(x, mesh, [Shard(1)]), torch.ones(3, dtype=torch.float64))


# ---- others -----------------------------------------------------------------

ACTIVATIONS = {
    "hardswish": F.hardswish,
    "hardswish_": lambda x: F.hardswish(x * 1, inplace=True),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "gelu_": lambda x: aten.gelu_(x * 1),
    "mish_": lambda x: F.mish(x * 1, inplace=True),
    "threshold_": lambda x: F.threshold(x * 1, 0.2, -3.0, inplace=True),
    "abs_": lambda x: (x * 1).abs_(),
    "rrelu": F.rrelu,
    "rrelu_": lambda x: F.rrelu(x * 1, inplace=True),
    "rsub": lambda x: torch.rsub(x, x.exp(), alpha=2),
    "rsub_scalar": lambda x: torch.rsub(x, 2),
    "fill": lambda x: torch.fill(x, 2.0) * x,
    "fill_tensor": lambda x: torch.fill(x, torch.tensor(2.0)) * x,
    "fill_sum": lambda x: torch.fill(x, x.sum()) * x,
    "masked_fill": lambda x: x.masked_fill(x > 0, 3.0),
    "masked_fill_": lambda x: (x * 1).masked_fill_(x > 0, 3.0),
    "masked_fill_tensor": lambda x: x.masked_fill(x > 0, torch.tensor(3.0)),
    "masked_fill_sum": lambda x: x.masked_fill(x > 0, x.sum()),
    "masked_fill_sum_": lambda x: (x * 1).masked_fill_(x > 0, x.sum()),
    "masked_fill_float": lambda x: x.masked_fill(x > 0, (x.sum() * 0).float()),
    "masked_fill_row": lambda x: x.masked_fill(x.sum(0) > 0, x.sum()),
    "masked_fill_broadcast": lambda x: x.sum(0).masked_fill(x > 0, x.sum()),
    "safe_softmax_0": lambda x: aten._safe_softmax(x, 0),
    "safe_softmax_1": lambda x: aten._safe_softmax(x, 1),
}


@ranks(*ALL)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_gather_nothing(mesh, name):
    check_native(mesh, (6, 4), ACTIVATIONS[name], second_order=True)


CONSTANT = {
    "floor_divide": lambda x, y: torch.floor_divide(x, y),
    "floor_divide_number": lambda x, y: torch.floor_divide(x, 2),
    "floor_divide_": lambda x, y: (x * 1).floor_divide_(y),
    "floor_divide_number_": lambda x, y: (x * 1).floor_divide_(3),
    "comparison_": lambda x, y: (x * 1).lt_(y),
    "copysign_": lambda x, y: (x * 1).copysign_(y),
    "heaviside_": lambda x, y: (x * 1).heaviside_(y),
    "isnan": lambda x, y: torch.isnan(x),
    "fill_out": lambda x, y: aten.fill.Scalar_out(x, 2.0, out=torch.empty_like(x)),
    "where_out": lambda x, y: torch.where(x > 0, x, y, out=torch.empty_like(x)),
    "rsub_out": lambda x, y: aten.rsub.Tensor_out(x, y, out=torch.empty_like(x)),
    "hardswish_out": lambda x, y: aten.hardswish.out(x, out=torch.empty_like(x)),
    "softplus_out": lambda x, y: aten.softplus.out(x, out=torch.empty_like(x)),
    "glu_out": lambda x, y: aten.glu.out(x, 1, out=torch.empty_like(x[:, :2])),
}


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", CONSTANT)
def test_operators_without_a_gradient(mesh, name):
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for layout in sweep(mesh, x.shape):
        others = (y, sharded(y, placements_of(mesh, 1)))
        for other in others:
            with shardtensor.fallback_mode("error"):
                check_op(CONSTANT[name], sharded(x, *layout), other, mesh=mesh)


@ranks(2, 3)
def test_rows_of_nothing_but_minus_infinity(mesh):
    x = torch.randn(6, 4)
    x[2], x[:, 1] = -torch.inf, -torch.inf
    for dim in (0, 1):
        check_native(mesh, None, lambda x, d=dim: aten._safe_softmax(x, d), x=x)


@ranks(2)
def test_filling_a_sum_to_be_done(mesh):
    x = values(6, 4)
    for name in ("fill", "masked_fill_sum", "hardswish_", "rsub", "softshrink"):
        check_op(ACTIVATIONS[name], sharded(x, [Partial()]), mesh=mesh)


# ---- a dim that is halved ---------------------------------------------------


@ranks(*ALL)
@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_glu_of_every_cut(mesh, dim):
    check_native(mesh, (4, 10, 6), lambda x: F.glu(x, dim), second_order=True)


@ranks(2, 3)
def test_glu_of_a_dim_that_holds_both_halves_sends_nothing(mesh):
    """(2, 6) merged: every rank has both halves of its rows."""

    def gated(x):
        return F.glu(x.expand(2, 6, 3).reshape(12, 3), 0)

    x = shard(torch.randn(6, 3), mesh, [Shard(0)])
    shardtensor.reset_comm_stats()
    y = gated(x)
    assert shardtensor.comm_stats().exchanges == 0
    assert_close(y, gated(x.full_tensor()))


@ranks(2)
def test_glu_of_an_odd_dim_is_pytorchs_error(mesh):
    with pytest.raises(RuntimeError, match="Halving dimension must be even"):
        F.glu(shard(torch.ones(4, 3), mesh, [Shard(0)]))


@ranks(2, 3)
def test_forward_mode_of_glu(mesh):
    x, dx = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4).double()
    for dim in (0, 1):
        fn = functools.partial(F.glu, dim=dim)
        expected = torch.func.jvp(fn, (x,), (dx,))
        for cut in (0, 1):
            parts = [shard(t, mesh, [Shard(cut)]) for t in (x, dx)]
            actual = torch.func.jvp(fn, (parts[0],), (parts[1],))
            for a, e in zip(actual, expected, strict=True):
                assert_close(a, e)
