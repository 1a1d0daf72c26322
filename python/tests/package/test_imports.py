"""What is imported, and when: nobody waits for what they do not use."""

import subprocess
import sys

import pytest
import rig
import torch
import torch.nn.functional as F
from oracle import WHOLE
from programs import ROOT
from ranks import run_isolated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardtensor

PRELOAD = ()

IMPORT = """
import os, sys, torch, torch.distributed
def functions():
    return {
        f"{owner}.{name}": function
        for module in (torch.nn, torch.nn.parallel)
        for owner, value in vars(module).items() if isinstance(value, type)
        for name, function in vars(value).items() if callable(function)
    }
before = functions()
modules, threads = set(sys.modules), len(os.listdir("/proc/self/task"))
files = os.listdir("/proc/self/fd")
import shardtensor
added = {name for name in set(sys.modules) - modules if "shardtensor" not in name}
assert len(added) < 20, sorted(added)
assert not any("sympy" in name or "numpy" in name for name in added), sorted(added)
assert "torch.distributed.tensor" not in sys.modules
assert len(os.listdir("/proc/self/task")) == threads
assert os.listdir("/proc/self/fd") == files
after = functions()
replaced = sorted(name for name in after if after[name] is not before.get(name))
assert replaced == [
    "DistributedDataParallel.__init__",
    "SyncBatchNorm.forward",
    "TransformerEncoder.forward",
]
assert shardtensor.Shard is torch.distributed.tensor.Shard
"""


def test_importing_is_quick_and_silent_and_starts_nothing():
    """torch.distributed.tensor, which brings sympy, would take a second."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT],
        cwd=ROOT / "python",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


RELOAD = """
import importlib, sys, torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
import shardtensor
importlib.reload(shardtensor)
if len(sys.argv) > 1:
    for name in [name for name in sys.modules if name.startswith("shardtensor")]:
        del sys.modules[name]
    import shardtensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = shardtensor.init_device_mesh("cpu", (1,))
