"""Results lie in memory as on one device, whatever the pieces do."""

import pytest
import rig
import torch
import torch.nn.functional as F
from memory import MEMORY, layouts_of
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Replicate, Shard

import shardtensor

RESULTS = {
    "one": lambda x: x.exp(),
    "number": lambda x: x * 2,
    "power_of_number": lambda x: 2.0**x,
    "itself": lambda x: x + x,
    "contiguous": lambda x: x + torch.ones(x.shape, dtype=x.dtype),
    "contiguous_first": lambda x: torch.ones(x.shape, dtype=x.dtype) + x,
    "row": lambda x: x * torch.ones(x.shape[-1:], dtype=x.dtype),
    "column": lambda x: torch.ones(x.shape[0], *[1] * (x.dim() - 1)) * x,
    "plain_first": lambda x: torch.empty_strided(x.shape, x.stride()).fill_(2) * x,
    "cast": lambda x: x.float(),
    "angle": lambda x: (x + 1j).angle(),
    "mvlgamma": lambda x: torch.mvlgamma(x.abs() + 3, 2),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, torch.ones(999).double()),
    "unique": lambda x: x.unique(dim=1),
    "unique_last": lambda x: x.unique_consecutive(dim=-1),
    "nonzero": lambda x: x.nonzero(),
    "put": lambda x: x.put(torch.tensor([0, 1]), torch.ones(2).double()),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "clone": lambda x: x.clone(),
    "contiguous_clone": lambda x: x.contiguous(),
    "empty_like": lambda x: torch.empty_like(x).fill_(0),
    "zeros_like": lambda x: torch.zeros_like(x, dtype=torch.int32),
    "fill": lambda x: torch.ops.aten.fill(x, 1.0),
    "sort": lambda x: x.sort(0).values,
    "index_fill": lambda x: x.index_fill(0, torch.tensor([0]), 1.0),
    "flip": lambda x: x.flip(0),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(-1),
    "cat": lambda x: torch.cat([x, x], 1),
    "cat_both": lambda x: torch.cat([x, x.contiguous()], 1),
    "stack": lambda x: torch.stack([x, x]),
    "stack_inside": lambda x: torch.stack([x, x], 1),
    "stack_last": lambda x: torch.stack([x, x], -1),
    "index": lambda x: x[torch.tensor([0, 0])],
    "index_inside": lambda x: x[:, torch.tensor([[0], [0]])],
    "index_apart": lambda x: x.unsqueeze(0)[torch.tensor([0, 0]), :, torch.tensor([0])],
    "index_two": lambda x: x[torch.tensor([0]), torch.tensor([0, 0])],
    "mask": lambda x: x[torch.arange(x.shape[0]) < 2],
    "mask_of_two": lambda x: x[torch.ones(x.shape[:2], dtype=torch.bool)],
    "fft": lambda x: torch.fft.fft(x, dim=0),
    "fftn": lambda x: torch.fft.fftn(x),
    "rfft": lambda x: torch.fft.rfft(x, dim=1),
    "rfft2": lambda x: torch.fft.rfft2(x, dim=(1, 0)),
    "irfft": lambda x: torch.fft.irfft(x + 0j, 6, dim=0),
    "irfft2": lambda x: torch.fft.irfft2(x + 0j, (3, 4), dim=(1, 0)),
    "shifted_fft": lambda x: torch.fft.fftshift(torch.fft.fft(x, dim=1), dim=1),
}


if rig.DEVICE == "guarded":  # its transforms are the CPU's, not cuFFT's
    RESULTS = {name: fn for name, fn in RESULTS.items() if "fft" not in name}


@ranks(1, 2)
@pytest.mark.parametrize("memory", MEMORY)
def test_results_lie_as_on_one_device(mesh, memory):
    shape, lay = MEMORY[memory]
    base = torch.randn(shape, dtype=torch.float64)
    for placements, sizes in layouts_of(mesh, shape):
        whole, part = lay(base), lay(shard(base, mesh, placements, sizes))
        for name, fn in RESULTS.items():
            expected, actual = fn(whole), fn(part)
            assert_close(actual, expected, what=name)
            assert actual.stride() == expected.stride(), f"{name} of {memory}"


# Written into a tensor without elements, which gets their sizes.
MADE = {
    "one": torch.exp,
    "number": lambda x, out: torch.mul(x, 2, out=out),
    "power_of_number": lambda x, out: torch.pow(2.0, x, out=out),
    "itself": lambda x, out: torch.atan2(x, x, out=out),
    "where": lambda x, out: torch.where(x > 0, x, x, out=out),
    "sum": lambda x, out: torch.sum(x, 0, out=out),
    "amax": lambda x, out: torch.amax(x, 0, keepdim=True, out=out),
    "cumsum": lambda x, out: torch.cumsum(x, 0, out=out),
    "softmax": lambda x, out: torch.softmax(x, 0, out=out),
    "cat": lambda x, out: torch.cat([x, x], 1, out=out),
    "tril": lambda x, out: torch.tril(x, out=out),
    "index_select": lambda x, out: torch.index_select(
        x, 0, torch.tensor([0, 0]), out=out
    ),
}


