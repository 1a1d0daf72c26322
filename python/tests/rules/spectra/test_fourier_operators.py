"""Fourier neural operators, unmodified: one device's values and gradients, and
nothing gathered."""

import pytest
import torch
import torch.nn.functional as F
from fourier import Afno, OnMesh, Spectral
from ranks import check_op, ranks, shard, sharded, uneven
from torch.distributed.tensor import Shard

import shardtensor

PRELOAD = ("neuralop.models", "torch_harmonics")
FLOAT = {"rtol": 1e-4, "atol": 1e-5}


def fno(*modes, **options):
    from neuralop.models import FNO

    return FNO(modes, 2, 1, hidden_channels=4, n_layers=2, **options)


def tucker_fno():
    from neuralop.models import TFNO

    factors = {"factorization": "tucker", "implementation": "factorized", "rank": 0.5}
    return TFNO((4, 4), 2, 1, hidden_channels=4, n_layers=2, **factors)


def uno():
    from neuralop.models import UNO

    return UNO(
        2,
        1,
        hidden_channels=4,
        n_layers=3,
        uno_out_channels=[4, 4, 4],
        uno_n_modes=[[4, 4]] * 3,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2, 2]],
        channel_mlp_skip="linear",
    )


def sfno():
    from neuralop.models import SFNO

    return SFNO((8, 8), 2, 1, hidden_channels=4, n_layers=2, factorization="dense")


MODELS = {
    "fno of a line": (lambda: fno(4), (2, 2, 17)),
    "fno": (lambda: fno(4, 4), (2, 2, 12, 16)),
    "fno of odd extents": (lambda: fno(5, 6), (1, 2, 13, 15)),
    "fno of a volume": (lambda: fno(4, 4, 4), (1, 2, 8, 6, 8)),
    "tfno": (tucker_fno, (2, 2, 12, 16)),
    "uno": (uno, (2, 2, 12, 16)),
    "sfno": (sfno, (2, 2, 12, 24)),
}


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_neuraloperator(mesh, name):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = OnMesh(make(), mesh)
    x = torch.randn(shape, requires_grad=True)
    model(x)  # it makes and keeps transforms: plain ones
    last = len(shape) - 1
    for dims in [(2,), (last,)] if mesh.ndim == 1 else [(2, min(3, last))]:
        sizes = {}
        if mesh.size() == 3:
            sizes = {dim: uneven(shape[dim], 3) for dim in dims}
        with shardtensor.fallback_mode("error"):
            part = sharded(x, [Shard(dim) for dim in dims], sizes)
            check_op(model, part, mesh=mesh, **FLOAT)


@ranks(2, 3, "2x2")
def test_the_layer_of_every_tutorial(mesh):
    x = torch.randn(2, 6, 12, 10, dtype=torch.float64, requires_grad=True)
    rows = {2: uneven(12, mesh.size(0))}
    cuts = [[Shard(2)], [Shard(3)]] if mesh.ndim == 1 else [[Shard(2), Shard(3)]]
    layer = OnMesh(Spectral(6, 4), mesh)
    for placements in cuts:
        with shardtensor.fallback_mode("error"):
            part = sharded(x, placements, rows if Shard(2) in placements else {})
            y = check_op(layer, part, mesh=mesh, second_order=True)
            assert y.placements == tuple(placements)
            z = shard(x, mesh, placements)
            shardtensor.reset_comm_stats()
            layer(z)
        # Two samples on three ranks: channels are cut, and two products scattered.
        by_channels = placements == [Shard(3)] and mesh.size() == 3
        expected = 2 * mesh.ndim + (2 if by_channels else 0)
        assert shardtensor.comm_stats().exchanges == expected
        assert shardtensor.comm_stats().all_reduces == 0


@ranks(2, "2x2")
def test_complex_gradients_are_summed_at_once(mesh):
    dims = (2,) if mesh.ndim == 1 else (2, 3)
    x = torch.randn(2, 4, 12, 10, dtype=torch.float64)
    model = OnMesh(torch.nn.Sequential(Spectral(4, 4), Spectral(4, 4)), mesh)
    with shardtensor.gradient_policy("coalesced"):
        part = sharded(x, [Shard(dim) for dim in dims])
        check_op(model, part, mesh=mesh)
        model.zero_grad()
        y = model(shard(x, mesh, [Shard(dim) for dim in dims]))
        shardtensor.reset_comm_stats()
        y.square().sum().backward()
    assert shardtensor.comm_stats().all_reduces <= 2  # the loss, all gradients


@ranks(2, 3, "2x2")
def test_afno_as_fourcastnet_has_it(mesh):
    x = torch.randn(2, 8, 12, 12, dtype=torch.float64, requires_grad=True)
    model = OnMesh(Afno(12, blocks=6), mesh)
    for dims in ((1,), (2,)) if mesh.ndim == 1 else ((1, 2), (2, 1)):
        rows = uneven(x.shape[dims[0]], mesh.size())
        sizes = {dims[0]: rows} if mesh.ndim == 1 else {}
        with shardtensor.fallback_mode("error"):
            part = sharded(x, [Shard(dim) for dim in dims], sizes)
            y = check_op(model, part, mesh=mesh)
        assert y.placements == tuple(Shard(dim) for dim in dims)


@ranks(2, 3)
def test_a_spectral_derivative(mesh):
    def derivative(x):
        k = torch.fft.rfftfreq(12, 1 / 12, dtype=torch.float64)
        return torch.fft.irfft(torch.fft.rfft(x) * (1j * k), n=12)

    x = torch.randn(4, 6, 12, dtype=torch.float64, requires_grad=True)
    for dim in range(3):
        with shardtensor.fallback_mode("error"):
            part = sharded(x, [Shard(dim)], {dim: uneven(x.shape[dim], mesh.size())})
            y = check_op(derivative, part, mesh=mesh, second_order=True)
        assert y._spec.sizes() == {dim: uneven(x.shape[dim], mesh.size())}


@ranks(2, "2x2")
def test_shifts_and_products_of_spectra(mesh):
    weight = torch.randn(6, 5, dtype=torch.cdouble, requires_grad=True)

    def shifted(x, weight):
        spectrum = torch.fft.fftshift(torch.fft.fft2(x), dim=(-2, -1))
        product = torch.einsum("bixy,io->boxy", spectrum.conj(), weight)
        return torch.fft.ifft2(torch.fft.ifftshift(product, dim=(-2, -1))).abs()

    x = torch.randn(2, 6, 9, 10, dtype=torch.cdouble, requires_grad=True)
    for dims in ((2,), (3,)) if mesh.ndim == 1 else ((2, 3),):
        with shardtensor.fallback_mode("error"):
            part = sharded(x, [Shard(dim) for dim in dims])
            check_op(shifted, part, weight, mesh=mesh)


@ranks(2)
def test_softshrink_of_modes_that_one_rank_has(mesh):
    def sparse(x):
        spectrum = torch.view_as_real(torch.fft.rfft2(x)[..., :2])
        return torch.view_as_complex(F.softshrink(spectrum, 0.1)).abs()

    x = torch.randn(2, 6, 9, 10, dtype=torch.float64, requires_grad=True)
    for dim in (2, 3):
        with shardtensor.fallback_mode("error"):
            check_op(sparse, sharded(x, [Shard(dim)]), mesh=mesh, second_order=True)