x = shardtensor.distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])
x.requires_grad_()
y = torch.nn.Linear(3, 2)(x).sum()
y.backward()
assert type(y) is type(x.grad) is shardtensor.ShardTensor
"""


@pytest.mark.parametrize("again", [(), ("again",)])
def test_the_package_may_be_reloaded(again):
    done = subprocess.run(
        [sys.executable, "-c", RELOAD, *again],
        cwd=ROOT / "python",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# ---- no operator imports the compiler ---------------------------------------
# Many of PyTorch's Meta kernels do, which are written in Python.

I = torch.tensor([3, 0, 3])  # noqa: E741
PLAIN = torch.rand(5, 4)
CLASSES = torch.tensor([0, 3, 1, 1, 2])

OPERATORS = {
    "arithmetic": lambda x: -(x + 1) * x / 3 - x**2 + 2 / (x + 2) % 3,
    "in place": lambda x: (x * 1).add_(x).mul_(2).div_(3).sub_(x[:1]).clamp_(0, 1),
    "functions": lambda x: x.sin().exp().sigmoid().tanh().sqrt().log1p().abs(),
    "activations": lambda x: sum(
        f(x)
        for f in (
            F.relu, F.gelu, F.silu, F.mish, F.elu, F.softplus, F.hardswish,
            F.hardtanh, F.leaky_relu, F.logsigmoid,
        )
    ),
    "compare": lambda x: x[(x > 0.5) & ~x.isnan()],
    "choose": lambda x: torch.where(x > 0.5, x, PLAIN).lerp(PLAIN, 0.3),
    "masks": lambda x: x.masked_fill(x > 0.5, 0.0).masked_scatter(PLAIN > 0.5, PLAIN),
    "broadcast": lambda x: x.unsqueeze(0) + PLAIN[0] + x[:, :1] + torch.tensor(2.0),
    "copy": lambda x: torch.zeros_like(x).copy_(x).clone().contiguous().to(torch.half),
    "factories": lambda x: [x.new_zeros(3), torch.full_like(x, 2.0), x],
    "sums": lambda x: x.sum() + x.mean() + x.sum(0).mean() + x.prod(1).mean(0),
    "norms of vectors": lambda x: x.norm() + x.norm(1, 0).sum() + x.logsumexp(0).sum(),
    "moments": lambda x: x.var() + x.std(0).sum() + torch.var_mean(x, 1)[0].sum(),
    "extremes": lambda x: x.max() + x.amin(0).sum() + x.max(1)[0].sum() + x.argmax(0),
    "any": lambda x: [(x > 0).all(), (x > 0).any(0), x.count_nonzero(), x.nansum()],
    "softmax": lambda x: x.softmax(0) + x.log_softmax(1) + x.softmax(1),
    "scans": lambda x: x.cumsum(0) + x.cumprod(1) + x.logcumsumexp(0) + x.cummax(1)[0],
    "sorts": lambda x: [x.sort(0)[0], x.topk(2, 0), x.kthvalue(2, 0), x.median(0)[0]],
    "more along a dim": lambda x: [x.mode(0)[0], x.renorm(2, 0, 0.1), x.diff(dim=0)],
    "searches": lambda x: [
        torch.searchsorted(torch.arange(4.0), x.detach()),
        torch.bucketize(x.detach(), torch.arange(4.0)),
        torch.isin(x.detach(), PLAIN),
    ],
    "reading": lambda x: [x[I], x[:, I], x[I, I], x.index_select(0, I), x.take(I)],
    "rows": lambda x: x.gather(0, I.view(3, 1).expand(3, 4)),
    "writing": lambda x: (x * 1)
    .index_add(0, I, PLAIN[:3])
    .index_fill(0, I, 2.0)
    .index_copy(0, I[:2], PLAIN[:2])
    .index_put((I,), PLAIN[0])
    .scatter(0, I.view(3, 1).expand(3, 4), x[:3])
    .scatter_add(0, I.view(3, 1).expand(3, 4), x[:3])
    .scatter_reduce(0, I.view(3, 1).expand(3, 4), x[:3], "amax"),
    "views": lambda x: x.t().reshape(2, 10).unflatten(1, (5, 2)).movedim(0, 1)[1:, 0],
    "join": lambda x: torch.stack([torch.cat([x, x * 2]), torch.cat([PLAIN, x])]),
    "repeat": lambda x: x.repeat(2, 1).roll(1, 0).flip(0).tril().triu(-3),
    "split": lambda x: [*x.split(2), *x.unbind(1), x.diagonal(), x.unfold(0, 2, 1)],
    "products": lambda x: [
        x @ x.t(), x.t() @ PLAIN, x.mv(PLAIN[0]), x[0].dot(x[1]), x[0].outer(x[1]),
        torch.addmm(PLAIN[:, :1], x, x.t()), torch.addmv(PLAIN[:, 0], x, PLAIN[0]),
        torch.addr(PLAIN, PLAIN[:, 0], x[0]), torch.vdot(x[0], x[1]),
        torch.baddbmm(PLAIN, x.unsqueeze(0), x.t()[:, :4].unsqueeze(0)),
        torch.einsum("ij,kj->ik", x, PLAIN),
    ],
    "linear": lambda x: F.bilinear(x, x, torch.rand(3, 4, 4)) + F.linear(x, PLAIN[:3]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "losses": lambda x: [
        loss(x.sigmoid(), PLAIN, reduction=reduction)
        for loss in (
            F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
            F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
            F.soft_margin_loss, F.poisson_nll_loss,
        )
        for reduction in ("none", "mean", "sum")
    ],
    "class losses": lambda x: [
        F.cross_entropy(x, CLASSES),
        F.cross_entropy(x, CLASSES, label_smoothing=0.1),
        F.nll_loss(x.log_softmax(1), CLASSES, reduction="none"),
    ],
    "random": lambda x: [
        F.dropout(x), F.alpha_dropout(x), torch.rand_like(x), x.detach().bernoulli(),
        (x * 1).normal_(), (x * 1).uniform_(), torch.randint_like(x, 9),
    ],
    "embedding": lambda x: F.embedding(I, x),
    "gates": lambda x: F.glu(x, 1) + F.prelu(x, torch.ones(1))[:, :2],
    "spectra": lambda x: [torch.fft.irfft2(torch.fft.rfft2(x)), torch.fft.hfft(x)],
    "distances": lambda x: [torch.cdist(x.detach(), PLAIN), F.pdist(x.detach())],
    "quantiles": lambda x: x.quantile(0.3, 0),
    "matrices": lambda x: torch.linalg.inv(x.t() @ x + torch.eye(4)),
    "native norms": lambda x: [
        torch.native_layer_norm(x, (4,), None, None, 1e-5)[0],
        torch.native_group_norm(x[None], None, None, 1, 5, 4, 1, 1e-5)[0],
    ],
    "heads": lambda x: nn.MultiheadAttention(4, 2)(x, x, x)[0],
    "recurrent": lambda x: nn.LSTM(4, 3)(x)[0],
    "neighbours": lambda x: shardtensor.nn.functional.knn(x, x * 0.9, 2)[1],
    "windows": lambda x: shardtensor.nn.functional.neighborhood_attention(
        *[x[None, :, None]] * 3, kernel_size=3
    ),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x) * 1j).abs(),
}  # fmt: skip

ON_VOLUMES = {
    "conv": nn.Conv2d(4, 4, 3, padding=1),
    "strided": nn.Conv2d(4, 4, 3, 2, padding=1, padding_mode="circular"),
    "transposed": nn.ConvTranspose2d(4, 4, 2, 2),
    "max_pool": nn.MaxPool2d(2),
    "avg_pool": nn.AvgPool2d(3, 2, 1),
    "adaptive_avg": nn.AdaptiveAvgPool2d(3),
    "adaptive_max": nn.AdaptiveMaxPool2d(3),
    "nearest": nn.Upsample(scale_factor=2),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "area": lambda x: F.interpolate(x, 7, mode="area"),
    "bicubic": lambda x: F.interpolate(x, 7, mode="bicubic"),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)) + F.pad(x, (1, 2, 0, 1), "reflect"),
    "pixel_shuffle": nn.PixelShuffle(2),
    "unfold": lambda x: F.fold(F.unfold(x, 3, padding=1), (8, 6), 3, padding=1),
    "grid_sample": lambda x: F.grid_sample(
        x, x[:, :2].movedim(1, -1), align_corners=False
    ),
    "local_response": nn.LocalResponseNorm(3),
    "group": nn.GroupNorm(2, 4),
    "batch": nn.BatchNorm2d(4),
    "instance": nn.InstanceNorm2d(4, affine=True),
    "layer": nn.LayerNorm(6),
    "rms": nn.RMSNorm(6),
    "channels": nn.Dropout2d(),
}


# PyTorch 2.11 knows no second derivative of it.
ONCE = [ON_VOLUMES["grid_sample"]] if torch.__version__ < "2.12" else []


def differentiate(fn, x):
    """fn, its gradients and those of a gradient."""
    outputs = torch.utils._pytree.tree_leaves(fn(x))
    outputs = [y.float().sum() for y in outputs if y.requires_grad]
    if outputs:
        (gradient,) = torch.autograd.grad(sum(outputs), x, create_graph=True)
        if gradient.requires_grad and fn not in ONCE:
            gradient.square().sum().backward()


def run_everything():
    shardtensor.set_fallback_mode("silent")
    mesh = init_device_mesh("cpu", (2,))
    assert "torch._dynamo" not in sys.modules
    for shape, table in (((5, 4), OPERATORS), ((2, 4, 8, 6), ON_VOLUMES)):
        for name, fn in table.items():
            for dim in (0, -1) if WHOLE else (0,):
                x = shardtensor.distribute_tensor(
                    torch.rand(shape), mesh, [Shard(dim % len(shape))]
                )
                differentiate(fn, x.requires_grad_())
                assert "torch._dynamo" not in sys.modules, f"{name} imports it"


@pytest.mark.skipif(rig.DEVICE == "cuda", reason="its tensors are on the CPU")
def test_no_operator_and_no_backward_imports_the_compiler():
    for outcome in run_isolated(2, run_everything):
        assert outcome.kind == "ok", outcome.text
