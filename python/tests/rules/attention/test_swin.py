"""Windows of Swin transformers as public code writes them: roll, views that part an
image into windows, attention with a position bias and a mask, and the way back."""

import math

import pytest
import torch
import torch.nn.functional as F
from layouts import placements_of
from ranks import assert_close, check_op, ranks, shard, sharded
from torch.distributed.tensor import Shard

import shardtensor

WINDOW, CHANNELS, HEADS = 4, 8, 2
WEIGHTS = ((3 * CHANNELS, CHANNELS), (HEADS, WINDOW**2, WINDOW**2))


def weights():
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in WEIGHTS]


def image(rows=24, columns=16, batch=2):
    shape = batch, rows, columns, CHANNELS
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def mask_of(zeros, shift):
    """torchvision's: windows of a rolled image hold rows of several places."""
    count = 0
    for rows in ((0, -WINDOW), (-WINDOW, -shift), (-shift, None)):
        for columns in ((0, -WINDOW), (-WINDOW, -shift), (-shift, None)):
            zeros[rows[0] : rows[1], columns[0] : columns[1]] = count
            count += 1
    rows, columns = zeros.shape
    mask = zeros.view(rows // WINDOW, WINDOW, columns // WINDOW, WINDOW)
    mask = mask.permute(0, 2, 1, 3).reshape(-1, WINDOW**2)
    mask = mask.unsqueeze(1) - mask.unsqueeze(2)
    return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)


def by_products(q, k, v, bias, mask):
    """torchvision's attention."""
    scores = (q / math.sqrt(q.shape[-1])).matmul(k.transpose(-2, -1)) + bias
    if mask is not None:
        windows, size = mask.shape[0], scores.shape[-1]
        scores = scores.view(-1, windows, HEADS, size, size)
        scores = scores + mask.unsqueeze(1).unsqueeze(0)
        scores = scores.view(-1, HEADS, size, size)
    return F.softmax(scores, dim=-1).matmul(v)


def fused(q, k, v, bias, mask):
    """timm's attention."""
    if mask is not None:
        batch = q.shape[0] // mask.shape[0]
        mask = mask.view(1, -1, 1, *mask.shape[1:]).expand(batch, -1, HEADS, -1, -1)
        bias = bias + mask.reshape(-1, HEADS, *mask.shape[3:])
    return F.scaled_dot_product_attention(q, k, v, bias.expand(q.shape[0], -1, -1, -1))


