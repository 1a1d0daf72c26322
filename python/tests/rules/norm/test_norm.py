"""Norms over the whole domain: values, gradients, buffers."""

import pytest
import rig
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import image, placements_of, sweep
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardtensor

NORMS = {
    "group": lambda c: nn.GroupNorm(2, c),
    "group_plain": lambda c: nn.GroupNorm(4, c, affine=False),
    "batch": lambda c: nn.BatchNorm2d(c),
    "batch_cumulative": lambda c: nn.BatchNorm2d(c, momentum=None),
    "batch_plain": lambda c: nn.BatchNorm2d(c, affine=False, eps=0.1),
    "batch_untracked": lambda c: nn.BatchNorm2d(c, track_running_stats=False),
    "instance": lambda c: nn.InstanceNorm2d(c),
    "instance_affine": lambda c: nn.InstanceNorm2d(c, affine=True),
    "instance_tracked": lambda c: nn.InstanceNorm2d(
        c, affine=True, track_running_stats=True, momentum=0.3
    ),
    "layer": lambda c: nn.LayerNorm([c, 6, 5]),
    "layer_last": lambda c: nn.LayerNorm([5], bias=False),
    "layer_plain": lambda c: nn.LayerNorm([6, 5], elementwise_affine=False),
    "rms": lambda c: nn.RMSNorm([6, 5]),
    "rms_plain": lambda c: nn.RMSNorm([5], elementwise_affine=False, eps=0.01),
}


def make(kind):
    norm = NORMS[kind](4).double()
    for p in norm.parameters():
        nn.init.normal_(p, 1.0, 0.5)
    return norm


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_every_cut(mesh, kind, dim):
    x = image(3, 4, 6, 5)
    for sizes in partitions(x.shape[dim], mesh.size()):
        part = sharded(x, [Shard(dim)], {dim: sizes})
        check_op(make(kind), part, mesh=mesh, second_order=True)


@ranks("2x2")
@pytest.mark.parametrize("dims", [(2, 3), (0, 2), (2, 2), (1, 3), (None, 2)])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_on_a_grid_of_ranks(mesh, kind, dims):
    x = image(3, 4, 6, 5)
    placements = [Replicate() if d is None else Shard(d) for d in dims]
    check_op(make(kind), sharded(x, placements), mesh=mesh, second_order=True)
    if dims[0] == dims[1]:
        part = sharded(x, placements, {2: [1, 0, 3, 2]})
        check_op(make(kind), part, mesh=mesh, second_order=True)


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("shape", [(2, 6, 4, 3), (2, 6)])
def test_groups_of_channels_that_ranks_share(mesh, shape):
    w, b = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with shardtensor.fallback_mode("error"):
        for groups in (1, 2, 3):
            for placements, sizes in sweep(mesh, shape):
                check_op(
                    lambda x, w, b, n=groups: F.group_norm(x, n, w, b),
                    sharded(image(*shape), placements, sizes), w, b,
                    mesh=mesh, second_order=True,
                )  # fmt: skip


LARGE = {
    "group": lambda: nn.GroupNorm(2, 4),
    "batch": lambda: nn.BatchNorm2d(4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "layer": lambda: nn.LayerNorm([30, 20]),
    "rms": lambda: nn.RMSNorm([30, 20]),
    "rms_plain": lambda: nn.RMSNorm([30, 20], elementwise_affine=False),
}


@ranks(2, 3, 4, "2x2")
@pytest.mark.parametrize("kind", LARGE)
def test_images_of_many_rows(mesh, kind):
    """These take loops of their own; a short piece does not."""
    x = image(3, 4, 30, 20)
    norm = LARGE[kind]().double()
    for p in norm.parameters():
        nn.init.normal_(p, 1.0, 0.5)
    if mesh.ndim == 2:
        check_op(norm, sharded(x, [Shard(1), Shard(2)]), mesh=mesh, second_order=True)
        return
    for dim in (0, 1, 2):
        for sizes in partitions(x.shape[dim], mesh.size()):
            part = sharded(x, [Shard(dim)], {dim: sizes})
            check_op(norm, part, mesh=mesh, second_order=True)


# ---- modes and parameters ---------------------------------------------------

EVALUATED = ["batch", "batch_untracked", "instance_tracked", "instance"]


@ranks(2, 3)
@pytest.mark.parametrize("kind", EVALUATED)
def test_evaluation_uses_the_running_statistics(mesh, kind):
    norm = make(kind).eval()
    for buffer in norm.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2)
    x = image(3, 4, 6, 5)
    for dim in range(4):
        for sizes in partitions(x.shape[dim], mesh.size()):
            part = sharded(x, [Shard(dim)], {dim: sizes})
            check_op(norm, part, mesh=mesh, second_order=True)


