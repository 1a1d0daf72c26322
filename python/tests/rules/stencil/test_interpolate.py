"""Interpolation: modes, sizes, scale factors, up and down."""

from functools import partial
from pathlib import Path

import pytest
import rig
import torch
import torch.nn.functional as F
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

import shardtensor

MODES = ["nearest", "nearest-exact", "linear", "linear corners", "area"]


def leaf(*sizes, dtype=torch.float64):
    return torch.randn(*sizes, dtype=dtype, requires_grad=True)


def options(mode, dims):
    """F.interpolate's arguments for this many dims."""
    name = mode.split()[0]
    if name == "linear":
        name = {1: "linear", 2: "bilinear", 3: "trilinear"}[dims]
    corners = {"align_corners": "corners" in mode}
    smooth = name.endswith("linear") or name == "bicubic"
    antialias = {"antialias": True} if "antialias" in mode else {}
    return {"mode": name, **(corners if smooth else {}), **antialias}


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
def test_sizes_and_cuts(mesh, mode):
    cuts = partitions(7, mesh.size())
    for outputs in [1, 3, 7, 11, 14, 21, 28]:
        for sizes in cuts:
            check_op(
                partial(F.interpolate, size=outputs, **options(mode, 1)),
                sharded(leaf(2, 2, 7), [Shard(2)], {2: sizes}),
                mesh=mesh,
                second_order=sizes == cuts[-1],
            )


@ranks(2, 3)
@pytest.mark.parametrize("mode", [*MODES[:3], "bicubic", "linear antialias"])
def test_scales_that_keep_or_double_an_extent(mesh, mode):
    """Kernels copy or double then, some where one dim, some where all dims say so."""
    x = leaf(1, 2, 10, 5)
    for scale in [(1.04, 2), (1.04, 1.1), (2, 1.1), (2.04, 2.1), (2.04, 0.5), (1, 2.1)]:
        for dim in (2, 3):
            fn = partial(F.interpolate, scale_factor=scale, **options(mode, 2))
            for sizes in partitions(x.size(dim), mesh.size())[-2:]:
                check_op(fn, sharded(x, [Shard(dim)], {dim: sizes}), mesh=mesh)
    if "linear" in mode and "antialias" not in mode:
        fn = partial(F.interpolate, scale_factor=(1.04, 2, 1.1), **options(mode, 3))
        check_op(fn, sharded(leaf(1, 1, 9, 4, 5), [Shard(2)]), mesh=mesh)


@ranks(2, 3)
def test_nearest_rows_that_depend_on_the_kernel(mesh):
    """PyTorch's for small images counts in float, that for large ones in float64."""
    for mode, sizes, size in (
        ("nearest", (9, 72), (12, 116)),
        ("nearest", (72, 9), (116, 12)),
        ("nearest-exact", (19, 60), (39, 95)),
        ("nearest-exact", (20, 17), (54, 1)),
    ):
        fn = partial(F.interpolate, size=size, mode=mode)
        for dim in (2, 3):
            check_op(fn, sharded(leaf(1, 2, *sizes), [Shard(dim)]), mesh=mesh)


@ranks(2, 3)
@pytest.mark.parametrize("mode", MODES[:3])
def test_scale_factors(mesh, mode):
    for scale in [0.5, 0.7, 1.0, 1.5, 2.0, 2.3, 3.0, 4.0]:
        for recompute in [False, True]:
            for sizes in partitions(9, mesh.size()):
                check_op(
                    partial(
                        F.interpolate,
                        scale_factor=scale,
                        recompute_scale_factor=recompute,
                        **options(mode, 1),
                    ),
                    sharded(leaf(1, 2, 9), [Shard(2)], {2: sizes}),
                    mesh=mesh,
                )


