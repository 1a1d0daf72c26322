"""Random stencils on random layouts. Each case prints its parameters when it
fails; the seed is the test's parameter."""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from ranks import check_op, ranks, sharded
from torch.distributed.tensor import Replicate, Shard

CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MODES = {
    1: ["nearest", "nearest-exact", "linear", "area"],
    2: ["nearest", "nearest-exact", "bilinear", "bicubic", "area"],
    3: ["nearest", "nearest-exact", "trilinear", "area"],
}
CASES = 12


def leaf(*sizes):
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


def cut(draw, extent, pieces):
    """Random cut points, equal ones often."""
    points = sorted(draw.choice([0, extent, *range(extent)]) for _ in range(pieces - 1))
    return [b - a for a, b in zip([0, *points], [*points, extent], strict=True)]


def layout(draw, mesh, sizes):
    """Random placements and piece sizes, spatial dims most of the time."""
    dims = [*range(2, len(sizes))] * 4 + [0, 1]
    chosen = [draw.choice(dims) for _ in range(mesh.ndim)]
    placements = [Shard(d) for d in chosen]
    if mesh.ndim > 1 and draw.random() < 0.2:
        placements[draw.randrange(mesh.ndim)] = Replicate()
    pieces = {}
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            pieces[placement.dim] = pieces.get(placement.dim, 1) * mesh.size(axis)
    return placements, {d: cut(draw, sizes[d], p) for d, p in pieces.items()}


def each(draw, dims, *choices):
    return tuple(draw.choice(choices) for _ in range(dims))


def conv(draw, dims, extents):
    kernel = each(draw, dims, 1, 2, 3, 4, 5)
    dilation = each(draw, dims, 1, 1, 2, 3)
    padding = each(draw, dims, 0, 1, 2, 4)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    padding = tuple(
        max(p, (span - n + 1) // 2)
        for p, span, n in zip(padding, spans, extents, strict=True)
    )
    stride, groups = each(draw, dims, 1, 1, 2, 3), draw.choice([1, 2])
    w = leaf(4, 2 // groups, *kernel)
    b = draw.choice([None, leaf(4)])
    return CONVS[dims], (w, b, stride, padding, dilation, groups)


def conv_transpose(draw, dims, extents):
    kernel, stride = each(draw, dims, 1, 2, 3, 4), each(draw, dims, 1, 2, 3)
    dilation, padding = each(draw, dims, 1, 1, 2), each(draw, dims, 0, 1)
    more = tuple(
        draw.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)
    )
    padding = tuple(
        p if (n - 1) * s + d * (k - 1) + 1 + o > 2 * p else 0
        for p, n, s, d, k, o in zip(
            padding, extents, stride, dilation, kernel, more, strict=True
        )
    )
    groups = draw.choice([1, 2])
    w, b = leaf(2, 4 // groups, *kernel), draw.choice([None, leaf(4)])
    return TRANSPOSED[dims], (w, b, stride, padding, more, groups, dilation)


def pool_window(draw, dims, extents):
    kernel = tuple(min(n, k) for n, k in zip(extents, each(draw, dims, 1, 2, 3, 4)))
    padding = tuple(draw.randrange(k // 2 + 1) for k in kernel)
    return kernel, each(draw, dims, 1, 2, 3), padding


def max_pool(draw, dims, extents):
    kernel, stride, padding = pool_window(draw, dims, extents)
    args = (kernel, stride, padding, 1, draw.choice([False, True]), True)
    return MAX[dims], args


def avg_pool(draw, dims, extents):
    kernel, stride, padding = pool_window(draw, dims, extents)
    ceil_mode, count = draw.choice([False, True]), draw.choice([False, True])
    return AVG[dims], (kernel, stride, padding, ceil_mode, count)


def interpolate(draw, dims, extents):
    mode = draw.choice(MODES[dims])
    smooth = mode.endswith("linear") or mode == "bicubic"
    options = {"align_corners": draw.choice([False, True])} if smooth else {}
    if mode == "area" or draw.random() < 0.5:
        options["size"] = [draw.randint(1, 2 * n) for n in extents]
    else:
        options["scale_factor"] = each(draw, dims, 1.0, 1.4, 2.0, 3.0)
    if dims == 2 and smooth:
        options["antialias"] = draw.choice([False, True])
    return partial(F.interpolate, mode=mode, **options), ()


def pad(draw, dims, extents):
    mode = draw.choice(["constant", "reflect", "replicate", "circular"])
    widths = [draw.randint(-1, n - 1) for n in reversed(extents) for _ in "ab"]
    return F.pad, (widths, mode)


@ranks(1, 2, 3, 4, "2x2", timeout=180)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "make", [conv, conv_transpose, max_pool, avg_pool, interpolate, pad]
)
def test_random_stencils(mesh, make, dims):
    draw = random.Random(f"{make.__name__} {dims}")
    for case in range(CASES):
        torch.manual_seed(case)
        extents = [draw.randint(3, 9) for _ in range(dims)]
        sizes = [draw.randint(1, 2), 2, *extents]
        fn, arguments = make(draw, dims, extents)
        placements, pieces = layout(draw, mesh, sizes)
        shown = [a.shape if isinstance(a, torch.Tensor) else a for a in arguments]
        what = f"case {case}: {fn} {shown} on {sizes}, {placements}, {pieces}"
        try:
            check_op(
                fn,
                sharded(leaf(*sizes), placements, pieces),
                *arguments,
                mesh=mesh,
                second_order=case % 4 == 0,
            )
        except Exception as error:
            raise AssertionError(what) from error