@ranks(2, 3)
@pytest.mark.parametrize("shape", [(4, 12), (2, 12, 5)])
def test_evaluation_of_rows_whose_channels_are_cut(mesh, shape):
    norm = nn.BatchNorm1d(12).double().eval()
    norm.running_var.uniform_(0.5, 2)
    nn.init.uniform_(norm.weight)
    for sizes in partitions(12, mesh.size()):
        part = sharded(image(*shape), [Shard(1)], {1: sizes})
        check_op(norm, part, mesh=mesh, second_order=True)
        check_op(norm, part, mesh=mesh)


class Repeated(nn.Module):
    """One norm that sees two batches."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x), self.norm(x * x)


@ranks(2, 4)
@pytest.mark.parametrize("kind", ["batch", "batch_cumulative", "instance_tracked"])
def test_running_statistics_are_the_same_bits_on_all_ranks(mesh, kind):
    norm = Repeated(make(kind))
    x = image(3, 4, 6, 5)
    for dim in range(4):
        check_op(norm, sharded(x, [Shard(dim)]), mesh=mesh)
        for buffer in norm.buffers():
            copies = [torch.empty_like(buffer) for _ in range(mesh.size())]
            dist.all_gather(copies, buffer)
            assert all(torch.equal(copies[0], c) for c in copies)


@ranks(2, 3)
@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(4), nn.BatchNorm3d(4), nn.InstanceNorm1d(4), nn.GroupNorm(2, 4)],
    ids=lambda norm: type(norm).__name__,
)
def test_other_numbers_of_dims(mesh, norm):
    shapes = {"BatchNorm1d": [(5, 4), (5, 4, 6)], "BatchNorm3d": [(2, 4, 3, 2, 5)]}
    shapes["InstanceNorm1d"] = [(5, 4, 6)]
    shapes["GroupNorm"] = [(5, 4), (5, 4, 6), (2, 4, 3, 2, 5)]
    for shape in shapes[type(norm).__name__]:
        for dim in range(len(shape)):
            part = sharded(image(*shape), [Shard(dim)])
            check_op(norm.double(), part, mesh=mesh, second_order=True)


class ChannelsLast(Repeated):
    """A norm whose input lies in memory as images do."""

    def forward(self, x):
        return self.norm(x.contiguous(memory_format=torch.channels_last))


@ranks(2, 3)
@pytest.mark.parametrize("kind", ["group", "batch", "instance_affine"])
def test_channels_last(mesh, kind):
    for dim in range(4):
        part = sharded(image(3, 4, 6, 5), [Shard(dim)])
        y = check_op(ChannelsLast(make(kind)), part, mesh=mesh, second_order=True)
        # CUDA's group norm writes rows, on one device, too.
        if dim != 1 and (kind, mesh.device_type) != ("group", "cuda"):
            assert y.to_local().is_contiguous(memory_format=torch.channels_last)


MANY_CHANNELS = {  # no whole number of vectors
    "group": lambda: nn.GroupNorm(2, 20),
    "group_plain": lambda: nn.GroupNorm(2, 20, affine=False),
    "batch": lambda: nn.BatchNorm2d(20),
    "instance": lambda: nn.InstanceNorm2d(20),
}


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("shape", [(2, 20, 17, 40), (1, 20, 40, 200)])
@pytest.mark.parametrize("kind", MANY_CHANNELS)
def test_large_images_with_channels_last(mesh, kind, shape):
    """Loops over all channels side by side; whole images, or row by row."""
    x = image(*shape)
    norm = MANY_CHANNELS[kind]().double()
    for p in norm.parameters():
        nn.init.normal_(p, 1.0, 0.5)
    if mesh.ndim == 2:
        part = sharded(x, [Shard(1), Shard(2)], {2: [shape[2] - 1, 1]})
        check_op(ChannelsLast(norm), part, mesh=mesh)
        return
    for dim in (0, 2, 3):
        for sizes in partitions(x.shape[dim], mesh.size()):
            check_op(
                ChannelsLast(norm),
                sharded(x, [Shard(dim)], {dim: sizes}),
                mesh=mesh,
            )


LARGE_ERROR = {torch.float: 2e-3, torch.bfloat16: 2e-2}


@ranks(2, 3)
@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last]
)
@pytest.mark.parametrize("dtype", LARGE_ERROR)
def test_low_precision_of_a_large_mean(mesh, dtype, memory_format):
    x = (
        (100 + torch.randn(2, 20, 40, 96))
        .to(dtype)
        .contiguous(memory_format=memory_format)
    )
    grad = torch.randn_like(x)
    norm = nn.GroupNorm(4, 20)

    exact = x.double().requires_grad_()
    expected = nn.GroupNorm(4, 20).double()(exact)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())

    norm.to(dtype)
    tolerance = {"rtol": 0, "atol": LARGE_ERROR[dtype]}
    for sizes in partitions(40, mesh.size()):
        part = shard(x, mesh, [Shard(2)], {2: sizes}).requires_grad_()
        y = norm(part)
        y.backward(shard(grad, mesh, [Shard(2)], {2: sizes}))
        torch.testing.assert_close(y.full_tensor().double(), expected, **tolerance)
        torch.testing.assert_close(
            part.grad.full_tensor().double(), expected_grad, **tolerance
        )


@ranks(2)
@pytest.mark.parametrize("kind", ["group", "batch", "layer", "rms"])
def test_what_needs_no_gradient_gets_none(mesh, kind):
    part = sharded(image(3, 4, 6, 5).detach(), [Shard(2)])
    check_op(make(kind), part, mesh=mesh)  # parameters only
    norm = make(kind).requires_grad_(False)
    check_op(norm, sharded(image(3, 4, 6, 5), [Shard(2)]), mesh=mesh)
    with torch.no_grad():
        check_op(norm, part, mesh=mesh, backward=False)
    with torch.inference_mode():
        assert_close(norm(shard(part.tensor, mesh, [Shard(2)])), norm(part.tensor))


@ranks(2)
@pytest.mark.parametrize("kind", ["group", "batch", "layer", "rms", "instance"])
def test_a_sum_to_be_done_and_sharded_parameters(mesh, kind):
    check_op(make(kind), sharded(image(3, 4, 6, 5), [Partial()]), mesh=mesh)
    w, b = torch.randn(2, 5, dtype=torch.float64)
    check_op(
        lambda x, w, b: F.layer_norm(x, [5], w, b),
        sharded(image(3, 4, 6, 5), [Shard(3)]),
        sharded(w.requires_grad_(), [Shard(0)]),
        sharded(b.requires_grad_(), [Replicate()]),
        mesh=mesh, second_order=True,
    )  # fmt: skip


class WithBuffers(nn.Module):
    """A norm whose running statistics are arguments, and results."""

    def __init__(self, norm, training):
        super().__init__()
        self.norm = norm
        self.training = training

    def forward(self, x, mean, var, weight=None, bias=None):
        mean, var = mean.clone(), var.clone()
        y = self.norm(x, mean, var, weight, bias, self.training, 0.3)
        return y, mean, var


CHANNEL_NORMS = {"batch": F.batch_norm, "instance": F.instance_norm}


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", CHANNEL_NORMS)
def test_running_statistics_that_are_sharded(mesh, kind, training):
    norm = WithBuffers(CHANNEL_NORMS[kind], training)
    x = image(3, 4, 6, 5)
    mean, var, weight = torch.rand(3, 4, dtype=torch.float64) + 0.5
    weight.requires_grad_()
    whole = [Replicate()] * mesh.ndim
    inputs = [x, sharded(x, placements_of(mesh, 2)), sharded(x, placements_of(mesh, 1))]
    layouts = [(whole, None)]
    layouts += [(placements_of(mesh, 0), {0: s}) for s in partitions(4, mesh.size())]
    for part in inputs:
        for layout in layouts:
            with shardtensor.fallback_mode("error"):
                buffers = sharded(mean, *layout), sharded(var, *layout)
                check_op(norm, part, *buffers, mesh=mesh, second_order=True)
                check_op(norm, part, *buffers, weight, weight, mesh=mesh)
                if part is not x:
                    check_op(norm, part, mean, buffers[1], mesh=mesh)


@ranks(2, 3)
@pytest.mark.parametrize("kind", CHANNEL_NORMS)
def test_a_weight_alone_may_be_sharded(mesh, kind):
    def norm(x, weight, bias):
        return CHANNEL_NORMS[kind](x, None, None, weight, bias, True)

    w, b = torch.randn(2, 4, dtype=torch.float64)
    w.requires_grad_(), b.requires_grad_()
    for placement in (Shard(0), Replicate()):
        part = sharded(w, [placement])
        for x in (image(3, 4, 6, 5), sharded(image(3, 4, 6, 5), [Shard(2)])):
            check_op(norm, x, part, None, mesh=mesh, second_order=True)
            check_op(norm, x, part, b, mesh=mesh, second_order=True)
            check_op(norm, x, w, sharded(b, [placement]), mesh=mesh)


# ---- accuracy ---------------------------------------------------------------


@ranks(2, 3)
@pytest.mark.parametrize("kind", ["group", "batch", "instance", "layer"])
def test_a_large_mean_is_not_squared(mesh, kind):
    x = torch.randn(3, 4, 28, 5) + 1e4
    norm = NORMS[kind](4) if kind != "layer" else nn.LayerNorm([4, 28, 5])
    exact = norm.double()(x.double()).float()
    y = norm.float()(shard(x, mesh, [Shard(2)]))
    assert_close(y, exact, rtol=0, atol=3e-3)


@ranks(2, 4)
def test_gradients_at_a_large_mean_are_closer_than_pytorchs(mesh):
    """Of the weight of a group norm, in fp32; the reference is fp64."""
    x, grad = torch.randn(2, 8, 32, 24) + 1000, torch.randn(2, 8, 32, 24)

    def gradient(x, grad):
        norm = nn.GroupNorm(2, 8, dtype=x.dtype)
        norm(x).backward(grad)
        return norm.weight.grad.double()

    exact = gradient(x.double(), grad.double())
    ours = gradient(*(shard(t, mesh, [Shard(2)]) for t in (x, grad)))
    theirs = gradient(x, grad)
    assert 5 * (ours - exact).abs().max() < (theirs - exact).abs().max()


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("parameters", ["same", "float32"])
@pytest.mark.parametrize("kind", ["group", "batch", "layer", "rms", "instance_affine"])
def test_narrow_types(mesh, kind, parameters, dtype):
    norm = make(kind).to(torch.float32 if parameters == "float32" else dtype)
    if kind == "rms" and parameters == "float32":
        norm.to(dtype)  # PyTorch's own has no mixed path
    x = (torch.randn(3, 4, 6, 5) + 3).to(dtype).requires_grad_()
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    for dim in (0, 2):
        check_op(
            norm, sharded(x, [Shard(dim)]), mesh=mesh, rtol=tolerance, atol=tolerance
        )


class Autocast(Repeated):
    """A norm under autocast."""

    def forward(self, x):
        with rig.autocast(torch.bfloat16):
            return self.norm(x)


@ranks(2)
@pytest.mark.parametrize("kind", ["group", "batch", "layer", "rms"])
def test_under_autocast(mesh, kind):
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 4, 6, 5).to(dtype).requires_grad_()
        for dim in (0, 2):
            part = sharded(x, [Shard(dim)])
            norm = Autocast(make(kind).float())
            check_op(norm, part, mesh=mesh, rtol=5e-2, atol=5e-2)


# ---- cost -------------------------------------------------------------------


@ranks(2, "2x2")
@pytest.mark.parametrize("kind", NORMS)
def test_at_most_one_message_each_way(mesh, kind):
    norm = make(kind)
    placements = [Shard(2), Shard(3)][-mesh.ndim :]
    part = shard(image(3, 4, 6, 5), mesh, placements)
    with shardtensor.gradient_policy("immediate"):
        shardtensor.reset_comm_stats()
        shardtensor.reset_fallback_counts()
        y = norm(part)
        forward = shardtensor.comm_stats()
        y.backward(torch.ones_like(y))
        both = shardtensor.comm_stats()
    assert forward.exchanges + forward.all_reduces <= 1
    has_parameters = bool(list(norm.parameters()))
    assert both.exchanges == forward.exchanges
    assert both.all_reduces - forward.all_reduces <= 1 + has_parameters
    assert shardtensor.fallback_counts() == {}


@ranks(2)
def test_checkpointing_and_in_place_changes(mesh):
    norm = make("group")

    def forward(x):
        return checkpoint(norm, x * 1, use_reentrant=False)

    part = sharded(image(3, 4, 6, 5), [Shard(2)])
    check_op(forward, part, mesh=mesh)
    x = shard(image(3, 4, 6, 5), mesh, [Shard(2)]) * 1
    y = norm(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@ranks(2)
def test_function_transforms(mesh):
    x = image(3, 4, 6, 5).detach()
    part = shard(x, mesh, [Shard(2)])
    for kind in ("layer", "batch_untracked", "instance_affine"):
        norm = make(kind)

        def loss(x, norm=norm):
            return (norm(x) ** 3).sum()

        assert_close(torch.func.grad(loss)(part), torch.func.grad(loss)(x))


@ranks(1, 2)
def test_no_channels_and_no_samples(mesh):
    shapes = [(0, 4, 3), (0, 0), (3, 0, 4), (3, 4, 0)]
    if mesh.device_type == "cuda":  # PyTorch 2.11's kernel wants elements there
        del shapes[1:]
    for shape in shapes:
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        refused = None
        try:
            F.group_norm(x, 1)
        except RuntimeError as error:  # as PyTorch 2.15 does
            refused = str(error)
        for dim in range(len(shape)):
            if refused is None:
                x_cut = sharded(x, [Shard(dim)])
                check_op(lambda x: F.group_norm(x, 1), x_cut, mesh=mesh)
                continue
            with pytest.raises(RuntimeError, match=refused):
                F.group_norm(shard(x, mesh, [Shard(dim)]), 1)


# ---- wrong input ------------------------------------------------------------


@ranks(2)
def test_wrong_arguments_name_the_norm(mesh):
    x = shard(torch.randn(3, 4, 6, 5), mesh, [Shard(2)])
    with pytest.raises(RuntimeError, match="number of groups that divides the 4"):
        torch.group_norm(x, 3)
    with pytest.raises(
        RuntimeError, match=r"group_norm: expected weight of sizes \[4\]"
    ):
        F.group_norm(x, 2, torch.ones(3))
    with pytest.raises(RuntimeError, match="at least 2 dims"):
        torch.group_norm(shard(torch.ones(4), mesh, [Shard(0)]), 1)
    with pytest.raises(RuntimeError, match="last dims are normalized_shape"):
        F.layer_norm(x, [7])
    with pytest.raises(RuntimeError, match="weight and bias of normalized_shape"):
        F.layer_norm(x, [5], torch.ones(4))
    with pytest.raises(RuntimeError, match="rms_norm: expected an input"):
        F.rms_norm(x, [4])
    with pytest.raises(RuntimeError, match="batch_norm: expected running_mean"):
        F.batch_norm(x, torch.zeros(3), torch.ones(4))
    with pytest.raises(RuntimeError, match="when it is not in training"):
        F.batch_norm(x, None, None)
    with pytest.raises(RuntimeError, match="use_input_stats is false"):
        F.instance_norm(x, use_input_stats=False)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(
            shard(torch.ones(1, 4), mesh, [Shard(1)]), None, None, training=True
        )


PLAIN = {
    "group": lambda x, *affine: F.group_norm(x, 2, *affine),
    "batch": lambda x, *affine: F.batch_norm(x, None, None, *affine, training=True),
    "instance": lambda x, *affine: F.instance_norm(x, None, None, *affine),
    "layer": lambda x, *affine: F.layer_norm(x, [4, 4], *affine),
    "rms": lambda x: F.rms_norm(x, [4, 4]),
}


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_refused_as_on_one_device(mesh, dtype):
    x = torch.ones(3, 4, 4, 4, dtype=dtype)
    for given in (x, shard(x, mesh, [Shard(2)])):
        for norm in PLAIN.values():
            with pytest.raises(NotImplementedError, match="not implemented for"):
                norm(given)


@ranks(2)
@pytest.mark.parametrize("kind", ["group", "batch", "instance"])
def test_parameters_of_another_dtype(mesh, kind):
    x = torch.randn(3, 4, 4, 4, dtype=torch.float64)
    for given in (x, shard(x, mesh, [Shard(2)])):
        with pytest.raises(RuntimeError, match="datatype|input's dtype, Double"):
            PLAIN[kind](given, torch.ones(4))
        with pytest.raises(RuntimeError, match="type of Float|input's dtype, Float"):
            PLAIN[kind](given.float(), None, torch.ones(4).double())


@ranks(2)
def test_no_elements_at_all(mesh):
    for kind in ("group", "batch", "layer", "rms"):
        x = torch.randn(0, 4, 6, 5, dtype=torch.float64, requires_grad=True)
        for dim in (0, 2):
            check_op(make(kind), sharded(x, [Shard(dim)]), mesh=mesh)
    row = sharded(torch.zeros(0, requires_grad=True), [Shard(0)])
    check_op(lambda x: F.batch_norm(x, None, None, training=True), row, mesh=mesh)


@ranks(3)
@pytest.mark.parametrize("affine", [False, True])
def test_group_norm_of_no_samples_where_pieces_have_no_channels(mesh, affine):
    x = sharded(torch.randn(0, 1, 2, requires_grad=True), [Shard(1)])
    check_op(nn.GroupNorm(1, 1, affine=affine), x, mesh=mesh)