@ranks(2, 4, "2x2")
@pytest.mark.parametrize(
    "dims, mode",
    [(dims, mode) for dims in (2, 3) for mode in MODES]
    + [(2, "bicubic"), (2, "bicubic corners")],
)
def test_every_dim_can_be_sharded(mesh, dims, mode):
    layouts = {
        1: [[Shard(d)] for d in range(dims + 2)],
        2: [[Shard(2), Shard(3)], [Shard(3), Shard(2)], [Replicate(), Shard(2)]],
    }[mesh.ndim]
    extents = [6, 5, 4][:dims]
    for placements in layouts:
        for outputs in [[12, 10, 8], [8, 7, 9]]:
            check_op(
                partial(F.interpolate, size=outputs[:dims], **options(mode, dims)),
                sharded(leaf(2, 3, *extents), placements),
                mesh=mesh,
            )


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_and_reduced_precision(mesh, dtype):
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for mode in ["nearest", "linear", "linear corners"]:
        for outputs in [16, 18, 100]:
            check_op(
                partial(F.interpolate, size=outputs, **options(mode, 1)),
                sharded(leaf(1, 2, 8, dtype=dtype), [Shard(2)]),
                mesh=mesh,
                backward=dtype == torch.float32,
                rtol=tolerance,
                atol=tolerance * 4,
            )


