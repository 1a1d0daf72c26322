"""Spectra of which a layer keeps some modes: the zeros stay where they are."""

import contextlib

import pytest
import torch
from ranks import assert_close, check_op, ranks, shard, sharded, uneven
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardTensor, comm_stats, new_tensors_on

fft = torch.fft
ROWS, COLUMNS = slice(3, 7), slice(None, 2)


def zeros_like_spectrum(x, mesh):
    sizes = *x.shape[:-1], x.shape[-1] // 2 + 1
    on_mesh = isinstance(x, ShardTensor)
    with new_tensors_on(mesh) if on_mesh else contextlib.nullcontext():
        return torch.zeros(sizes, dtype=torch.complex128)


def kept(x, mesh):
    """Some modes of a signal, shifted and back, among zeros."""
    spectrum = fft.fftshift(fft.rfft2(x), dim=-2)
    out = zeros_like_spectrum(x, mesh)
    out[..., ROWS, COLUMNS] = (2 - 1j) * spectrum[..., ROWS, COLUMNS]
    return fft.ifftshift(out, dim=-2)


def signal():
    return torch.randn(2, 3, 12, 18, dtype=torch.float64, requires_grad=True)


def cuts(mesh):
    """Rows unevenly, columns with an empty piece, both."""
    if mesh.ndim == 2:
        return [([Shard(2), Shard(3)], {})]
    empty = [20 - mesh.size(), *[1] * (mesh.size() - 2), 0]
    return [
        ([Shard(2)], {2: uneven(12, mesh.size())}),
        ([Shard(3)], {3: empty if mesh.size() > 1 else [18]}),
    ]


@ranks(1, 2, 3, "2x2")
def test_kept_modes_are_those_of_one_device(mesh):
    for placements, sizes in cuts(mesh):
        part = sharded(signal(), placements, sizes)
        check_op(
            lambda x: fft.irfft2(kept(x, mesh), s=(12, 18)),
            part,
            mesh=mesh,
            second_order=True,
        )


@ranks(2, 3, "2x2")
def test_in_three_dims(mesh):
    def keep(x):
        spectrum = fft.rfftn(x)
        out = zeros_like_spectrum(x, mesh)
        out[:2, :3, :2] = spectrum[:2, :3, :2].conj()
        return fft.irfftn(out, s=x.shape)

    x = torch.randn(6, 8, 10, dtype=torch.float64, requires_grad=True)
    for dims in ((0,), (1,), (2,)) if mesh.ndim == 1 else ((0, 1), (1, 2)):
        part = sharded(x, [Shard(dim) for dim in dims])
        check_op(keep, part, mesh=mesh, second_order=True)


@ranks(2, 3)
def test_zeros_have_gradients(mesh):
    """Of the whole spectrum: whoever asks for them gets all."""
    x = signal()
    weight = torch.randn(12, 18, dtype=torch.float64)

    def gradient(x):
        out = kept(x, mesh)
        y = fft.irfft2(out, s=(12, 18))
        return torch.autograd.grad((y * weight).square().sum(), out)[0]

    assert_close(gradient(shard(x, mesh, [Shard(2)])), gradient(x))


CHANGES = {
    "in place": lambda out: out.add_(1),
    "a view": lambda out: out[..., 5].fill_(1j),
    "another box": lambda out: out[..., 9:, 6:].copy_(torch.ones(3, 4)),
    "two boxes": lambda out: torch._foreach_add_([out[0], out[1]], 2.0),
    "local": lambda out: getattr(out, "to_local", lambda: out)().add_(1),
    "data": lambda out: setattr(out, "data", out.data + 1),
    "memory of data": lambda out: out.data.add_(1),
    "data of a view": lambda out: out[..., 5].data.fill_(1j),
    "detached": lambda out: out.detach().mul_(2).sub_(1),
}


@ranks(2, 3)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_written_later_counts(mesh, change):
    def run(x):
        out = kept(x.detach(), mesh)
        CHANGES[change](out)
        return fft.irfft2(out, s=(12, 18))

    x = signal()
    assert_close(run(shard(x, mesh, [Shard(2)])), run(x))


TAKEN = {
    "whole": lambda out: out.data,
    "view": lambda out: out[..., 5:].data,
}


@ranks(2, 3)
@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("written_again", [False, True])
def test_data_that_was_taken_before_counts(mesh, taken, written_again):
    """It has versions of its own, which may be those of the tensor by chance."""

    def run(x):
        out = zeros_like_spectrum(x, mesh)
        data = TAKEN[taken](out)
        out[..., ROWS, COLUMNS] = fft.rfft2(x)[..., ROWS, COLUMNS]
        data.add_(1j)
        if written_again:
            out[..., ROWS, COLUMNS].mul_(2)
        return fft.irfft2(out, s=(12, 18))

    x = signal().detach()
    assert_close(run(shard(x, mesh, [Shard(2)])), run(x))


@ranks(2, 3)
def test_data_of_a_view_that_was_written_through_counts(mesh):
    def run(x):
        out = zeros_like_spectrum(x, mesh)
        rows = out[..., ROWS, :]
        rows[..., COLUMNS] = fft.rfft2(x)[..., ROWS, COLUMNS]
        rows.data.add_(1j)
        return fft.irfft2(out, s=(12, 18))

    x = signal().detach()
    assert_close(run(shard(x, mesh, [Shard(2)])), run(x))


@ranks(2, 3)
def test_what_is_written_into_the_data_counts(mesh):
    """And then the tensor once, whose version is that of the data before."""

    def run(x):
        out = zeros_like_spectrum(x, mesh)
        out.data[..., ROWS, COLUMNS] = fft.rfft2(x)[..., ROWS, COLUMNS]
        out[..., 5].fill_(1j)
        return fft.irfft2(out, s=(12, 18))

    x = signal().detach()
    assert_close(run(shard(x, mesh, [Shard(2)])), run(x))


@ranks(2)
def test_kept_modes_alone_move(mesh):
    x = shard(signal(), mesh, [Shard(2)]).requires_grad_()
    spectrum = fft.rfft2(x)
    modes = spectrum[..., ROWS, COLUMNS]
    out = zeros_like_spectrum(x, mesh)
    out[..., ROWS, COLUMNS] = modes
    half = 2 * 3 * 12 * 2 * 16 // 2  # rows of two columns for the other rank
    shardtensor.reset_comm_stats()
    fft.irfft2(out, s=(12, 18))
    assert comm_stats().exchanges <= 1 and comm_stats().bytes <= half
    shardtensor.reset_comm_stats()
    torch.autograd.grad(modes.real.mul(2), x, torch.ones_like(modes.real))
    assert comm_stats().exchanges <= 1 and comm_stats().bytes <= half


@ranks(2)
def test_inference_mode_knows_nothing(mesh):
    x = signal().detach()
    with torch.inference_mode():
        y = fft.irfft2(kept(shard(x, mesh, [Shard(2)]), mesh), s=(12, 18))
        assert_close(y, fft.irfft2(kept(x, mesh), s=(12, 18)))