def block(x, qkv_weight, bias, shift=2, attend=by_products):
    batch, rows, columns, channels = x.shape
    mask = None
    y = x
    if shift:
        y = torch.roll(x, (-shift, -shift), (1, 2))
        mask = mask_of(x.new_zeros(rows, columns), shift)
    y = y.view(batch, rows // WINDOW, WINDOW, columns // WINDOW, WINDOW, channels)
    y = y.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, WINDOW**2, channels)
    qkv = F.linear(y, qkv_weight)
    qkv = qkv.reshape(-1, WINDOW**2, 3, HEADS, channels // HEADS).permute(2, 0, 3, 1, 4)
    y = attend(*qkv.unbind(0), bias.unsqueeze(0), mask)
    y = y.transpose(1, 2).reshape(-1, WINDOW, WINDOW, channels)
    y = y.view(batch, rows // WINDOW, columns // WINDOW, WINDOW, WINDOW, channels)
    y = y.permute(0, 1, 3, 2, 4, 5).contiguous().view(batch, rows, columns, channels)
    if shift:
        y = torch.roll(y, (shift, shift), (1, 2))
    return x + y


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("attend", [by_products, fused])
def test_blocks(mesh, attend):
    cuts = [(placements_of(mesh, 1), None), (placements_of(mesh, 1, 2), None)]
    if mesh.size() > 1:
        pieces = [24 - 5 * (mesh.size() - 1)] + [5] * (mesh.size() - 1)
        cuts.append((placements_of(mesh, 1), {1: pieces}))
    for batch in (1, 2):
        x, w = image(batch=batch), weights()
        for placements, sizes in cuts:
            for shift in (0, 2):
                check_op(
                    lambda *x, shift=shift: block(*x, shift=shift, attend=attend),
                    sharded(x, placements, sizes),
                    *w,
                    mesh=mesh,
                )


def sent_by(mesh, sizes, shift, attend):
    """Exchanges and bytes that this rank sends, and what is gathered."""
    x = shard(image().detach(), mesh, [Shard(1)], sizes)
    w = [t.detach() for t in weights()]
    shardtensor.reset_comm_stats()
    shardtensor.reset_fallback_counts()
    block(x, *w, shift=shift, attend=attend)
    stats = shardtensor.comm_stats()
    return stats.exchanges, stats.bytes, shardtensor.fallback_counts()


@ranks(2, 3)
@pytest.mark.parametrize("attend", [by_products, fused])
def test_windows_that_no_cut_divides_send_nothing(mesh, attend):
    assert sent_by(mesh, None, 0, attend) == (0, 0, {})


@ranks(2)
@pytest.mark.parametrize("attend", [by_products, fused])
def test_other_windows_send_rows_once(mesh, attend):
    # Rolled there and back.
    exchanges, _, gathered = sent_by(mesh, None, 2, attend)
    assert (exchanges, gathered) == (2, {})
    # The view moves one row of both images to the rank with the window's others,
    # and the sum moves it back.
    row = 2 * 16 * CHANNELS * 8
    assert sent_by(mesh, {1: [13, 11]}, 0, attend) == (1, row, {})


@ranks("2x2")
@pytest.mark.parametrize("attend", [by_products, fused])
@pytest.mark.parametrize("shift", [0, 2])
def test_windows_of_rows_and_columns_gather_nothing(mesh, attend, shift):
    x, w = image().detach(), [t.detach() for t in weights()]
    part = shard(x, mesh, [Shard(1), Shard(2)])
    shardtensor.reset_comm_stats()
    with shardtensor.fallback_mode("error"):
        y = block(part, *w, shift=shift, attend=attend)
    # Windows become one dim, there and back; a shift is one more each.
    assert shardtensor.comm_stats().exchanges == (4 if shift else 2)
    assert y._spec == part._spec


@ranks("2x2")
def test_rolling_two_cut_dims_is_one_exchange(mesh):
    whole = image().detach()
    x = shard(whole, mesh, [Shard(1), Shard(2)])
    for fn in (lambda x: x.roll((-2, 3), (1, 2)), lambda x: x.flip((1, 2))):
        shardtensor.reset_comm_stats()
        assert_close(fn(x), fn(whole))
        assert shardtensor.comm_stats().exchanges == 1


# ---- volumes, as MONAI's SwinUNETR has them ---------------------------------

CUBE = (4, 2, 2)


def padded(x):
    """Until windows divide it."""
    pads = [-n % w for n, w in zip(x.shape[1:4], CUBE)]
    return F.pad(x, (0, 0, 0, pads[2], 0, pads[1], 0, pads[0]))


def window_partition(x):
    b, d, h, w, c = x.shape
    n, m, k = CUBE
    x = x.view(b, d // n, n, h // m, m, w // k, k, c)
    return x.permute(0, 1, 3, 5, 2, 4, 6, 7).contiguous().view(-1, n * m * k, c)


def window_reverse(windows, shape):
    b, d, h, w = shape
    n, m, k = CUBE
    x = windows.view(b, d // n, h // m, w // k, n, m, k, -1)
    return x.permute(0, 1, 4, 2, 5, 3, 6, 7).contiguous().view(b, d, h, w, -1)


def mask_of_cubes(shape, shift):
    """MONAI's compute_mask."""
    count, zeros = 0, torch.zeros(1, *shape, 1)
    slices = [(slice(-w), slice(-w, -s), slice(-s, None)) for w, s in zip(CUBE, shift)]
    for d in slices[0]:
        for h in slices[1]:
            for w in slices[2]:
                zeros[:, d, h, w, :] = count
                count += 1
    mask = window_partition(zeros).squeeze(-1)
    mask = mask.unsqueeze(1) - mask.unsqueeze(2)
    return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)


def attend_in_cubes(x, qkv_weight, table, mask):
    b, n, c = x.shape
    qkv = F.linear(x, qkv_weight).reshape(b, n, 3, HEADS, c // HEADS)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    scores = (q * (c // HEADS) ** -0.5) @ k.transpose(-2, -1)
    index = torch.arange(n)[:, None] - torch.arange(n)[None] + n - 1
    bias = table[index.reshape(-1)].reshape(n, n, -1).permute(2, 0, 1).contiguous()
    scores = scores + bias.unsqueeze(0)
    if mask is not None:
        windows = mask.shape[0]
        scores = scores.view(b // windows, windows, HEADS, n, n)
        scores = scores + mask.to(x.dtype).unsqueeze(1).unsqueeze(0)
        scores = scores.view(-1, HEADS, n, n)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c)


def cube_block(x, qkv_weight, table, shift):
    _, d, h, w, c = x.shape
    y = padded(F.layer_norm(x, (c,)))
    shape, mask = y.shape[:4], None
    if any(shift):
        mask = mask_of_cubes(shape[1:], shift)
        y = torch.roll(y, [-s for s in shift], (1, 2, 3))
    y = attend_in_cubes(window_partition(y), qkv_weight, table, mask)
    y = window_reverse(y.view(-1, *CUBE, c), shape)
    if any(shift):
        y = torch.roll(y, shift, (1, 2, 3))
    return x + y[:, :d, :h, :w, :].contiguous()


def cube_weights():
    shapes = (3 * CHANNELS, CHANNELS), (2 * math.prod(CUBE) - 1, HEADS)
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("shift", [(0, 0, 0), (2, 1, 1)])
def test_blocks_of_volumes(mesh, shift):
    shape = 1, 14, 6, 5, CHANNELS
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    cuts = [(placements_of(mesh, 1), None), (placements_of(mesh, 1, 2), None)]
    if mesh.ndim == 1:
        cuts.append(
            (
                placements_of(mesh, 1),
                {1: [14 - mesh.size() + 1] + [1] * (mesh.size() - 1)},
            )
        )
    for placements, sizes in cuts:
        check_op(
            lambda *x: cube_block(*x, shift),
            sharded(x, placements, sizes),
            *cube_weights(),
            mesh=mesh,
        )


@ranks(2)
def test_cubes_that_no_cut_divides_send_nothing(mesh):
    x = shard(torch.randn(1, 16, 6, 5, CHANNELS, dtype=torch.float64), mesh, [Shard(1)])
    shardtensor.reset_comm_stats()
    shardtensor.reset_fallback_counts()
    cube_block(x, *(t.detach() for t in cube_weights()), (0, 0, 0))
    assert shardtensor.comm_stats().exchanges == 0
    assert shardtensor.fallback_counts() == {}
