"""Fourier transforms of one device, along whole and along cut dims."""

import pytest
import torch
from layouts import ALL, check, check_native, placements_of
from ranks import (
    assert_close,
    check_op,
    partitions,
    ranks,
    shard,
    sharded,
    uneven,
)
from torch.distributed.tensor import Partial, Shard

import shardtensor

fft = torch.fft


def signal(*shape, dtype=torch.complex128):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


COMPLEX = {
    "fft": lambda x: fft.fft(x, dim=1),
    "fft_longer": lambda x: fft.fft(x, n=9, dim=2, norm="ortho"),
    "ifft": lambda x: fft.ifft(x, dim=0),
    "fft2": lambda x: fft.fft2(x),
    "fft2_first": lambda x: fft.fft2(x, dim=(0, 1), norm="forward"),
    "ifftn": lambda x: fft.ifftn(x, norm="ortho"),
    "hfft": lambda x: fft.hfft(x, dim=2),
    "hfft_first": lambda x: fft.hfft(x, n=5, dim=0),
    "hfft2": lambda x: fft.hfft2(x, norm="forward"),
    "hfftn": lambda x: fft.hfftn(x),
    "irfft": lambda x: fft.irfft(x, n=7, dim=1),
    "irfft2": lambda x: fft.irfft2(x),
    "irfftn": lambda x: fft.irfftn(x, s=(4, 6, 7), norm="ortho"),
    "conj": lambda x: fft.ifft(fft.fft(x, dim=1).conj(), dim=2),
}
REAL = {
    "rfft": lambda x: fft.rfft(x, dim=1),
    "rfft_last": lambda x: fft.rfft(x, n=7),
    "rfft2": lambda x: fft.rfft2(x, norm="ortho"),
    "rfft2_first": lambda x: fft.rfft2(x, dim=(2, 0)),
    "rfftn": lambda x: fft.rfftn(x),
    "fftn": lambda x: fft.fftn(x),
    "ihfft": lambda x: fft.ihfft(x, dim=0),
    "ihfft2": lambda x: fft.ihfft2(x),
    "hfft": lambda x: fft.hfft(x, dim=1),
    "spectral": lambda x: fft.irfft2(fft.rfft2(x)[:, :2, :2], s=(5, 6)),
}


@ranks(*ALL)
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_signals(mesh, name):
    x = signal(4, 5, 6)
    check(mesh, None, COMPLEX[name], x=x, second_order=True)


@ranks(*ALL)
@pytest.mark.parametrize("name", REAL)
def test_real_signals(mesh, name):
    x = signal(4, 5, 6, dtype=torch.float64)
    check(mesh, None, REAL[name], x=x, second_order=True, saves=True)


@ranks(2, 3)
@pytest.mark.parametrize("name", ["fft", "fft2", "rfft2", "hfft2", "irfft2", "ihfft"])
def test_nothing_is_gathered(mesh, name):
    transform = getattr(fft, name)
    x = signal(4, 6, 8)
    if name in ("rfft2", "ihfft"):
        x = x.detach().real.clone().requires_grad_()
    check_native(mesh, None, transform, x=x)


@ranks(2)
def test_a_cut_dim_costs_one_exchange(mesh):
    x = shard(signal(2, 6, 8), mesh, [Shard(1)])
    shardtensor.reset_comm_stats()
    fft.fft(x)
    assert shardtensor.comm_stats().exchanges == 0
    y = fft.fft2(x)
    assert shardtensor.comm_stats().exchanges == 1
    assert y.placements == (Shard(2),)
    fft.rfft2(x.real)
    assert shardtensor.comm_stats().exchanges == 2


