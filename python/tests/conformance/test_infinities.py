"""Infinities and NaN, in an input or in a gradient, next to a cut or far from it: they
come out where one device has them, as the same ones."""

from functools import partial

import pytest
import rig
import torch
import torch.nn.functional as F
from oracle import WHOLE
from ranks import assert_close, from_spec, ranks, shard
from torch.distributed.tensor import Shard

VALUES = [float("inf"), float("-inf"), float("nan")]
# Not finite in the same places, but inf or NaN: PyTorch's own kernels differ by dtype
# and device. They multiply an infinity by the zeros of a padding or leave these out, as
# ours do with the zeros that stand for rows of others, and they write the sums in
# a norm's gradient as one difference or another.
NOT_FINITE = {
    ("conv", "weight"),
    ("group_norm", "gradient"),
    ("group_norm", "weight"),
    ("layer_norm of all", "gradient"),
}
# Its libraries choose among algorithms by size, each with other sums.
WHERE_A_GPU_LIKES = {("conv", "weight")} if rig.DEVICE == "cuda" else set()
# And in more places, of an input: outputs that are dropped have zeros for gradients.
IN_MORE_PLACES = {("transposed", "weight")}


def interpolated(mode, **how):
    return partial(F.interpolate, mode=mode, **how)


def grid_sampled(x, mode):
    turn = torch.tensor([[[0.9, 0.2, 0.1], [-0.2, 0.9, 0.0]]], dtype=x.dtype)
    grid = F.affine_grid(turn, [1, 2, 12, 5], align_corners=False)
    return F.grid_sample(x, grid, mode=mode, align_corners=False)


def folded(x):
    columns = F.unfold(x, 3, padding=1)
    return F.fold(columns, x.shape[2:], 3, padding=1)


def attended(x):
    heads = x.unflatten(2, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads * 0.5, heads + 1)


LINE, IMAGE, VOLUME, TOKENS = (1, 2, 12), (1, 2, 12, 5), (1, 2, 12, 3, 4), (1, 12, 8)