@ranks(2, 3)
def test_positions_among_millions_of_rows(mesh):
    """float32 has no halves there: PyTorch's weights are rounded, and so are ours."""
    rows = 5_000_000
    whole = torch.rand(1, 1, rows)
    part = shard(whole, mesh, [Shard(2)])
    for how in (
        {"scale_factor": 2, "mode": "linear"},
        {"size": rows + rows // 7, "mode": "linear"},
        {"size": rows + 1, "mode": "linear", "align_corners": True},
    ):
        x, y = whole.clone().requires_grad_(), part.detach().requires_grad_()
        expected, found = F.interpolate(x, **how), F.interpolate(y, **how)
        assert_close(found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()
        assert_close(y.grad, x.grad, rtol=1e-5, atol=1e-5)


def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


@ranks(2)
@pytest.mark.parametrize("pools", [False, True])
def test_plans_of_millions_of_outputs_are_a_few_numbers(mesh, pools):
    if rig.DEVICE != "cpu":
        pytest.skip("a device's operators get tables of rows")
    x = shard(torch.ones(1, 1, 2_000_000), mesh, [Shard(2)])
    outputs = 3_000_001  # of which a rank has 6 MiB; PyTorch's own tables have 70
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    if pools:
        F.adaptive_avg_pool1d(x, outputs)
    else:
        F.interpolate(x, outputs, mode="linear")
    assert resident("VmHWM") - before < (20 if pools else 90)


@ranks(2)
def test_an_evaluation_before_the_training(mesh):
    """What a device keeps of a plan serves both."""
    x = shard(leaf(1, 2, 7, 5), mesh, [Shard(2)])
    for resize in (
        partial(F.adaptive_avg_pool2d, output_size=3),
        partial(F.interpolate, size=(10, 6), mode="bilinear"),
    ):
        with torch.inference_mode():
            resize(x)
        resize(x).sum().backward()


@ranks(2)
def test_images_of_bytes(mesh):
    x = (torch.rand(1, 3, 8, 8) * 255).to(torch.uint8)
    for mode in ["nearest", "bilinear"]:
        check_op(
            partial(F.interpolate, size=[13, 16], mode=mode),
            sharded(x, [Shard(2)]),
            mesh=mesh,
        )


@ranks(2)
def test_doubling_multiplies_the_cuts(mesh):
    x = shard(torch.randn(1, 2, 9, 4), mesh, [Shard(2)], {2: [6, 3]})
    y = F.interpolate(x, scale_factor=2, mode="bilinear")
    assert y._spec.partition(2).sizes == [12, 6]
    assert F.interpolate(y, scale_factor=0.5)._spec.partition(2).sizes == [6, 3]


def nodes(grad_fn):
    """The names of all nodes of a graph."""
    found, todo = set(), [grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return {node.name() for node in found}


@ranks(2, 3, "2x2")
@pytest.mark.parametrize(
    "mode, scale", [("linear", 2), ("linear", 4), ("bicubic", 0.5), ("bicubic", 2)]
)
def test_owned_rows_give_all_outputs(mesh, mode, scale):
    """Where none has to be dropped, forward, backward and double backward."""
    dims = 2 if mode == "bicubic" else 1
    placements = [Shard(2), Shard(1)][: mesh.ndim]
    pieces = {2: [8, 4], 3: [8, 4, 6]}[mesh.size(0)]

    def enlarge(x):
        return F.interpolate(x, scale_factor=scale, **options(mode, dims)).square()

    x = leaf(2, 4, sum(pieces), *[5] * (dims - 1))
    check_op(
        enlarge,
        sharded(x, placements, {2: pieces}),
        mesh=mesh,
        second_order=True,
    )
    y = enlarge(shard(x, mesh, placements, {2: pieces}))
    assert "ShardTensorUpsampleBackward" in nodes(y.grad_fn)


@ranks("2x2")
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_weighted_dim_beside_one_that_owned_rows_give(mesh, mode):
    """The second dim gathers nothing here: each piece reads the rows it owns."""
    check_op(
        partial(F.interpolate, scale_factor=(2, 0.6), mode=mode),
        sharded(leaf(1, 2, 8, 5), [Shard(2), Shard(3)], {2: [4, 4], 3: [2, 3]}),
        mesh=mesh,
        second_order=True,
    )


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "bicubic corners"])
def test_antialiasing_reads_what_its_filter_covers(mesh, mode):
    """Any sizes, down (where a filter covers many rows) and up."""
    x = leaf(1, 2, 16, 11)
    layouts = [[Shard(2)], [Shard(3)]]
    if mesh.ndim == 2:
        layouts = [[Shard(2), Shard(3)], [Replicate(), Shard(3)], [Shard(0), Shard(2)]]
    interpolate = partial(F.interpolate, **options(f"{mode} antialias", 2))
    with shardtensor.fallback_mode("error"):
        for placements in layouts:
            for sizes in [(8, 5), (16, 4), (3, 11), (32, 13)]:
                fn = partial(interpolate, size=sizes)
                check_op(fn, sharded(x, placements), mesh=mesh, second_order=True)
            for scale in [(0.5, 0.25), (0.97, 0.3), (2, 1.3)]:
                fn = partial(interpolate, scale_factor=scale)
                check_op(fn, sharded(x, placements), mesh=mesh)
    column = partial(interpolate, size=(7, 1))
    check_op(column, sharded(x, layouts[0]), mesh=mesh)  # which PyTorch gets wrong
    uneven = sharded(x, [Shard(2)] * mesh.ndim, {2: [13, 1, 2, 0][: mesh.size()]})
    if mesh.size() in (3, 4):
        check_op(partial(interpolate, size=(5, 7)), uneven, mesh=mesh)


@ranks(2)
def test_antialiasing_spreads_an_infinity_no_further_than_one_device(mesh):
    whole = torch.ones(1, 1, 20, 6)
    whole[..., 9, 2] = torch.inf
    x = shard(whole, mesh, [Shard(2)])
    for sizes in [(10, 3), (7, 6), (20, 4), (30, 9)]:
        for mode in ("bilinear", "bicubic"):
            options = {"size": sizes, "mode": mode, "antialias": True}
            found = F.interpolate(x, **options).full_tensor()
            assert_close(found, F.interpolate(whole, **options))


@ranks(2)
def test_wrong_arguments_raise_pytorchs_errors(mesh):
    x = shard(torch.randn(1, 2, 8), mesh, [Shard(2)])
    with pytest.raises(RuntimeError, match="sizes should be greater than 0"):
        F.interpolate(x, 0)
    with pytest.raises(ValueError, match="expected 1 output sizes"):
        torch.ops.aten.upsample_nearest1d(x, [3, 4])
