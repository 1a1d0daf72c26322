"""Operators of PyTorch's derivative formulas, which torch.func meets: they gather
nothing, and they have derivatives."""

import pytest
import rig
import torch
import torch.nn.functional as F
from layouts import placements_of
from ranks import assert_close, check_op, partitions, ranks, shard, sharded

import shardtensor

SEQUENCE, IMAGE, VOLUME = (2, 4, 6), (2, 4, 6, 5), (1, 2, 5, 4, 6)


def interpolated(mode, **how):
    return lambda x: F.interpolate(x, scale_factor=1.7, mode=mode, **how)


def normed(training):
    statistics = torch.linspace(-1, 1, 4).double(), torch.linspace(1, 2, 4).double()
    return lambda x, weight, bias: F.batch_norm(
        x, *(x.clone() for x in statistics), weight, bias, training
    )


CALLS = {
    "conv1d": (SEQUENCE, lambda x, w, b: F.conv1d(x, w, b, 2, 1), (3, 4, 3), (3,)),
    "conv2d": (IMAGE, lambda x, w: F.conv2d(x, w, None, 1, 2, 2, 2), (2, 2, 3, 2)),
    "conv3d": (VOLUME, lambda x, w, b: F.conv3d(x, w, b), (1, 2, 2, 2, 3), (1,)),
    "conv_transpose2d": (
        IMAGE, lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1), (4, 2, 3, 3), (2,),
    ),
    "batch_norm": (IMAGE, normed(True), (4,), (4,)),
    "batch_norm, evaluated": (IMAGE, normed(False), (4,), (4,)),
    "instance_norm": (IMAGE, F.instance_norm),
    "avg_pool2d": (IMAGE, lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "avg_pool3d": (VOLUME, lambda x: F.avg_pool3d(x, 2)),
    "max_pool1d": (SEQUENCE, lambda x: F.max_pool1d(x, 3, 2, 1)),
    "max_pool3d": (VOLUME, lambda x: F.max_pool3d(x, 2)),
    "adaptive_avg_pool2d": (IMAGE, lambda x: F.adaptive_avg_pool2d(x, (4, 3))),
    "adaptive_avg_pool3d": (VOLUME, lambda x: F.adaptive_avg_pool3d(x, 2)),
    "adaptive_max_pool2d": (IMAGE, lambda x: F.adaptive_max_pool2d(x, (4, 3))),
    "adaptive_max_pool3d": (VOLUME, lambda x: F.adaptive_max_pool3d(x, 2)),
    "reflection_pad1d": (SEQUENCE, lambda x: F.pad(x, (2, 1), "reflect")),
    "reflection_pad2d": (IMAGE, lambda x: F.pad(x, (2, 1, 0, 2), "reflect")),
    "replication_pad3d": (VOLUME, lambda x: F.pad(x, (1,) * 6, "replicate")),
    "nearest": (IMAGE, interpolated("nearest")),
    "nearest-exact": (SEQUENCE, interpolated("nearest-exact")),
    "linear": (SEQUENCE, interpolated("linear")),
    "bilinear": (IMAGE, interpolated("bilinear", align_corners=True)),
    "trilinear": (VOLUME, interpolated("trilinear")),
    "bicubic": (IMAGE, interpolated("bicubic")),
    "antialias": (IMAGE, interpolated("bilinear", antialias=True)),
}  # fmt: skip
# Their third derivative on one device takes the statistics for constants.
WITHOUT_THIRD = {"batch_norm", "instance_norm"}


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", CALLS)
def test_gradients_by_torch_func(mesh, name):
    shape, call, *shapes = CALLS[name]
    x, *weights = (
        torch.randn(s, dtype=torch.float64, requires_grad=True)
        for s in (shape, *shapes)
    )
    arguments = tuple(range(1 + len(weights)))
    gradients = torch.func.grad(lambda *all: call(*all).sin().sum(), arguments)
    shardtensor.set_fallback_mode("error")
    for dim in 0, 2:
        for sizes in partitions(shape[dim], mesh.size()):
            cut = sharded(x, placements_of(mesh, dim), {dim: sizes})
            twice = name not in WITHOUT_THIRD
            check_op(gradients, cut, *weights, mesh=mesh, second_order=twice)