FAMILIES = {
    "interpolate": {
        "nearest": (LINE, 2, interpolated("nearest", scale_factor=2)),
        "nearest-exact": (LINE, 2, interpolated("nearest-exact", size=17)),
        "linear": (LINE, 2, interpolated("linear", scale_factor=2)),
        "linear 4": (LINE, 2, interpolated("linear", scale_factor=4)),
        "linear 0.5": (LINE, 2, interpolated("linear", scale_factor=0.5)),
        "linear 17": (LINE, 2, interpolated("linear", size=17)),
        "corners": (LINE, 2, interpolated("linear", size=24, align_corners=True)),
        "bilinear": (IMAGE, 2, interpolated("bilinear", scale_factor=2)),
        "bilinear 3": (IMAGE, 2, interpolated("bilinear", scale_factor=3)),
        "bicubic": (IMAGE, 2, interpolated("bicubic", scale_factor=2)),
        "bicubic 0.5": (IMAGE, 2, interpolated("bicubic", scale_factor=0.5)),
        "bicubic corners": (
            IMAGE,
            2,
            interpolated("bicubic", size=(24, 7), align_corners=True),
        ),
        "trilinear": (VOLUME, 2, interpolated("trilinear", scale_factor=2)),
        "area": (IMAGE, 2, interpolated("area", size=(7, 3))),
    },
    "conv": {
        "conv 1d": (LINE, 2, partial(F.conv1d, padding=1), (3, 2, 3)),
        "conv 1d wide": (LINE, 2, partial(F.conv1d, padding=2), (3, 2, 5)),
        "conv 1d valid": (LINE, 2, F.conv1d, (3, 2, 4)),
        "conv 2d": (IMAGE, 2, partial(F.conv2d, padding=1), (3, 2, 3, 3), (3,)),
        "conv 2d stride": (
            IMAGE,
            2,
            partial(F.conv2d, padding=1, stride=2),
            (3, 2, 3, 3),
        ),
        "conv 2d dilated": (
            IMAGE,
            2,
            partial(F.conv2d, padding=2, dilation=2),
            (3, 2, 3, 3),
        ),
        "conv 2d groups": (
            IMAGE,
            2,
            partial(F.conv2d, padding=1, groups=2),
            (4, 1, 3, 3),
        ),
        "conv 3d": (VOLUME, 2, partial(F.conv3d, padding=1), (3, 2, 3, 3, 3)),
        "transposed 1d": (LINE, 2, partial(F.conv_transpose1d, stride=2), (2, 3, 4)),
        "transposed 2d": (
            IMAGE,
            2,
            partial(F.conv_transpose2d, stride=2, padding=1),
            (2, 3, 4, 4),
        ),
        "transposed 2 by 2": (
            IMAGE,
            2,
            partial(F.conv_transpose2d, stride=2),
            (2, 3, 2, 2),
        ),
    },
    "windows": {
        "avg_pool": (
            IMAGE,
            2,
            partial(F.avg_pool2d, kernel_size=3, stride=2, padding=1),
        ),
        "avg_pool 1": (IMAGE, 2, partial(F.avg_pool2d, kernel_size=3, stride=1)),
        "max_pool": (
            IMAGE,
            2,
            partial(F.max_pool2d, kernel_size=3, stride=2, padding=1),
        ),
        "lp_pool": (LINE, 2, partial(F.lp_pool1d, norm_type=2, kernel_size=3)),
        "adaptive": (IMAGE, 2, partial(F.adaptive_avg_pool2d, output_size=(5, 2))),
        "unfold": (IMAGE, 2, partial(F.unfold, kernel_size=3, padding=1)),
        "fold": (IMAGE, 2, folded),
        "grid_sample": (IMAGE, 2, partial(grid_sampled, mode="bilinear")),
        "grid_sample nearest": (IMAGE, 2, partial(grid_sampled, mode="nearest")),
        "reflect": (IMAGE, 2, partial(F.pad, pad=(1, 1, 2, 1), mode="reflect")),
        "circular": (IMAGE, 2, partial(F.pad, pad=(1, 1, 2, 1), mode="circular")),
        "roll": (IMAGE, 2, partial(torch.roll, shifts=3, dims=2)),
        "pixel_shuffle": ((1, 4, 12, 3), 2, partial(F.pixel_shuffle, upscale_factor=2)),
    },
    "statistics": {
        "layer_norm": (TOKENS, 1, partial(F.layer_norm, normalized_shape=(8,))),
        "layer_norm of all": (
            TOKENS,
            1,
            partial(F.layer_norm, normalized_shape=(12, 8)),
        ),
        "group_norm": (
            (2, 4, 12, 3),
            2,
            lambda x, w, b: F.group_norm(x, 2, w, b),
            (4,),
            (4,),
        ),
        "batch_norm": (
            (2, 4, 12, 3),
            2,
            lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
            (4,),
            (4,),
        ),
        "instance_norm": ((2, 4, 12, 3), 2, F.instance_norm),
        "rms_norm": (TOKENS, 1, partial(F.rms_norm, normalized_shape=(8,))),
        "normalize": (TOKENS, 1, partial(F.normalize, dim=1)),
        "softmax": (TOKENS, 1, partial(F.softmax, dim=1)),
        "softmax of a row": (TOKENS, 1, partial(F.softmax, dim=2)),
        "log_softmax": (TOKENS, 1, partial(F.log_softmax, dim=1)),
        "logsumexp": (TOKENS, 1, partial(torch.logsumexp, dim=1)),
        "sum": (TOKENS, 1, partial(torch.sum, dim=1)),
        "mean": (TOKENS, 1, partial(torch.mean, dim=(1, 2))),
        "var": (TOKENS, 1, partial(torch.var, dim=1)),
        "std": (TOKENS, 1, torch.std),
        "amax": (TOKENS, 1, partial(torch.amax, dim=1)),
        "norm": (TOKENS, 1, partial(torch.linalg.vector_norm, dim=1)),
        "prod": (TOKENS, 1, partial(torch.prod, dim=1)),
        "cumsum": (TOKENS, 1, partial(torch.cumsum, dim=1)),
        "cumprod": (TOKENS, 1, partial(torch.cumprod, dim=1)),
        "logcumsumexp": (TOKENS, 1, partial(torch.logcumsumexp, dim=1)),
        "cummax": (TOKENS, 1, lambda x: torch.cummax(x, 1).values),
    },
    "products": {
        "linear": (TOKENS, 1, F.linear, (5, 8), (5,)),
        "contracted": (TOKENS, 1, lambda x, w: x.transpose(1, 2) @ w, (12, 4)),
        "gram": (TOKENS, 1, lambda x: x.transpose(1, 2) @ x),
        "outer": (TOKENS, 1, lambda x: x @ x.transpose(1, 2)),
        "attention": (TOKENS, 1, attended),
        "mse": (TOKENS, 1, lambda x: F.mse_loss(x, x * 2)),
        "relu": (TOKENS, 1, lambda x: F.relu(x) + F.gelu(x)),
        "max": (TOKENS, 1, lambda x: torch.maximum(x, x.flip(1))),
        "sort": (TOKENS, 1, lambda x: x.sort(1).values),
        "index": (TOKENS, 1, lambda x: x[:, torch.tensor([3, 7, 3, 11])]),
    },
}


