"""torch-harmonics' transforms on the sphere, unmodified."""

import pytest
import torch
import torch.distributed as dist
from fourier import OnMesh
from ranks import assert_close, check_op, ranks, shard, sharded, uneven
from torch.distributed.tensor import Replicate, Shard

import shardtensor

PRELOAD = ("neuralop.models", "torch_harmonics")
FINE = {"rtol": 1e-10, "atol": 1e-12}


class RoundTrip(torch.nn.Module):
    """There, a filter of degrees, and back."""

    def __init__(self, there, back):
        super().__init__()
        self.there, self.back = there, back

    def forward(self, x):
        modes = self.there(x)
        degrees = torch.arange(modes.shape[-2], dtype=x.dtype)
        return self.back(modes / (1 + degrees[:, None]))


def transforms(kind, grid, nlat, nlon, **modes):
    import torch_harmonics as th

    there, back = {
        "scalar": (th.RealSHT, th.InverseRealSHT),
        "vector": (th.RealVectorSHT, th.InverseRealVectorSHT),
    }[kind]
    sizes = nlat, nlon
    return RoundTrip(
        there(*sizes, grid=grid, **modes), back(*sizes, grid=grid, **modes)
    )


CASES = {
    "equiangular": ("scalar", "equiangular", 13, 24, {}),
    "gauss": ("scalar", "legendre-gauss", 12, 24, {}),
    "lobatto": ("scalar", "lobatto", 13, 24, {}),
    "truncated": ("scalar", "equiangular", 13, 24, {"lmax": 10, "mmax": 9}),
    "vector": ("vector", "equiangular", 13, 24, {}),
    "vector gauss": ("vector", "legendre-gauss", 12, 24, {"lmax": 11, "mmax": 10}),
}


def cuts(mesh, nlat, nlon):
    if mesh.ndim == 2:
        return [
            ([Shard(2), Shard(3)], {2: uneven(nlat, 2)}),
            ([Shard(3), Shard(2)], {}),
        ]
    rows, columns = uneven(nlat, mesh.size()), uneven(nlon, mesh.size())
    cuts = [([Shard(2)], {2: rows}), ([Shard(3)], {3: columns[::-1]})]
    return [*cuts, ([Shard(2)], {2: [0, *uneven(nlat, mesh.size() - 1)]})]


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", CASES)
def test_transforms(mesh, name):
    kind, grid, nlat, nlon, modes = CASES[name]
    model = OnMesh(transforms(kind, grid, nlat, nlon, **modes).double(), mesh)
    x = torch.randn(1, 2, nlat, nlon, dtype=torch.float64, requires_grad=True)
    for placements, sizes in cuts(mesh, nlat, nlon):
        with shardtensor.fallback_mode("error"):
            part = sharded(x, placements, sizes)
            y = check_op(model, part, mesh=mesh, second_order=True, **FINE)
        assert y._spec == shard(x, mesh, placements, sizes)._spec


class Either(torch.nn.Module):
    """One device's transforms, and those whose polynomials are cut."""

    def __init__(self, plain, cut):
        super().__init__()
        self.plain, self.cut = plain, cut

    def forward(self, x):
        cut = isinstance(x, shardtensor.ShardTensor)
        return (self.cut if cut else self.plain)(x)


def cut_polynomials(mesh):
    """As the documentation cuts them."""
    dims = {
        "RealSHT.weights": -3,
        "InverseRealSHT.pct": -3,
        "RealVectorSHT.weights": -1,
        "InverseRealVectorSHT.dpct": -3,
    }
    others = [Replicate()] * (mesh.ndim - 1)
    placements = {name: [Shard(dim), *others] for name, dim in dims.items()}
    return shardtensor.cut_buffers(placements, mesh)


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", ["truncated", "vector gauss"])
def test_cut_polynomials_meet_cut_spheres(mesh, name):
    kind, grid, nlat, nlon, modes = CASES[name]
    plain = transforms(kind, grid, nlat, nlon, **modes)
    with cut_polynomials(mesh):
        cut = transforms(kind, grid, nlat, nlon, **modes)
    for whole, part in zip(plain.buffers(), cut.buffers(), strict=True):
        assert part.to_local().numel() < 2 / 3 * whole.numel()
    model = OnMesh(Either(plain, cut), mesh)
    x = torch.randn(2, 2, nlat, nlon, dtype=torch.float64, requires_grad=True)
    for layout, sizes in cuts(mesh, nlat, nlon):
        with shardtensor.fallback_mode("error"):
            part = sharded(x, layout, sizes)
            check_op(model, part, mesh=mesh, second_order=True, **FINE)


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_cut_polynomials_cost_no_message(mesh, kind):
    placements = [Shard(3), Shard(4)][: mesh.ndim]
    grid = kind, "legendre-gauss", 12, 24
    models = [OnMesh(transforms(*grid), mesh)]
    with cut_polynomials(mesh):
        models.append(OnMesh(transforms(*grid), mesh))
    for samples in (2, 40):  # smaller than the polynomials, and larger
        x = torch.randn(samples, 2, 2, 12, 24, dtype=torch.float64)
        sent = []
        for model in models:
            part = shard(x, mesh, placements).requires_grad_()
            shardtensor.reset_comm_stats()
            y = model(part)
            forward = shardtensor.comm_stats().bytes
            if kind == "scalar":
                y.square().sum().backward()
            sent.append((forward, shardtensor.comm_stats().bytes))
        whole, cut = sent
        assert all(a <= b for a, b in zip(cut, whole, strict=True)), sent


