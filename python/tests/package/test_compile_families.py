"""torch.compile(fullgraph=True) over every family of rules: values and gradients are
those of one device, whatever the layout, called again with another one."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from oracle import every
from ranks import assert_close, from_spec, ranks, uneven
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._pytree import tree_leaves

import shardtensor
from shardtensor import make_spec

PRELOAD = ("torch._inductor.compile_fx",)

# Of each family: functions of one tensor and weights; the shape of that tensor and
# the shapes of the weights, which stay plain.
FAMILIES = {}


def family(shape, *weights):
    def register(functions):
        FAMILIES[functions.__name__] = (functions(), shape, weights)
        return functions

    return register


IMAGE = (2, 4, 6, 5)
WORDS = (4, 6, 8)


@family(WORDS, (8,))
def pointwise():
    return [
        lambda x, w: (x * w + 1).sin(),
        lambda x, w: torch.where(x > 0, x, x.exp()),
        lambda x, w: x.clamp(-1, 1) - x.abs().sqrt(),
        lambda x, w: torch.addcmul(x, x, w, value=2),
        lambda x, w: torch.lerp(x, x.cos(), 0.3) + x.pow(3),
        lambda x, w: torch.maximum(x, w),
        lambda x, w: x.masked_fill(x > 1, 0.0),
        lambda x, w: (x > 0).double() * x.to(torch.complex128).real,
        lambda x, w: torch.complex(x, x * 2).abs(),
    ]


@family(WORDS, (3,))
def activations():
    return [
        lambda x, w: F.gelu(x) + F.silu(x),
        lambda x, w: F.leaky_relu(x) * F.elu(x),
        lambda x, w: F.softplus(x) + F.hardswish(x) + F.mish(x),
        lambda x, w: F.glu(x, -1),
        lambda x, w: F.prelu(x, w[:1]),
        lambda x, w: F.hardshrink(x) + F.softshrink(x) + F.hardtanh(x),
    ]


@family(WORDS, (8, 5), (5,))
def products():
    return [
        lambda x, w, b: x @ w,
        lambda x, w, b: F.linear(x, w.t(), b),
        lambda x, w, b: torch.einsum("bij,bkj->bik", x, x),
        lambda x, w, b: torch.bmm(x, x.transpose(1, 2)),
        lambda x, w, b: torch.baddbmm(x, x, x.transpose(1, 2) @ x),
        lambda x, w, b: (x @ w).mv(b) if x.dim() == 2 else x[0] @ (w @ b),
        lambda x, w, b: torch.outer(x[0, 0], b),
        lambda x, w, b: torch.tensordot(x, w, 1),
        lambda x, w, b: torch.addmm(b, x[0], w),
    ]


@family((4, 3, 3))
def matrices():
    near = torch.eye(3, dtype=torch.float64) * 5
    return [
        lambda x: torch.linalg.inv(x + near),
        lambda x: torch.linalg.solve(x + near, x),
        lambda x: torch.linalg.cholesky(x @ x.mT + near),
        lambda x: torch.linalg.det(x) + torch.linalg.svdvals(x).sum(-1),
        lambda x: torch.cdist(x, x * 2),
    ]


@family(WORDS)
def views():
    return [
        lambda x: x.transpose(1, 2).reshape(4, -1).sin(),
        lambda x: x.flatten() * 2,
        lambda x: x[:, 1:, ::2] + 1,
        lambda x: x.unsqueeze(1).expand(4, 3, 6, 8) * 2,
        lambda x: torch.unflatten(x.permute(2, 0, 1), 0, (2, 4)).exp(),
        lambda x: sum(x.chunk(2, 2)) * x.split([2, 2, 2], 1)[0].sum(),
        lambda x: x.narrow(0, 1, 2).squeeze(),
        lambda x: x.movedim(0, -1).contiguous(),
        lambda x: x.select(1, 2) + x[:, -1],
        lambda x: x.unfold(1, 3, 1).sum(-1),
        lambda x: x.tril() + x.triu(1),
        lambda x: x.view(24, 8) + 1,
        lambda x: x.repeat(1, 2, 1),
        lambda x: x.diagonal(dim1=1, dim2=2) * 2,
    ]


@family(WORDS)
def joins():
    return [
        lambda x: torch.cat([x, x * 2], 0),
        lambda x: torch.cat([x, x[:, :2]], 1),
        lambda x: torch.stack([x, x.sin()], 1),
        lambda x: torch.hstack([x, x]),
        lambda x: torch.roll(x, (1, 2), (0, 1)) + x.flip(0),
        lambda x: F.pad(x, (1, 2, 0, 1)),
    ]


@family(WORDS)
def reductions():
    return [
        lambda x: x.sum(),
        lambda x: x.mean(0),
        lambda x: x.square().mean(1),
        lambda x: x.amax(1) + x.amin(1),
        lambda x: x.max(0).values,
        lambda x: x.var(0) + x.std(),
        lambda x: torch.logsumexp(x, 1),
        lambda x: x.norm() * x.norm(dim=0),
        lambda x: x.abs().prod(1),
        lambda x: torch.linalg.vector_norm(x, 3, dim=(0, 1)),
        lambda x: x * (x > 0).any(0) * (x > -9).all(),
        lambda x: x.argmax(1) + x.argmin(1),
        lambda x: torch.var_mean(x, 0),
    ]


@family(WORDS)
def softmax():
    return [
        lambda x: x.softmax(-1),
        lambda x: x.softmax(0),
        lambda x: x.log_softmax(1),
        lambda x: F.softmin(x, 0) * 2,
    ]


def rows(x, numbers):
    """While compiling PyTorch makes them on the CPU, whatever the default device."""
    return torch.tensor(numbers, device=x.device)


def count(x, *sizes):
    return torch.arange(math.prod(sizes), device=x.device).view(sizes)


@family(WORDS)
def losses():
    return [
        lambda x: F.mse_loss(x, x.sin()),
        lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="sum"),
        lambda x: F.smooth_l1_loss(x, x.cos()) + F.huber_loss(x, x.cos()),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
        lambda x: F.cross_entropy(x.flatten(0, 1), count(x, 24) % 8),
        lambda x: F.cross_entropy(x, count(x, 4, 8) % 6),
        lambda x: F.nll_loss(x.flatten(0, 1).log_softmax(1), count(x, 24) % 8),
        lambda x: F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
        lambda x: F.cosine_similarity(x, x.sin(), 1),
        lambda x: F.soft_margin_loss(x, torch.ones_like(x)),
    ]


@family(WORDS)
def indexing():
    return [
        lambda x: x[rows(x, [3, 0, 1])],
        lambda x: x[:, rows(x, [5, 2])] * 2,
        lambda x: x.index_select(2, rows(x, [7, 0, 0])),
        lambda x: x.gather(1, count(x, 4, 2, 8) % 6),
        lambda x: x.scatter_add(0, count(x, 2, 6, 8) % 4, x[:2].sin()),
        lambda x: x.index_add(1, rows(x, [0, 3]), x[:, :2] * 2),
        lambda x: torch.take_along_dim(x, x.argsort(1), 1),
        lambda x: F.embedding(rows(x, [2, 1, 2]), x[0]),
        lambda x: x.index_put((rows(x, [1, 2]),), x[:2] * 2),
        lambda x: x.index_fill(0, rows(x, [1]), 2.0),
        lambda x: x.scatter(1, count(x, 4, 1, 8) * 0, 3.0),
        lambda x: x[rows(x, [0, 1]), rows(x, [2, 3])],
    ]


@family(WORDS)
def order():
    return [
        lambda x: x.sort(0).values,
        lambda x: x.topk(2, 1).values,
        lambda x: x.cumsum(0) + x.cumprod(1),
        lambda x: x.median(1).values,
        lambda x: x.kthvalue(2, 0).values,
        lambda x: x.cummax(1).values,
        lambda x: x.logcumsumexp(0),
        lambda x: x.diff(dim=1),
        lambda x: torch.searchsorted(x.sort(1).values, x.sort(1).values + 0.1),
    ]


def round_trip(x):
    """Through short-time transforms."""
    window = torch.hann_window(4, dtype=x.dtype)
    spectrum = torch.stft(x.flatten(1), 4, 2, window=window, return_complex=True)
    return torch.istft(spectrum * spectrum.abs(), 4, 2, window=window)


@family(WORDS)
def transforms():
    return [
        lambda x: torch.fft.rfft(x, dim=1).abs(),
        lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=0), n=4, dim=0),
        lambda x: torch.view_as_real(torch.fft.fft2(x)),
        round_trip,
    ]


@family(IMAGE, (4,), (4,))
def norms():
    return [
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        lambda x, w, b: F.batch_norm(x, w.detach(), b.detach().abs() + 1, w, b),
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        lambda x, w, b: F.layer_norm(x, (6, 5)),
        lambda x, w, b: F.rms_norm(x, (6, 5)),
        lambda x, w, b: F.layer_norm(x.transpose(1, 3), (4,), w, b),
        lambda x, w, b: F.normalize(x, dim=2),
        lambda x, w, b: F.local_response_norm(x, 3),
    ]


@family(IMAGE, (4, 4, 3, 3), (4,))
def convolutions():
    return [
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        lambda x, w, b: F.conv2d(x, w, padding=2, dilation=2),
        lambda x, w, b: F.conv2d(x, w[:, :1], b, groups=4),
        lambda x, w, b: F.conv2d(x, w[:, :, :1, :1], b),
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1),
        lambda x, w, b: F.conv1d(
            x.flatten(0, 1), w[:, :, 0, :2].flatten(1)[:, :6, None]
        ),
        lambda x, w, b: F.conv3d(x[None], w[:2, :2, None], padding=(0, 1, 1)),
    ]


@family(IMAGE)
def pooling():
    return [
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
        lambda x: F.adaptive_max_pool2d(x, 2),
        lambda x: F.lp_pool2d(x.abs(), 2, 2),
    ]


@family(IMAGE)
def interpolation():
    return [
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.interpolate(x, (4, 9), mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        lambda x: F.interpolate(x, (3, 5), mode="area"),
        lambda x: F.pixel_shuffle(x, 2),
        lambda x: F.pad(x, (1, 1, 2, 1), mode="reflect"),
        lambda x: F.pad(x, (1, 1, 2, 1), mode="circular"),
        lambda x: F.grid_sample(
            x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False
        ),
    ]


@family((2, 2, 6, 4))
def attention():
    return [
        lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos()),
        lambda x: F.scaled_dot_product_attention(x, x, x * 2, is_causal=True),
        lambda x: ((x @ x.transpose(2, 3)) / math.sqrt(4)).softmax(-1) @ x,
    ]


@family((2, 6, 5, 2, 4))
def neighborhood():
    attend = shardtensor.nn.functional.neighborhood_attention
    return [
        lambda x: attend(x, x.sin(), x.cos(), 3),
        lambda x: attend(x, x * 2, x, (2, 3), (3, 1), 2, (True, False)),
    ]


def filled(x):
    y = torch.zeros(4, 6, 8, dtype=x.dtype)
    y[:, :3] = x[:, 3:]
    return y


def written(x):
    y = x.clone()
    y[:, 0] = x[:, 1] * 2
    y[1].mul_(3)
    return y.add_(1)


@family(WORDS)
def writes():
    return [
        written,
        lambda x: x.sin().mul_(2).relu_(),
        lambda x: x.new_zeros(4, 6, 8).copy_(x),
        lambda x: torch.ones_like(x).sub_(x),
        lambda x: x.detach().clone().fill_(3) * x,
        lambda x: torch.slice_scatter(x, x[:, :2] * 2, 1, 2, 4),
        lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, 3),
    ]


@family((6, 6))
def layouts():
    return [
        lambda x: x.redistribute(placements=[Shard(1)] * x.device_mesh.ndim).sin(),
        lambda x: (x * 2).redistribute(placements=[Replicate()] * x.device_mesh.ndim),
        lambda x: (x.sin().full_tensor() * 2).sum() * x,
    ]


def three_rows(x, dim, boundary):
    """The second difference along `dim`, from rows of the neighbours."""
    rows = shardtensor.halo_exchange(x, 1, dim, boundary)
    inner = rows.diff(dim=dim).diff(dim=dim).movedim(dim, -1)
    inner = F.pad(inner, (1, 1)).movedim(-1, dim)
    return shardtensor.halo_trim(inner, x, 1, dim, boundary)


def around(x):
    """What is north and what is west of each place on a sphere."""
    rows = shardtensor.halo_exchange(x, 1, (1, 2), "sphere")
    inner = F.pad(rows[:, :-2, 1:-1] * rows[:, 1:-1, :-2], (1, 1, 1, 1))
    return shardtensor.halo_trim(inner, x, 1, (1, 2), "sphere")


@family(WORDS)
def halos():
    return [
        lambda x: three_rows(x.sin(), 1, "periodic"),
        lambda x: three_rows(x.sin(), 0, "replicate"),
        lambda x: shardtensor.halo_trim(shardtensor.halo_exchange(x, 2), x, 2),
        around,
        lambda x: shardtensor.nn.functional.pad_sphere(x, (1, 2)).sin(),
    ]


# ---- the check --------------------------------------------------------------


def numbers(shape):
    """Without ties, whose order is not promised."""
    count = math.prod(shape)
    order = torch.arange(count) * 7919 % count
    return ((order + 0.5) * (4 / count) - 2).to(torch.float64).view(shape)


def gradients(results, leaves):
    """Of a sum that weighs every element differently."""
    total = 0
    for result in tree_leaves(results):
        if result.requires_grad:
            total = total + (result.sin() + 0.1 * result.square()).sum()
    if not isinstance(total, torch.Tensor):
        return [None] * len(leaves)
    return torch.autograd.grad(total, leaves, allow_unused=True)


def all_of(functions):
    return lambda *given: [function(*given) for function in functions]


def layouts_of(mesh, shape):
    """A cut of a late dim, of the first one, no cut, and terms of a sum."""
    rest = [Replicate()] * (mesh.ndim - 1)
    late = len(shape) - 2
    for dim in (late, 0):
        second = [Shard(1)] if mesh.ndim > 1 and dim == 0 else rest
        cut = {dim: uneven(shape[dim], mesh.size(0))}
        yield make_spec(mesh, shape, [Shard(dim), *second], cut)
    yield make_spec(mesh, shape, [Partial(), *rest])
    yield make_spec(mesh, shape, [Replicate(), *rest])


def check(mesh, name, backend, chosen=slice(None), layouts=4):
    shardtensor.set_fallback_mode("silent")
    functions, shape, weight_shapes = FAMILIES[name]
    function = all_of(functions[chosen])
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    plain = [numbers(s).requires_grad_() for s in (shape, *weight_shapes)]
    if name in OF_ONE_DEVICE:
        function = all_of(OF_ONE_DEVICE[name][chosen])
    expected = function(*plain)
    expected_gradients = gradients(expected, plain)
    for spec in itertools.islice(layouts_of(mesh, shape), layouts):
        given = from_spec(plain[0], spec).requires_grad_()
        weights = [w.detach().requires_grad_() for w in plain[1:]]
        results = compiled(given, *weights)
        for actual, wanted in zip(tree_leaves(results), tree_leaves(expected)):
            assert_close(actual, wanted)
        actual_gradients = gradients(results, [given, *weights])
        for actual, wanted in zip(actual_gradients, expected_gradients):
            assert (actual is None) == (wanted is None)
            if wanted is not None:
                assert_close(actual, wanted, what="gradient")


def difference(x, before, after):
    """Of rows `before` and `after` those of x."""
    return before - 2 * x + after


def north_times_west(x):
    rows = shardtensor.nn.functional.pad_sphere(x, 1)
    return rows[:, :-2, 1:-1] * rows[:, 1:-1, :-2]


# What functions of ShardTensors alone come to.
OF_ONE_DEVICE = {
    "layouts": [
        lambda x: x.sin(),
        lambda x: x * 2,
        lambda x: (x.sin() * 2).sum() * x,
    ],
    "halos": [
        lambda x: difference(x.sin(), x.sin().roll(1, 1), x.sin().roll(-1, 1)),
        lambda x: difference(x.sin(), x[[0, 0, 1, 2]].sin(), x[[1, 2, 3, 3]].sin()),
        lambda x: x * 1,
        north_times_west,
        lambda x: shardtensor.nn.functional.pad_sphere(x, (1, 2)).sin(),
    ],
}

# Two layouts of these are in the tail.
SLOW = ("convolutions", "interpolation", "losses", "norms", "pointwise", "reductions")


@ranks(2, timeout=300)
@pytest.mark.parametrize("name", every(2, FAMILIES))
def test_a_family_compiles_whole(mesh, name):
    check(mesh, name, "aot_eager", layouts=1)


@pytest.mark.tail
@ranks(2, 3, "2x2", timeout=900)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_compiles_whole_in_any_layout(mesh, name):
    check(mesh, name, "aot_eager")


@pytest.mark.tail
@ranks(2, timeout=900)
@pytest.mark.parametrize("name", FAMILIES)
def test_inductor(mesh, name):
    check(mesh, name, "inductor", layouts=1)


@ranks(2, "2x2", timeout=300)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.tail)]
)
def test_compiled_code_refuses_what_is_out_of_bounds(mesh, backend):
    def loss(x, labels):
        return F.cross_entropy(x, labels)

    def rows(x, index):
        return x[index].sin()

    x = numbers((6, 5)).requires_grad_()
    good, bad = torch.arange(6) % 5, torch.tensor([0, 1, 2, 3, 4, 255])
    for function in (loss, rows):
        for dim in (0, 1):
            torch._dynamo.reset()
            compiled = torch.compile(function, fullgraph=True, backend=backend)
            given = from_spec(x, make_spec(mesh, x.shape, [Shard(dim)] * mesh.ndim))
            assert_close(compiled(given, good), function(x, good))
            with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
                compiled(given, bad)
    # In one rank's part of the index.
    chosen = lambda x, index: F.embedding(index, x).sum(0)  # noqa: E731
    compiled = torch.compile(chosen, fullgraph=True, backend=backend)
    by_some = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    for placements in (by_some, [Shard(0)] * mesh.ndim)[-mesh.ndim :]:
        cut = make_spec(mesh, good.shape, placements)
        assert_close(compiled(x, from_spec(good % 3, cut)), chosen(x, good % 3))
        with pytest.raises(IndexError, match="embedding: index 255 is out of bounds"):
            compiled(x, from_spec(bad, cut)).full_tensor()