# (mesh, shape, cut dims, transform, its inverse): how many dims are cut and
# transformed.
ROUND_TRIPS = {
    "rows": ((4, 3, 12, 10), (2,), fft.rfft2, fft.irfft2, 1),
    "columns": ((4, 3, 12, 10), (3,), fft.rfft2, fft.irfft2, 1),
    "columns of one sample": ((1, 6, 12, 10), (3,), fft.rfft2, fft.irfft2, 1),
    "samples": ((4, 3, 12, 10), (0,), fft.rfft2, fft.irfft2, 0),
    "volume": ((1, 2, 8, 6, 10), (2,), fft.rfftn, fft.irfftn, 1),
    "line": ((4, 3, 20), (2,), fft.rfft, fft.irfft, 1),
    "complex": ((4, 3, 12, 10), (2,), fft.fft2, fft.ifft2, 1),
    "pencils": ((4, 6, 12, 10), (2, 3), fft.rfft2, fft.irfft2, 2),
    "columns first": ((4, 6, 12, 10), (3, 2), fft.rfft2, fft.irfft2, 2),
}


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_spectrum_comes_home(mesh, name):
    shape, dims, forward, inverse, cuts = ROUND_TRIPS[name]
    if len(dims) != mesh.ndim:
        return
    transformed = tuple(range(2 if forward != fft.rfft2 else -2, len(shape)))
    if forward in (fft.rfft2, fft.fft2):
        transformed = (-2, -1)
    sizes = {dims[0]: uneven(shape[dims[0]], mesh.size(0))}

    def there_and_back(x):
        if forward is fft.rfft:
            return inverse(forward(x) * 2, n=shape[-1])
        if inverse is fft.ifft2:
            return inverse(forward(x) * 2)
        extents = [shape[dim] for dim in transformed]
        return inverse(forward(x, dim=transformed) * 2, s=extents, dim=transformed)

    x = shard(torch.randn(shape), mesh, placements_of(mesh, *dims), sizes)
    x.requires_grad_()
    with shardtensor.fallback_mode("error"):
        shardtensor.reset_comm_stats()
        y = there_and_back(x)
        assert y._spec == x._spec
        assert shardtensor.comm_stats().exchanges == 2 * cuts
        (y.real if y.is_complex() else y).sum().backward()
        assert shardtensor.comm_stats().exchanges == 4 * cuts
    assert x.grad._spec == x._spec


@ranks(2)
def test_two_transposes_are_all_that_moves(mesh):
    x = shard(torch.randn(2, 3, 16, 24), mesh, [Shard(2)]).requires_grad_()
    shardtensor.reset_comm_stats()
    fft.irfft2(fft.rfft2(x)).sum().backward()
    # Half of each rank's spectrum: 13 of 24 columns, 8 bytes each; both ways.
    half = 2 * 3 * 8 * 13 * 8 // 2
    assert shardtensor.comm_stats().bytes <= 4 * half * 14 / 13


@ranks(2, 3)
def test_signals_of_one_size_go_to_their_own_homes(mesh):
    x = torch.randn(4, 6, 12, 10)
    rows = shard(x, mesh, [Shard(2)], {2: uneven(12, mesh.size())})
    samples = shard(x, mesh, [Shard(0)])
    spectra = fft.rfft2(rows), fft.rfft2(samples)
    assert fft.irfft2(spectra[0])._spec == rows._spec
    assert fft.irfft2(spectra[1])._spec == samples._spec
    # Other channels and another grid: the same placements.
    smaller = spectra[0][:, :3, :, :4]
    assert fft.irfft2(smaller, s=(8, 6)).placements == rows.placements


PLANES = ["fft2", "ifft2", "rfft2", "irfft2", "hfft2", "ihfft2", "fftn", "rfftn"]


def is_of_real(name):
    return name in ("rfft2", "ihfft2", "rfftn")


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", PLANES)
def test_a_plane_is_never_gathered(mesh, name):
    x = signal(12, 10)
    if is_of_real(name):
        x = x.detach().real.clone().requires_grad_()
    check_native(mesh, None, getattr(fft, name), x=x)


@ranks("2x2")
def test_nor_are_few_lines_on_many_ranks(mesh):
    for cut in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)]):
        x = shard(torch.randn(3, 32, dtype=torch.float64), mesh, cut)
        with shardtensor.fallback_mode("error"):
            lines = fft.rfft(x)
            assert_close(lines, fft.rfft(x.full_tensor()))
            assert_close(fft.irfft(lines, n=32), x.full_tensor())
            assert_close(fft.fft2(x), fft.fft2(x.full_tensor()))


INVERSES = {
    "fft2": fft.ifft2,
    "fftn": fft.ifftn,
    "rfft2": fft.irfft2,
    "rfftn": fft.irfftn,
}
# (shape, cut dim): the most exchanges of a forward transform of real and of complex
# values. A plane that is cut where rfft2 starts has nowhere else to go: twice.
CUTS = {
    "plane rows": ((12, 10), 0, 1, 1),
    "plane columns": ((12, 10), 1, 2, 1),
    "image rows": ((4, 12, 10), 1, 1, 1),
    "image columns": ((4, 12, 10), 2, 1, 1),
    "samples": ((4, 12, 10), 0, 0, 0),
}


@ranks(2, 3)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", INVERSES)
def test_every_cut_costs_an_exchange_and_comes_home(mesh, name, cut):
    shape, dim, of_real, of_complex = CUTS[cut]
    dtype = torch.float64 if is_of_real(name) else torch.complex128
    whole = torch.randn(shape, dtype=dtype)
    x = shard(whole, mesh, [Shard(dim)], {dim: uneven(shape[dim], mesh.size())})
    options = {"dim": (-2, -1)}
    most = of_real if is_of_real(name) else of_complex
    with shardtensor.fallback_mode("error"):
        shardtensor.reset_comm_stats()
        spectrum = getattr(fft, name)(x, **options)
        assert shardtensor.comm_stats().exchanges <= most
        y = INVERSES[name](spectrum, s=shape[-2:], **options)
        assert shardtensor.comm_stats().exchanges <= 2 * most
    assert y._spec == x._spec
    assert_close(y, whole)


