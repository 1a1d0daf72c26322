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


def kept_in_zeros_like(x, mesh):
    spectrum = fft.rfft2(x)
    out = torch.zeros_like(spectrum)
    for rows in (slice(1, 3), slice(-3, None)):
        out[..., rows, COLUMNS] = spectrum[..., rows, COLUMNS] * 2j
    return out


def two_corners(x, mesh):
    spectrum = fft.rfft2(x)
    out = zeros_like_spectrum(x, mesh)
    out[..., :3, COLUMNS] = spectrum[..., :3, COLUMNS] * 2j
    out[..., -3:, COLUMNS] = spectrum[..., -3:, COLUMNS]
    return out


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
@pytest.mark.parametrize("modes", [kept, two_corners, kept_in_zeros_like])
def test_kept_modes_are_those_of_one_device(mesh, modes):
    for placements, sizes in cuts(mesh):
        part = sharded(signal(), placements, sizes)
        check_op(
            lambda x: fft.irfft2(modes(x, mesh), s=(12, 18)),
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


def hook_on(out, seen):
    out.register_hook(seen.append)


def node_hook_on(out, seen):
    out.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))


def after_node_hook_on(out, seen):
    out.grad_fn.register_hook(lambda _, grads: seen.append(grads[0]))


def retain(out, seen):
    out.retain_grad()
    seen.append(out)


def ask(out, seen):
    seen.append(None)


READERS = {
    "grad": ask,
    "retain_grad": retain,
    "hook": hook_on,
    "hook before its node": node_hook_on,
    "hook after its node": after_node_hook_on,
}


@ranks(2, 3)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_zeros_have_gradients(mesh, reader, shifted):
    """Of the whole spectrum: whoever asks for them gets all."""
    x = signal()
    weight = torch.randn(12, 18, dtype=torch.float64)

    def gradient(x):
        seen = []
        out = zeros_like_spectrum(x, mesh)
        out[..., ROWS, COLUMNS] = fft.rfft2(x)[..., ROWS, COLUMNS]
        READERS[reader](out, seen)
        moved = fft.ifftshift(out, dim=-2) if shifted else out
        loss = (fft.irfft2(moved, s=(12, 18)) * weight).square().sum()
        if reader == "grad":
            return torch.autograd.grad(loss, out)[0]
        loss.backward()
        return seen[0].grad if reader == "retain_grad" else seen[0]

    assert_close(gradient(shard(x, mesh, [Shard(2)]).requires_grad_()), gradient(x))


CHANGES = {
    "in place": lambda out: out.add_(1),
    "a view": lambda out: out[..., 5].fill_(1j),
    "another box": lambda out: out[..., 9:, 6:].copy_(torch.ones(3, 4)),
    "one sample": lambda out: out[1].fill_(1j),
    "one row": lambda out: out[:, :, 11].add_(1),
    "transposed": lambda out: out.transpose(2, 3)[..., 5:, 9:].fill_(2),
    "windows": lambda out: out[..., 9].unfold(2, 3, 2)[..., 2:, 1:].fill_(2),
    "a diagonal": lambda out: out.diagonal(0, 2, 3)[..., 4:].fill_(1j),
    "flat": lambda out: out.flatten(2)[..., 95:].fill_(4),
    "every third row": lambda out: out[..., ::3, 6:].fill_(1 - 1j),
    "a view of a view": lambda out: out[1:, 1:][..., 8:, :][..., 7].fill_(3),
    "real parts": lambda out: torch.view_as_real(out)[..., 8:, 6:, 0].fill_(1),
    "rows by index": lambda out: out[:, :, [0, 9]].mul_(2).sub_(1),
    "rows that are put": lambda out: out.index_fill_(2, torch.tensor([0, 9]), 1j),
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
@pytest.mark.parametrize("like", [False, True])
def test_kept_modes_alone_move(mesh, like):
    x = shard(signal(), mesh, [Shard(2)]).requires_grad_()
    spectrum = fft.rfft2(x)
    modes = spectrum[..., ROWS, COLUMNS]
    out = torch.zeros_like(spectrum) if like else zeros_like_spectrum(x, mesh)
    out[..., ROWS, COLUMNS] = modes
    half = 2 * 3 * 12 * 2 * 16 // 2  # rows of two columns for the other rank
    shardtensor.reset_comm_stats()
    fft.irfft2(out, s=(12, 18))
    assert comm_stats().exchanges <= 1 and comm_stats().bytes <= half
    shardtensor.reset_comm_stats()
    torch.autograd.grad(modes.real.mul(2), x, torch.ones_like(modes.real))
    assert comm_stats().exchanges <= 1 and comm_stats().bytes <= half


@ranks(1, 2)
def test_zeros_that_nothing_was_written_into(mesh):
    x = signal().detach()
    s = shard(x, mesh, [Shard(2)])
    for write in (lambda out: out, lambda out: out[..., :0, :0].fill_(1)):
        out = torch.zeros_like(fft.rfft2(s))
        write(out)
        assert_close(fft.irfft2(out, s=(12, 18)), torch.zeros_like(x))


@ranks(2)
def test_two_corners_alone_move(mesh):
    x = shard(signal(), mesh, [Shard(2)]).requires_grad_()
    half = 2 * 3 * 12 * 2 * 16 // 2  # rows of two columns for the other rank
    out = two_corners(x, mesh)
    shardtensor.reset_comm_stats()
    y = fft.irfft2(out, s=(12, 18))
    assert comm_stats().bytes <= half
    y.sum().backward()
    assert comm_stats().bytes <= 3 * half


SUMS = {
    "of both": lambda a, b: a + b,
    "in place": lambda a, b: a.add_(b),
    "of a share": lambda a, b: a.add(b, alpha=2),
    "of one": lambda a, b: a + torch.ones_like(b),
    "and then": lambda a, b: (a + b).add_(1),
}


@ranks(2, 3)
@pytest.mark.parametrize("add", SUMS)
def test_sums_of_kept_modes(mesh, add):
    def run(x):
        a, b = kept(x, mesh), two_corners(x, mesh)
        return fft.irfft2(SUMS[add](a, b), s=(12, 18))

    x = signal().detach()
    assert_close(run(shard(x, mesh, [Shard(2)])), run(x))


@ranks(2)
@pytest.mark.parametrize("shifted", [False, True])
def test_gradients_of_kept_modes_alone_move(mesh, shifted):
    modes = torch.randn(2, 3, 4, 2, dtype=torch.complex128)
    modes = shard(modes, mesh, [Shard(3)]).requires_grad_()
    out = zeros_like_spectrum(shard(signal(), mesh, [Shard(2)]), mesh)
    out[..., ROWS, COLUMNS] = modes
    if shifted:
        out = fft.ifftshift(out, dim=-2)
    y = fft.irfft2(out, s=(12, 18))
    shardtensor.reset_comm_stats()
    y.sum().backward()
    half = 2 * 3 * 12 * 2 * 16 // 2  # rows of two columns for the other rank
    assert comm_stats().bytes <= half + 2 * 3 * 4 * 16


@ranks(2)
def test_inference_mode_knows_nothing(mesh):
    x = signal().detach()
    with torch.inference_mode():
        y = fft.irfft2(kept(shard(x, mesh, [Shard(2)]), mesh), s=(12, 18))
        assert_close(y, fft.irfft2(kept(x, mesh), s=(12, 18)))