@pytest.mark.skipif(rig.DEVICE == "guarded", reason="it resizes by itself")
@ranks(2)
@pytest.mark.parametrize("memory", MEMORY)
def test_an_empty_out_lies_as_on_one_device(mesh, memory):
    shape, lay = MEMORY[memory]
    base = torch.randn(shape, dtype=torch.float64)
    whole, part = lay(base), lay(shard(base, mesh, [Shard(0)]))
    for name, fn in MADE.items():
        expected, actual = whole.new_empty(0), part.new_empty(0)
        fn(whole, out=expected), fn(part, out=actual)
        assert_close(actual, expected, what=name)
        assert actual.stride() == expected.stride(), f"{name} of {memory}"


@ranks(2)
def test_products_lie_as_on_one_device(mesh):
    a, b = torch.randn(3, 5, 2), torch.randn(3, 2, 4)
    for base in (torch.randn(5, 4), torch.randn(4, 5).t()):
        for dim in (0, 1):
            turned = shard(base.t(), mesh, [Shard(1 - dim)]).t()
            x = turned if base.stride(0) == 1 else shard(base, mesh, [Shard(dim)])
            for fn in (torch.addr, torch.addbmm):
                more = (base[:, 0], base[0]) if fn is torch.addr else (a, b)
                expected, actual = fn(base, *more), fn(x, *more)
                assert_close(actual, expected)
                assert actual.stride() == expected.stride(), fn


@ranks(2)
@pytest.mark.parametrize("memory", MEMORY)
def test_redistribute_keeps_the_order(mesh, memory):
    shape, lay = MEMORY[memory]
    base = torch.randn(shape, dtype=torch.float64)
    whole, part = lay(base), lay(shard(base, mesh, [Shard(0)]))
    for placement in map(Shard, range(whole.dim())):
        if part.placements == (placement,):
            continue  # the tensor itself
        actual = part.redistribute(placements=[placement])
        assert_close(actual, whole)
        assert actual.stride() == whole.clone().stride()


def ones(x, *shape):
    return torch.ones(shape, dtype=x.dtype)


# Of channels-last images (2, 4, 8, 8): the operators that keep the format, and
# those that don't. Random numbers are drawn in the order of memory.
LAYERS = {
    "conv": lambda x: F.conv2d(x, ones(x, 4, 4, 3, 3), padding=1),
    "conv_of_pixels": lambda x: F.conv2d(x, ones(x, 2, 4, 1, 1), ones(x, 2)),
    "conv_strided": lambda x: F.conv2d(x, ones(x, 4, 1, 3, 3), stride=2, groups=4),
    "conv_weight": lambda x: F.conv2d(
        x.contiguous(),
        ones(x, 4, 4, 3, 3).to(memory_format=torch.channels_last),
    ),
    "conv_transpose": lambda x: F.conv_transpose2d(x, ones(x, 4, 4, 2, 2), stride=2),
    "max_pool": lambda x: F.max_pool2d(x, 2),
    "max_pool_indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 3),
    "adaptive_mean": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_max": lambda x: F.adaptive_max_pool2d(x, 3),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm_eval": lambda x: F.batch_norm(x, ones(x, 4), ones(x, 4)),
    "instance_norm": lambda x: F.instance_norm(x),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "stack": lambda x: torch.stack([x, x], 2),
    "stack_channels": lambda x: torch.stack([x, x], 1),
    "stack_samples": lambda x: torch.stack([x, x]),
    "stack_last": lambda x: torch.stack([x, x], -1),
    "index_samples": lambda x: x[torch.tensor([1, 0, 1])],
    "index_channels": lambda x: x[:, torch.tensor([1, 0, 3])],
    "index_rows": lambda x: x[:, :, torch.tensor([1, 5])],
    "index_columns": lambda x: x[..., torch.tensor([1, 5])],
    "index_both": lambda x: x[:, :, torch.tensor([1, 5]), torch.tensor([0, 1])],
    "index_apart": lambda x: x[torch.tensor([1, 0]), :, torch.tensor([0, 1])],
    "constant_pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(2),
    "flip": lambda x: x.flip(2),
    "roll": lambda x: x.roll(1, 2),
    "cat": lambda x: torch.cat([x, x], 2),
    "cat_both": lambda x: torch.cat([x, x.contiguous()], 2),
    "cat_contiguous_first": lambda x: torch.cat([x.contiguous(), x], 1),
    "glu": lambda x: F.glu(x, 1),
    "cummax": lambda x: x.cummax(1).values,
    "renorm": lambda x: x.renorm(2, 1, 1.0),
    "scatter": lambda x: x.scatter(1, torch.zeros(2, 1, 8, 8, dtype=torch.long), 1.0),
    "index_add": lambda x: x.index_add(1, torch.tensor([0]), x[:, :1]),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "index": lambda x: x[:, [1, 0]],
    "index_select": lambda x: x.index_select(1, torch.tensor([1, 0])),
    "gather": lambda x: x.gather(2, torch.zeros(2, 4, 3, 8, dtype=torch.long)),
    "topk": lambda x: x.topk(2, 1).values,
    "sort": lambda x: x.sort(2).values,
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "tril": lambda x: x.tril(),
    "grid_sample": lambda x: F.grid_sample(
        x, torch.zeros(2, 5, 6, 2, dtype=x.dtype), align_corners=False
    ),
}
VOLUMES = {
    "conv": lambda x: F.conv3d(x, ones(x, 4, 4, 3, 3, 3), padding=1),
    "max_pool": lambda x: F.max_pool3d(x, 2),
    "avg_pool": lambda x: F.avg_pool3d(x, 2),
    "adaptive": lambda x: F.adaptive_avg_pool3d(x, 2),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="reflect"),
}


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_keep_the_format_that_they_keep_on_one_device(mesh, dtype):
    for shape, format, layers in (
        ((2, 4, 8, 8), torch.channels_last, LAYERS),
        ((2, 4, 8, 6, 4), torch.channels_last_3d, VOLUMES),
    ):
        whole = torch.randn(shape, dtype=dtype)
        part = shard(whole, mesh, [Shard(2)]).to(memory_format=format)
        whole = whole.to(memory_format=format)
        for name, fn in layers.items():
            expected, actual = fn(whole), fn(part)
            assert actual.stride() == expected.stride(), name
            torch.manual_seed(0)
            expected = F.dropout(expected.to(dtype))
            torch.manual_seed(0)
            assert_close(F.dropout(actual.to(dtype)), expected, what=name)