def pieces_of(mesh):
    return {2: [7, 5], 3: [4, 5, 3]}[mesh.size()]


def cuts_of(sizes):
    return [sum(sizes[:i]) for i in range(1, len(sizes))]


def places(extent, cuts):
    """Rows at both ends, in the middle of a piece, and on both sides of each cut, in a
    whole sweep two on each."""
    beside = 2 if WHOLE else 1
    near = {row for cut in cuts for row in range(cut - beside, cut + beside)}
    return sorted({row for row in near | {0, 2, extent - 1} if 0 <= row < extent})


def rows_of_output(y):
    """The dim that is cut and places along it; of a small output any dim."""
    for dim in range(y.dim()):
        partition = y._spec.partition(dim) if y._spec.is_sharded(dim) else None
        if partition is not None and partition.repeat == 1:
            return dim, places(y.size(dim), cuts_of(partition.sizes))
    return (y.dim() - 1, places(y.shape[-1], [])) if y.dim() else (0, [0])


def with_value(x, dim, row, value):
    x = x.clone()
    at = x.select(dim, row) if x.dim() else x
    at[(0,) * at.dim()] = value
    return x


class Case:
    def __init__(self, mesh, dtype, sizes, dim, fn, *weights):
        self.mesh, self.dim, self.fn = mesh, dim, fn
        self.x = torch.randn(sizes, dtype=dtype)
        self.weights = [torch.randn(w, dtype=dtype) for w in weights]
        y = self.shown(self.x)
        self.grad = torch.randn(y.shape, dtype=y.dtype)
        self.output_dim, self.output_rows = rows_of_output(y)

    def part(self, x):
        return shard(x, self.mesh, [Shard(self.dim)], {self.dim: pieces_of(self.mesh)})

    def shown(self, x):
        return self.fn(self.part(x), *self.weights)

    def given(self):
        """(where, input, gradient of the output) of each call."""
        rows = places(self.x.size(self.dim), cuts_of(pieces_of(self.mesh)))
        outputs = self.output_rows
        for turn, value in enumerate(VALUES):
            for row in rows if WHOLE else rows[turn :: len(VALUES)]:
                x = with_value(self.x, self.dim, row, value)
                yield f"{value} in row {row}", x, self.grad
            for row in outputs if WHOLE else outputs[turn :: len(VALUES)]:
                grad = with_value(self.grad, self.output_dim, row, value)
                yield f"{value} in the gradient of row {row}", self.x, grad

    def results(self, x, grad):
        """(what, sharded, whole)."""
        whole = x.clone().requires_grad_()
        part = self.part(whole)
        own, plain = [[w.clone().requires_grad_() for w in self.weights] for _ in "12"]
        expected, actual = self.fn(whole, *plain), self.fn(part, *own)
        expected.backward(grad)
        actual.backward(from_spec(grad, actual._spec.without_partial()))
        yield "output", actual.detach(), expected.detach()
        yield "gradient", part.grad, whole.grad
        for a, e in zip(own, plain, strict=True):
            yield "weight", a.grad, e.grad


def one_kind(x):
    """Infinities as NaN."""
    return torch.where(x.isfinite(), x, float("nan"))


def assert_alike(name, what, of_input, actual, expected):
    kind = name.split()[0], what
    if kind in WHERE_A_GPU_LIKES:
        known = actual.isfinite() & expected.isfinite()
        actual, expected = actual[known], expected[known]
    if kind in IN_MORE_PLACES and of_input:
        expected = torch.where(actual.isfinite(), expected, float("nan"))
    if kind in NOT_FINITE | IN_MORE_PLACES or (name, what) in NOT_FINITE:
        actual, expected = one_kind(actual), one_kind(expected)
    assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@ranks(2, 3)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.tail)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_not_finite_where_one_device_is(mesh, family, dtype):
    wrong = []
    for name, given in FAMILIES[family].items():
        case = Case(mesh, dtype, *given)
        for where, x, grad in case.given():
            for what, actual, expected in case.results(x, grad):
                try:
                    assert_alike(name, what, grad is case.grad, actual, expected)
                except AssertionError as error:
                    wrong.append(f"{name}: {what}, {where}: {error}")
    assert not wrong, "\n".join(wrong)