@ranks(2, 3)
def test_batch_norms_of_gpus(mesh):
    """Of cuDNN, which no CPU has: the same numbers as other batch norms."""
    x, scale, bias = (torch.randn(s).double() for s in (IMAGE, 4, 4))
    mean, var = torch.randn(4).double(), torch.rand(4).double()

    def by_cudnn(training, *given):
        return torch.cudnn_batch_norm(*given, mean, var, training, 0.0, 1e-5)

    def sines(norm, training):
        return lambda *given: norm(training, *given).sin().sum()

    shardtensor.set_fallback_mode("error")
    for training in True, False:
        of_shards = sines(lambda *given: by_cudnn(*given)[0], training)
        of_one = sines(
            lambda training, x, *weights: F.batch_norm(
                x, mean, var, *weights, training, 0.0
            ),
            training,
        )
        for sizes in partitions(6, mesh.size()):
            cut = shard(x, mesh, placements_of(mesh, 2), {2: sizes})
            found = torch.func.grad(of_shards, (0, 1, 2))(cut, scale, bias)
            expected = torch.func.grad(of_one, (0, 1, 2))(x, scale, bias)
            for a, e in zip(found, expected):
                assert_close(a, e)
        _, mean_of_it, rstd, reserve = by_cudnn(training, cut, scale, bias)
        assert mean_of_it.shape == rstd.shape == ((4,) if training else (0,))
        assert reserve.dtype == torch.uint8


@ranks(2, "2x2")
def test_gradients_of_a_plain_tensor(mesh):
    """That meets a ShardTensor behind the operator."""
    x, y = torch.randn(IMAGE).double(), torch.randn(2, 4, 3, 2).double()
    for call in (
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.interpolate(x, (3, 2)),
        lambda x: F.adaptive_max_pool2d(x, (3, 2)),
        lambda x: F.conv2d(x, x[0, 0, :1, :1].expand(4, 1, 2, 2), stride=2, groups=4),
    ):
        gradient = torch.func.grad(lambda x, y, call=call: (call(x) * y).sum())
        for sizes in partitions(3, mesh.size()):
            cut = sharded(y, placements_of(mesh, 2), {2: sizes})
            check_op(gradient, x, cut, mesh=mesh)


@ranks(2)
@pytest.mark.parametrize("mode", ["inference", "autocast"])
def test_called_in_other_modes(mesh, mode):
    x, weight = torch.randn(IMAGE), torch.randn(3, 4, 3, 3)
    modes = {
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast(rig.DEVICE, torch.bfloat16),
    }
    same = ([3], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3)

    def call(x, w):
        y = F.conv2d(x, w, padding=1).detach()
        with modes[mode]():
            return torch.ops.aten.convolution_backward(y, x + 0, w + 0, *same)

    shardtensor.set_fallback_mode("error")
    cut = sharded(x, placements_of(mesh, 2), {2: [5, 1]})
    check_op(call, cut, weight, mesh=mesh, backward=False)


@ranks(2)
def test_gradients_per_sample(mesh):
    """As differential privacy wants them, of samples whose images are cut."""
    x, weight = torch.randn(IMAGE).double(), torch.randn(3, 4, 3, 3).double()
    of_one = torch.func.grad(lambda w, x: F.conv2d(x, w, padding=1).square().sum())
    shardtensor.set_fallback_mode("error")
    cut = sharded(x, placements_of(mesh, 2), {2: [5, 1]})
    check_op(torch.func.vmap(of_one, (None, 0)), weight, cut, mesh=mesh)
