"""Function-level rules beside torch.func, whose tensors pass them by, and beside
plain tensors that want a gradient."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Shard
from torch.testing._internal.logging_tensor import LoggingTensor

CASES = {
    "conv1d": ((3, 4, 3), lambda x, w: F.conv1d(x, w, padding=1)),
    "conv1d same": ((3, 4, 3), lambda x, w: F.conv1d(x, w, padding="same")),
    "conv_transpose1d": ((4, 3, 2), lambda x, w: F.conv_transpose1d(x, w, stride=2)),
    "convolution": (
        (3, 4, 3),
        lambda x, w: torch.convolution(x, w, None, [1], [1], [1], False, [0], 1),
    ),
    "group_norm": ((4,), lambda x, w: F.group_norm(x, 2, w)),
    "layer_norm": ((9,), lambda x, w: F.layer_norm(x, (9,), w)),
    "rms_norm": ((9,), lambda x, w: F.rms_norm(x, (9,), w)),
    "batch_norm": (
        (4,),
        lambda x, w: F.batch_norm(x, None, None, w, training=True),
    ),
    "instance_norm": ((4,), lambda x, w: F.instance_norm(x, weight=w)),
    "linear": ((2, 9), lambda x, w: F.linear(x, w)),
    "mse_loss": ((2, 4, 9), lambda x, w: F.mse_loss(x, w)),
}


@ranks(2, 3)
@pytest.mark.parametrize("name", CASES)
def test_a_transformed_weight_meets_a_sharded_input(mesh, name):
    shape, fn = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, dtype=torch.float64)
    w = torch.randn(shape, dtype=torch.float64)

    def loss(w, x):
        return (fn(x, w) ** 3).sum()

    expected = torch.func.grad(loss)(w, x)
    for sizes in partitions(9, mesh.size()):
        part = shard(x, mesh, [Shard(2)], {2: sizes})
        assert_close(torch.func.grad(loss)(w, part), expected)


def differences(x):
    d = torch.zeros_like(x)
    d[..., 1:-1] = x[..., 2:] - x[..., :-2]
    d[..., 0] = x[..., 1]
    return d * x


def turned(x):
    """Rows of a tensor that does not lie row by row."""
    z = torch.empty_like(x.mT).copy_(x.mT.square())
    z[:, 2:] *= x.mT[:, :-2]
    z.permute(2, 0, 1)[1, :, 2:] += 1
    z.mT[0, 1, ::2] = x[1, 1, 1::2].repeat(2)[:5]
    return z


WRITTEN = {
    "differences": differences,
    "turned": turned,
    "circular": lambda x: F.pad(x, (2, 1), mode="circular").square(),
    "half spectrum": lambda x: torch.fft.rfft(x).abs().square(),
}


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", WRITTEN)
def test_a_transform_sees_what_is_written(mesh, name):
    fn = WRITTEN[name]
    pair = torch.randn(2, 2, 4, 9, dtype=torch.float64)

    def curvature(x, direction):
        def gradient(x):
            return torch.func.grad(lambda x: (fn(x) ** 3).sum())(x)

        return torch.func.jvp(gradient, (x,), (direction,))

    expected = curvature(*pair)
    placements = [Shard(2), Shard(1)][: mesh.ndim]
    for sizes in partitions(9, mesh.size(0)):
        parts = [shard(x, mesh, placements, {2: sizes}) for x in pair]
        for ours, one_device in zip(curvature(*parts), expected, strict=True):
            assert_close(ours, one_device)


def in_place(fn):
    return lambda *tensors: fn(tensors[0].clone(), *tensors[1:])


def filled(mask, x, value):
    return x.masked_fill(mask > 0, value)


BESIDE = {
    "masked_fill": ((), lambda x, v: filled(x, x, v)),
    "masked_fill of": ((4, 9), lambda x, v: filled(x, v, 2.0)),
    "masked_fill_": ((), in_place(lambda x, v: x.masked_fill_(x > 0, v))),
    "copysign": ((9,), torch.copysign),
    "copysign of": ((4, 9), lambda x, v: torch.copysign(v, x)),
    "nextafter": ((9,), torch.nextafter),
    "cross_entropy": (
        (9,),
        lambda x, v: F.cross_entropy(x, x.detach().softmax(1), v),
    ),
    "cross_entropy of": ((4, 9), lambda x, v: F.cross_entropy(v, x.softmax(1))),
    "segment_reduce of": (
        (4, 9),
        lambda x, v: torch.segment_reduce(
            v, "sum", lengths=(x[:, 0] > 99).long() + 1, unsafe=True
        ),
    ),
    "stft of": (
        (9,),
        lambda x, v: torch.stft(
            v, 4, window=x[0, :4], center=False, return_complex=True
        ).abs(),
    ),
}


@ranks(2)
@pytest.mark.parametrize("name", BESIDE)
def test_a_plain_tensor_gets_a_plain_gradient(mesh, name):
    shape, fn = BESIDE[name]
    torch.manual_seed(0)
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    v = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for dim in (0, 1):
        check_op(fn, sharded(x, [Shard(dim)]), v, mesh=mesh)


WRITES = {
    "itself": lambda zeros: zeros.fill_(3),
    "random": lambda zeros: zeros.random_(7, 8),
    "row": lambda zeros: zeros[1].bernoulli_(1.0),
    "detach": lambda zeros: zeros.detach().add_(1),
    "diagonal": lambda zeros: zeros.diagonal().fill_(1),
    "select": lambda zeros: zeros[1].fill_(2),
    "slice": lambda zeros: zeros[:, 1:].add_(3),
    "step": lambda zeros: zeros[::2].mul_(0).add_(1),
    "view": lambda zeros: zeros.view(-1)[2:].copy_(torch.arange(10.0)),
    "reshape": lambda zeros: zeros.view(2, 6).view(12).view(6, 2)[3:].fill_(4),
    "transposed": lambda zeros: zeros.t().movedim(0, 1).mT[1].fill_(1),
    "unsqueezed": lambda zeros: zeros.unsqueeze(1).squeeze(1)[2].add_(1),
    "split": lambda zeros: zeros.split(3)[1].add_(1),
    "unbound": lambda zeros: zeros.unbind(1)[2].add_(1),
    "chunk": lambda zeros: zeros.tensor_split(3)[1].fill_(5),
    "windows": lambda zeros: zeros.unfold(0, 2, 2)[1].fill_(1),
    "complex": lambda zeros: torch.view_as_complex(zeros.view(6, 2))[1:].fill_(2 + 1j),
    "bytes": lambda zeros: zeros.view(torch.int32)[1].fill_(7),
    "index": lambda zeros: zeros[1:].index_fill_(0, torch.tensor([1]), 1),
    "base": lambda zeros: (lambda row: (zeros.fill_(2), zeros[3].sub_(row)))(zeros[0]),
}


@ranks(2, 3)
def test_zeros_are_written_through_views_past_the_function_level(mesh):
    sizes = {0: partitions(5, mesh.size())[-1]}
    x = shard(torch.ones(5, 3), mesh, [Shard(0)], sizes)
    seen = LoggingTensor(x)
    for name, write in WRITES.items():
        expected = torch.zeros(4, 3)
        write(expected)
        zeros = {
            "made inside": seen.new_zeros(4, 3),
            "made outside": LoggingTensor(x.new_zeros(4, 3)),
        }
        outer = x.new_zeros(6, 3)
        zeros["viewed outside"] = LoggingTensor(outer[2:])
        for place, target in zeros.items():
            write(target)
            assert_close(target.elem, expected, what=f"{name}, {place}")
        assert outer.sum().item() == expected.sum().item()


FIRST_CALL = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.logging_tensor import LoggingTensor
from shardtensor import Shard, ShardTensor

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
whole = torch.arange(12.0).view(4, 3)
mesh = init_device_mesh("cpu", (1,))
x = LoggingTensor(ShardTensor.from_local(whole, mesh, [Shard(0)]))
for _ in range(2):  # the first call registers what the second finds
    result = getattr(x, sys.argv[1])(0).elem
assert isinstance(result, ShardTensor)
assert torch.equal(result.to_local(), getattr(whole, sys.argv[1])(0))
"""


@pytest.mark.parametrize("name", ["sum", "mean", "cumsum"])
def test_a_processs_first_call_may_leave_the_function_level_out(name):
    command = [sys.executable, "-c", FIRST_CALL, name]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