# ---- pieces -----------------------------------------------------------------

# What brings rows of other ranks, or moves the pieces.
MOVES = {
    "conv": lambda x: F.conv2d(x, ones(x, 2, 2, 3, 3), padding=1),
    "conv_strided": lambda x: F.conv2d(x, ones(x, 2, 1, 3, 3), stride=2, groups=2),
    "conv_transpose": lambda x: F.conv_transpose2d(x, ones(x, 2, 2, 2, 2), stride=2),
    "max_pool": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
    "avg_pool": lambda x: F.avg_pool2d(x, 3, stride=1, padding=1),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "roll": lambda x: x.roll(1, 2),
    "flip": lambda x: x.flip(2),
    "rows": lambda x: moved(x, Shard(2)),
    "columns": lambda x: moved(x, Shard(3)),
    "whole": lambda x: moved(x, Replicate()),
    "indexed": lambda x: x.flip(0)[:, :, torch.tensor([5, 1])],
}


def lies_last(piece):
    """Rows that nobody owns may lie between others."""
    return piece.shape[1] == 1 or piece.stride(1) == 1


def moved(x, placement):
    return x.redistribute(placements=[placement]) if hasattr(x, "placements") else x


if rig.DEVICE == "cuda":  # its gradient is wrong there (PyTorch issue 188344)
    del MOVES["avg_pool"]


@ranks(2)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_pieces_of_channels_last_lie_as_the_whole(mesh, dim):
    """One channel on each rank, too, whose pieces lie both ways."""
    whole = torch.randn(2, 2, 8, 6)
    lies = {"memory_format": torch.channels_last}
    for name, fn in MOVES.items():
        x = whole.to(**lies).requires_grad_()
        part = shard(whole, mesh, [Shard(dim)]).to(**lies).requires_grad_()
        first = shard(whole, mesh, [Shard(dim)]).requires_grad_()
        expected, actual, other = fn(x), fn(part), fn(first)
        assert_close(actual, expected, what=name)
        if expected.is_contiguous(**lies):
            assert lies_last(actual.to_local()), name
        expected.square().sum().backward()
        actual.square().sum().backward()
        other.square().sum().backward()
        assert_close(part.grad, x.grad, what=name)
        assert lies_last(part.grad.to_local()), name
        if name in EXACT:
            assert torch.equal(actual.to_local(), other.to_local()), name
            assert torch.equal(part.grad.to_local(), first.grad.to_local()), name


# Those that compute nothing have the same bits in each format.
EXACT = {"reflect", "roll", "flip", "rows", "columns", "whole", "indexed", "max_pool"}


@ranks(2)
def test_rows_of_channels_last_travel_without_copies(mesh):
    """Those of one sample are one run of memory on both sides."""
    if mesh.device_type != "cpu":
        pytest.skip("gloo copies a device's tensors")
    x = shard(torch.randn(1, 3, 8, 6), mesh, [Shard(2)])
    last = x.to(memory_format=torch.channels_last)

    def copies(tensor):
        with torch.profiler.profile() as profile:
            rows = shardtensor.halo_exchange(tensor, 1)
        count = sum(event.name == "aten::copy_" for event in profile.events())
        return rows, count

    expected, packed = copies(x)
    actual, in_place = copies(last)
    assert torch.equal(actual, expected)
    assert actual.is_contiguous(memory_format=torch.channels_last)
    assert (packed, in_place) == (3, 1)  # the rank's own rows