@ranks(2, 3)
def test_one_line_has_no_other_dim_to_cut(mesh):
    shardtensor.set_fallback_mode("silent")
    shardtensor.reset_fallback_counts()
    check_op(fft.fft, sharded(signal(6), [Shard(0)]), mesh=mesh, backward=False)
    assert list(shardtensor.fallback_counts()) == ["aten::_fft_c2c"]


@ranks(2)
def test_what_need_not_move_stays_for_others_homes(mesh):
    fft.fft2(shard(signal(4, 3, 12, 10), mesh, [Shard(2)]))
    samples = shard(signal(4, 3, 12, 10), mesh, [Shard(0)])
    shardtensor.reset_comm_stats()
    assert fft.ifft2(samples)._spec == samples._spec
    assert shardtensor.comm_stats().exchanges == 0


@ranks(2)
def test_lines_that_need_not_move_stay_for_others_homes(mesh):
    signals = torch.randn(4, 6, 1, 1, 8)  # no other test has five dims
    fft.rfft(shard(signals, mesh, [Shard(1)]))
    for rows in ([2, 2], [3, 1]):
        lines = shard(fft.rfft(signals), mesh, [Shard(0)], {0: rows})
        shardtensor.reset_comm_stats()
        for back in (fft.irfft(lines, n=8), fft.hfft(lines, n=8)):
            assert back.placements == (Shard(0),)
            assert list(back._spec.partition(0).sizes) == rows
        assert shardtensor.comm_stats().exchanges == 0
        fft.rfft(shard(signals, mesh, [Shard(0)]))  # even rows


@ranks(2, "2x2")
def test_tangents_go_along(mesh):
    forward_ad = torch.autograd.forward_ad
    x, t = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)

    def jvp(x, t):
        with forward_ad.dual_level():
            y = fft.irfft2(fft.rfft2(forward_ad.make_dual(x, t)) * 2)
            return forward_ad.unpack_dual(y).tangent

    expected = jvp(x, t)
    placements = placements_of(mesh, 2, 3)
    parts = (shard(each, mesh, placements) for each in (x, t))
    assert_close(jvp(*parts), expected)


@ranks(2, "2x2")
@pytest.mark.parametrize("shape", [(5,), (4, 6)])
def test_sums_are_transformed_term_by_term_or_scattered(mesh, shape):
    terms = [Partial()] * mesh.ndim
    for transform in (
        lambda x: fft.fft(x).abs(),
        lambda x: fft.ifft(x.conj(), norm="ortho").abs(),
        lambda x: fft.irfft(x, n=2 * shape[-1] - 1).sin(),
        lambda x: fft.rfft(x.real).abs(),
    ):
        x = sharded(signal(*shape), terms)
        check_op(transform, x, mesh=mesh, second_order=True)
    shardtensor.reset_comm_stats()
    fft.fft(shard(signal(*shape), mesh, terms))
    assert shardtensor.comm_stats().all_reduces == 0


# ---- what conj() and imag leave to the reader -------------------------------

LAZY = {
    "conj": lambda x: x.conj(),
    "imag": lambda x: x.conj().imag,
    "real": lambda x: torch.view_as_real(x.conj().resolve_conj()) * 2,
    "bits": lambda x: x.detach().conj().resolve_conj().view(torch.float64),
    "matmul": lambda x: x.conj() @ x.mT.conj(),
    "sum": lambda x: x.conj().sum(1),
    "moved": lambda x: x.conj().reshape(-1),
    "largest": lambda x: x.conj().imag.amax(1),
}


@ranks(*ALL)
@pytest.mark.parametrize("name", LAZY)
def test_lazy_conjugates(mesh, name):
    check(mesh, None, LAZY[name], x=signal(4, 6))


@ranks(2, 3)
def test_a_view_of_a_conjugate_writes_into_the_tensor(mesh):
    x = torch.randn(4, 6, dtype=torch.complex128)
    for dim in (0, 1):
        part = shard(x, mesh, [Shard(dim)])
        part.conj().imag.mul_(2)
        expected = x.clone()
        expected.conj().imag.mul_(2)
        assert_close(part, expected)


@ranks(2, 3)
def test_a_wrong_dtype_is_pytorchs_error_on_every_rank(mesh):
    """Also on ranks without rows."""
    x = torch.ones(2, 6, dtype=torch.complex128)
    with pytest.raises(RuntimeError) as expected:
        fft.ihfft2(x)
    for pieces in partitions(2, mesh.size()):
        part = shard(x, mesh, [Shard(0)], {0: pieces})
        with pytest.raises(RuntimeError) as raised:
            fft.ihfft2(part)
        assert str(raised.value) == str(expected.value)


