"""Norms called by the names that autograd uses, which give their statistics, too."""

import pytest
import rig
import torch
from layouts import check, check_native, image, placements_of
from ranks import assert_close, check_op, ranks, shard, sharded
from torch.distributed.tensor import Shard

aten = torch.ops.aten


NATIVE = {
    "group": lambda x, w: torch.native_group_norm(x, w, w, 3, 4, 30, 2, 1e-5),
    "group_plain": lambda x, w: torch.native_group_norm(
        x, None, None, 3, 4, 30, 4, 1e-5
    ),
    "layer": lambda x, w: torch.native_layer_norm(x, [6, 5], None, None, 1e-5),
    "layer_last": lambda x, w: torch.native_layer_norm(
        x.movedim(1, 3), [4], w, w, 1e-5
    ),
    "layer_backward": lambda x, w: layer_backward(x, [6, 5], None),
    "layer_backward_last": lambda x, w: layer_backward(x.movedim(1, 3), [4], w),
    "batch": lambda x, w: torch.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5),
    "batch_tracked": lambda x, w: torch.native_batch_norm(
        x, w, None, w.detach() * 0, w.detach() ** 2, True, 0.1, 1e-5
    ),
    "batch_evaluated": lambda x, w: torch.native_batch_norm(
        x, w, w, w.detach(), w.detach() ** 2 + 1, False, 0.1, 1e-5
    ),
    "batch_legit": lambda x, w: legit(x, w, True),
    "batch_legit_evaluated": lambda x, w: legit(x, w, False),
    "batch_untracked": lambda x, w: aten._native_batch_norm_legit.no_stats(
        x, w, w, True, 0.1, 1e-5
    ),
    "batch_updated": lambda x, w: with_update(x, w),
}


def layer_backward(x, sizes, w):
    _, mean, rstd = torch.native_layer_norm(x.detach(), sizes, None, None, 1e-5)
    wanted = [True, w is not None, w is not None]
    found = aten.native_layer_norm_backward(x.cos(), x, sizes, mean, rstd, w, w, wanted)
    return found if all(wanted) else found[0]


def legit(x, w, training):
    mean, var = w.detach() * 0, w.detach() ** 2 + 1
    found = aten._native_batch_norm_legit(x, w, w, mean, var, training, 0.1, 1e-5)
    return *found[: 3 if training else 1], mean, var


def with_update(x, w):
    mean, var = w.detach() * 0, w.detach() ** 2 + 1
    return *aten._batch_norm_with_update(x, w, w, mean, var, 0.1, 1e-5)[:3], mean, var


@ranks(2, 3)
def test_running_statistics_of_either_kind(mesh):
    plain = torch.randn(4, dtype=torch.float64)
    mine = shard(image(3, 4, 6, 5).detach(), mesh, [Shard(2)])
    whole = mine.full_tensor()

    def run(x, mean, var):
        aten._batch_norm_with_update(x, plain, plain, mean, var, 0.1, 1e-5)
        return mean, var

    expected = run(whole, plain * 0, plain**2)
    for kinds in ((True, False), (False, True), (True, True)):
        given = [
            shard(t, mesh, [Shard(0)]) if kind else t
            for kind, t in zip(kinds, (plain * 0, plain**2))
        ]
        for found, e in zip(run(mine, *given), expected):
            assert_close(found, e)


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("kind", NATIVE)
def test_native_norms_and_their_statistics(mesh, kind):
    w = torch.randn(4, dtype=torch.float64, requires_grad=True)
    check(mesh, None, NATIVE[kind], w, x=image(3, 4, 6, 5))
    if mesh.ndim == 1:
        check_native(mesh, None, NATIVE[kind], w, x=image(3, 4, 6, 5))
    check_op(
        NATIVE[kind], sharded(image(3, 4, 6, 5), placements_of(mesh, 2)), w,
        mesh=mesh, second_order=True,
    )  # fmt: skip


@ranks(2)
@pytest.mark.parametrize("parameters", [None, torch.bfloat16, torch.float32])
def test_types_of_native_statistics(mesh, parameters):
    x = torch.randn(3, 4, 6, 5, dtype=torch.bfloat16)
    w = None if parameters is None else torch.ones(4, dtype=parameters)
    for norm in (
        lambda x: torch.native_group_norm(x, w, w, 3, 4, 30, 2, 1e-5),
        lambda x: torch.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5),
        lambda x: torch.native_layer_norm(x.movedim(1, 3), [4], w, w, 1e-5),
    ):
        check_op(norm, sharded(x, [Shard(2)]), mesh=mesh, rtol=5e-2, atol=5e-2)


@ranks(2)
def test_statistics_under_autocast(mesh):
    """Of devices in float32 for a layer, which autocast widens, and not for groups."""
    x, w = torch.randn(3, 4, 6, 5).bfloat16(), torch.rand(4).bfloat16()
    part = shard(x, mesh, [Shard(2)])
    for norm in (
        lambda x: torch.native_group_norm(x, w, w, 3, 4, 30, 2, 1e-5),
        lambda x: torch.native_layer_norm(x.movedim(1, 3), [4], w, w, 1e-5),
    ):
        with rig.autocast(torch.bfloat16):
            results, found = norm(x), norm(part)
        for y, expected in zip(found, results, strict=True):
            assert y.dtype == expected.dtype
            assert_close(y, expected, rtol=2e-2, atol=2e-2)
