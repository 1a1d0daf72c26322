"""Tensors whose memory holds other numbers than they do: x.conj(), x.imag of it."""

import pytest
import rig
import torch
from ranks import assert_close, check_op, ranks, sharded
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor
from shardtensor import distributed as collectives

F = nn.functional

VIEWS = {
    "conjugate": lambda x: x.conj(),
    "negative": lambda x: x.conj().imag,
    "adjoint": lambda x: x.mT.mH.mT,
    "sliced": lambda x: x.conj()[..., 1:],
}

ROWS = torch.tensor([2, 0, 1, 1, 3])


def rows_like(x):
    return ROWS.view(1, 1, -1, 1).expand(*x.shape[:2], 5, x.shape[3])


def weight_like(x):
    values = torch.linspace(-1, 1, 81, dtype=torch.float64).view(3, 3, 3, 3)
    return values.to(x.dtype)


def redistribute(x, *placements):
    if not isinstance(x, ShardTensor):
        return x * 1
    return x.redistribute(placements=list(placements) * x.device_mesh.ndim) * 1


# A step of every family, of (2, 3, 7, 6) complex or real.
STEPS = {
    "pointwise": lambda x: torch.addcmul(x, x, x).abs() + (2 * x).real,
    "where": lambda x: torch.where(x.real > 0, x, 0.5).masked_fill(x.real < -1, 1.0),
    "in place": lambda x: (x * 1).conj().mul_(2).add_(x),
    "copy": lambda x: torch.zeros_like(x).copy_(x).clone().contiguous() * 2,
    "sum": lambda x: (x.sum(-2), x.mean((-1, -2)), x.prod(-1), x.std()),
    "scan": lambda x: (x.cumsum(-2), x.cumprod(-1), x.diff(dim=-2)),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-2),
    "product": lambda x: (x @ x.mT, torch.einsum("bchw,bdhw->bcd", x, x)),
    "dot": lambda x: torch.vdot(x.flatten(), x.flatten()),
    "joined": lambda x: (torch.cat([x, 2 * x], -1), torch.stack([x, x], 1)),
    "moved": lambda x: (x.flip(-2), x.roll(2, -2), x.tile(2)),
    "padded": lambda x: (F.pad(x, (1, 2, 2, 1)), F.pad(x, (1, 2, 2, 1), "circular")),
    "index": lambda x: (x[:, :, ROWS], x.gather(2, rows_like(x))),
    "written": lambda x: torch.zeros_like(x).scatter_add(2, rows_like(x), x[:, :, :5]),
    "mask": lambda x: x[x.real > 0],
    "views": lambda x: (x.reshape(2, -1), x.unfold(2, 3, 2), x.split(3, -2)[1]),
    "diagonal": lambda x: (x.tril(), x.diagonal(dim1=-1, dim2=-2)),
    "dtype": lambda x: x.to(torch.complex64 if x.is_complex() else torch.float32),
    "fft": lambda x: (torch.fft.fft(x, dim=-2), torch.fft.ifft2(x)),
    "irfft": lambda x: torch.fft.irfft2(x),
    "convolution": lambda x: F.conv2d(x, weight_like(x), padding=1),
    "transposed": lambda x: F.conv_transpose2d(x, weight_like(x), padding=1, stride=2),
    "gathered": lambda x: redistribute(x, Replicate()),
    "elsewhere": lambda x: redistribute(x, Shard(1)),
}

REAL_STEPS = {
    "softmax": lambda x: (x.softmax(-2), x.logsumexp(-2)),
    "extremes": lambda x: (x.amax(-2), x.sort(-2).values),
    "statistics": lambda x: F.batch_norm(x, None, None, training=True),
    "layer": lambda x: F.layer_norm(x, x.shape[1:]),
    "pooling": lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1)),
    "interpolation": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "attention": lambda x: F.scaled_dot_product_attention(x, x.flip(-1), x),
    "loss": lambda x: F.mse_loss(x, 2 * x),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.tail
@ranks(2, 3, "2x2", timeout=200)
def test_families_read_what_a_view_shows(mesh, view):
    generator = rig.generator(0)
    x = torch.randn(2, 3, 7, 6, dtype=torch.complex128, generator=generator)
    x.requires_grad_()
    real = not VIEWS[view](x).is_complex()
    steps = STEPS | REAL_STEPS if real else STEPS
    layouts = [2, *[3] * (mesh.ndim - 1)], [2] * mesh.ndim, [0, *[2] * (mesh.ndim - 1)]
    for dims in layouts:
        inputs = sharded(x, [Shard(dim) for dim in dims])
        for step in steps.values():
            check_op(
                lambda x, step=step: step(VIEWS[view](x)),
                inputs,
                mesh=mesh,
                second_order=True,
            )


@ranks(2, 3)
def test_pieces_may_be_such_views(mesh):
    x = torch.randn(7, 6, dtype=torch.complex128)
    rank, count = mesh.get_local_rank(), mesh.size()
    for view in VIEWS.values():
        whole = view(x)
        piece = whole.tensor_split(count)[rank]

        def of(local, placement):
            return ShardTensor.from_local(
                local, mesh, [placement], sharding_shapes="infer"
            )

        assert_close(of(piece, Shard(0)), whole)
        moved = of(piece, Shard(0)).redistribute(placements=[Shard(1)])
        assert_close(moved, whole)
        copy = view(x.clone()).tensor_split(count)[rank]
        assert_close(of(copy, Shard(0)).mul_(2), 2 * whole)
        for placement in (Replicate(), Shard(0)):
            terms = of(whole, Partial())
            assert_close(terms.redistribute(placements=[placement]), whole * count)
        assert_close(shardtensor.scatter_tensor(whole, 0, mesh, [Shard(0)]), whole)
        assert_close(shardtensor.distribute_tensor(whole, mesh, [Shard(0)]), whole)


@ranks(2, 3)
def test_collectives_move_what_such_views_show(mesh):
    x = torch.randn(7, 6, dtype=torch.complex128)
    group, count = mesh.get_group(), mesh.size()
    for view in VIEWS.values():
        whole = view(x)
        pieces = whole.tensor_split(count)
        mine = pieces[mesh.get_local_rank()]
        sizes = [len(piece) for piece in pieces]
        assert_close(collectives.all_gather_v(mine, sizes, group=group), whole)
        assert_close(collectives.all_reduce(whole, group=group), whole * count)
        assert_close(collectives.broadcast(whole, 0, group=group), whole)
        scattered = collectives.reduce_scatter_v(whole, sizes, group=group)
        assert_close(scattered, mine * count)