@ranks(2, "2x2")
def test_a_transform_of_no_dims_is_a_copy(mesh):
    x = torch.ones(4, 6, dtype=torch.complex128)
    part = shard(x, mesh, [Shard(0)] * mesh.ndim)
    copy = fft.fftn(part, dim=())
    copy.mul_(2)
    assert_close(part, x)
    assert_close(copy, 2 * x)


# ---- short-time transforms --------------------------------------------------


@ranks(*ALL)
@pytest.mark.parametrize("options", [{}, {"center": False}, {"normalized": True}])
def test_stft(mesh, options):
    window = torch.hann_window(8, dtype=torch.float64)

    def stft(x):
        return torch.stft(x, 8, 3, window=window, return_complex=True, **options)

    check(mesh, (3, 30), lambda x: stft(x).abs(), second_order=True)
    check(mesh, (30,), lambda x: stft(x).abs())
    check_native(mesh, (3, 30), lambda x: stft(x).abs())


@ranks(2, 3, "2x2")
def test_istft_brings_the_signal_back(mesh):
    window = torch.hann_window(8, dtype=torch.float64)

    def back(x):
        spectrum = torch.stft(x, 8, 2, window=window, return_complex=True)
        return torch.istft(spectrum, 8, 2, window=window)

    check_native(mesh, (3, 30), back, second_order=True)
    check_native(mesh, (30,), back)


@ranks(2, "2x2")
def test_signals_that_do_not_fit_are_pytorchs_errors(mesh):
    x = torch.randn(4, 5, 6, dtype=torch.cfloat)
    calls = {
        "window overlap add min: 1": lambda x: torch.istft(
            x[:, :3], 4, window=torch.zeros(4)
        ),
        r"input \[1, 5, 6\]": lambda x: torch.stft(x[0].real, 99, return_complex=True),
    }
    for dims in ((0, 1), (1, 2), (2, 0)):
        part = shard(x, mesh, placements_of(mesh, *dims))
        for text, call in calls.items():
            for given in (x, part):
                with pytest.raises(RuntimeError, match=text):
                    call(given)


@ranks(2, 3)
def test_a_merged_dim_is_cut_anew_where_the_transform_is_shorter(mesh):
    for sizes in partitions(2, mesh.size(), repeated=False):
        part = sharded(signal(2, 2, 5, 6), [Shard(1)], {1: sizes})
        for n in (3, 5):
            with shardtensor.fallback_mode("error"):
                check_op(
                    lambda x, n=n: fft.fft(x.flatten(0, 1), n=n, dim=0), part, mesh=mesh
                )


@ranks(2)
def test_frames_take_the_rows_they_share_from_their_neighbours(mesh):
    window = torch.hann_window(8, dtype=torch.float64, requires_grad=True)
    signal = torch.randn(2, 64, dtype=torch.float64)

    def frames(x):
        options = {"center": False, "return_complex": True}
        return torch.stft(x, 8, 4, window=window, **options)

    x = shard(signal, mesh, [Shard(1)])
    shardtensor.reset_comm_stats()
    spectra = frames(x)
    assert spectra.placements == (Shard(2),)
    # One frame straddles the pieces: half of its rows, of two samples.
    assert shardtensor.comm_stats().bytes <= 2 * 4 * 8
    spectra.abs().sum().backward()
    grad, window.grad = window.grad, None
    frames(signal).abs().sum().backward()
    assert_close(grad, window.grad)
    with pytest.raises(RuntimeError, match="0 < n_fft < 64"):
        torch.stft(x, 65, center=False, return_complex=True)


@ranks(2)
def test_windows_by_strides(mesh):
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    for dim in (0, 1):
        part = sharded(x, [Shard(dim)])
        check_op(lambda x: torch.as_strided(x, (3, 4, 3), (10, 2, 1)), part, mesh=mesh)
        check_op(
            lambda x: torch.as_strided(x, (2, 10, 2), (10, 1, 10)), part, mesh=mesh
        )
        for sizes, strides in [((3, 5, 3), (10, 2, 1)), ((3, 4, 3), (9, 2, 1))]:
            with pytest.raises(NotImplementedError, match="has no memory"):
                torch.as_strided(shard(x, mesh, [Shard(dim)]), sizes, strides)

        # Of a slice, offsets count from the memory it is of.
        def of_slice(x, *offset):
            return torch.as_strided(x[1:], (2, 4, 3), (10, 2, 1), *offset)

        check_op(of_slice, part, mesh=mesh)
        with pytest.raises(NotImplementedError, match="has no memory"):
            of_slice(shard(x, mesh, [Shard(dim)]), 0)