@ranks(2, "2x2")
def test_the_legendre_sum_is_scattered_to_the_modes(mesh):
    import torch_harmonics as th

    transform = OnMesh(th.RealSHT(12, 24), mesh)
    x = shard(torch.randn(1, 3, 12, 24), mesh, [Shard(2)] * mesh.ndim)
    shardtensor.reset_comm_stats()
    modes = transform(x)
    assert modes.placements == (Shard(3),) * mesh.ndim
    stats = shardtensor.comm_stats()
    assert (stats.exchanges, stats.all_reduces) == (2, 0)  # real and imaginary
    # Each rank keeps its share of two sums of 3 x 12 x 13 numbers.
    kept = modes.to_local().numel()
    assert stats.bytes == 2 * 4 * (3 * 12 * 13 - kept)


@ranks(2, 3, "2x2")
def test_single_precision_is_as_exact_as_one_process(mesh):
    model = OnMesh(transforms("scalar", "equiangular", 33, 64), mesh)
    x = torch.randn(1, 2, 33, 64)
    expected = model(x)
    for placements, sizes in cuts(mesh, 33, 64):
        y = model(shard(x, mesh, placements, sizes)).full_tensor()
        assert (y - expected).abs().max() <= 1e-6 * expected.abs().max()


@ranks(2)
def test_modes_of_one_device_meet_those_of_many(mesh):
    import torch_harmonics as th

    x = torch.randn(1, 2, 12, 24, dtype=torch.float64)
    transform = OnMesh(th.RealSHT(12, 24).double(), mesh)
    assert_close(transform(shard(x, mesh, [Shard(2)])), transform(x), **FINE)
    whole = shard(x, mesh, [Replicate()])
    assert_close(transform(whole), transform(x), **FINE)


def skip_without_all_to_all(group):
    """Of lists, which theirs call: gloo of PyTorch 2.11 has none."""
    sent = list(torch.zeros(group.size(), 1))
    try:
        dist.all_to_all(list(map(torch.empty_like, sent)), sent, group)
    except RuntimeError as error:
        pytest.skip(str(error))


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("grid", ["equiangular", "legendre-gauss"])
@pytest.mark.parametrize("kind", ["Real", "RealVector"])
def test_the_transforms_that_torch_harmonics_distributes_itself(mesh, kind, grid):
    import torch_harmonics as th
    import torch_harmonics.distributed as thd

    skip_without_all_to_all(mesh.get_group(0))

    def pieces(nlat, nlon):
        """Of the last two dims, as theirs cut them."""
        sizes = zip((lat, lat + 1), (nlat, nlon), mesh.shape)
        return {dim: thd.compute_split_shapes(n, ranks) for dim, n, ranks in sizes}

    def local(x, sizes):
        return x.redistribute(placements=placements, sizes=sizes).to_local()

    def run(there, back, x):
        modes = there(x)
        signal = back(modes)
        signal.square().sum().backward()
        return modes, signal

    names = "_POLAR_PARALLEL_GROUP", "_AZIMUTH_PARALLEL_GROUP"
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    options = {"lmax": 12, "mmax": 12, "grid": grid}
    shape = (1, 6, 2, 12, 24) if kind == "RealVector" else (1, 6, 12, 24)
    lat = len(shape) - 2
    placements = [Shard(lat), Shard(lat + 1)][: mesh.ndim]
    x = torch.randn(shape, dtype=torch.float64)
    part = shard(x, mesh, placements, pieces(12, 24)).requires_grad_()
    own = part.detach().to_local().clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        for name, group in zip(names, [*groups, None]):
            patch.setattr(thd.utils, name, group)
        theirs = run(
            getattr(thd, f"Distributed{kind}SHT")(12, 24, **options).double(),
            getattr(thd, f"DistributedInverse{kind}SHT")(12, 24, **options).double(),
            own,
        )
    ours = run(
        OnMesh(getattr(th, f"{kind}SHT")(12, 24, **options).double(), mesh),
        OnMesh(getattr(th, f"Inverse{kind}SHT")(12, 24, **options).double(), mesh),
        part,
    )
    for mine, other, sizes in zip(ours, theirs, [(12, 12), (12, 24)], strict=True):
        torch.testing.assert_close(local(mine, pieces(*sizes)), other, **FINE)
    torch.testing.assert_close(part.grad.to_local(), own.grad, **FINE)
