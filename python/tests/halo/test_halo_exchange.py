"""The ghost-cell API for programs that write their own stencils."""

import pytest
import torch
from ranks import assert_close, partitions, piece, ranks, shard
from torch.distributed.tensor import Shard


def heat(u, steps, neighbours):
    """Explicit steps of the heat equation; neighbours(u) gives u with one
    ghost cell on every side of the first two dims."""
    for _ in range(steps):
        v = neighbours(u)
        laplacian = (
            v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2]
            - 4 * v[1:-1, 1:-1]
        )  # fmt: skip
        u = u + 0.1 * laplacian
    return u


def ring(u):
    u = torch.cat([u[-1:], u, u[:1]], 0)
    return torch.cat([u[:, -1:], u, u[:, :1]], 1)


@ranks(1, 2, 3, 4, "2x2")
def test_periodic_heat_equation_and_its_gradient(mesh):
    from shardtensor import ShardTensor, halo_exchange

    start = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    target = torch.randn(9, 8, dtype=torch.float64)
    expected = heat(start, 5, ring)
    loss = (expected - target).square().sum()
    (expected_grad,) = torch.autograd.grad(loss, start, create_graph=True)
    (expected_second,) = torch.autograd.grad(expected_grad.square().sum(), start)
    placements = [Shard(d) for d in range(mesh.ndim)]
    cuts = partitions(9, mesh.size(0), repeated=False)
    for sizes in cuts:
        x = shard(start, mesh, placements, {0: sizes})
        spec = x._spec

        def step(u, spec=spec):
            u = ShardTensor.from_spec(u, spec)
            return halo_exchange(u, 1, dims=[0, 1], boundary="periodic")

        end = ShardTensor.from_spec(heat(x.to_local(), 5, step), spec)
        assert_close(end, expected)
        wanted = shard(target, mesh, placements, {0: sizes})
        loss = (end - wanted).square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        assert_close(grad, expected_grad)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        assert_close(second, expected_second)


def extended(x, dim, rows, boundary):
    """Rows [begin, end) of x continued beyond its ends."""
    n = x.shape[dim]
    wrap = {
        "periodic": lambda r: r % n,
        "replicate": lambda r: min(max(r, 0), n - 1),
        "reflect": lambda r: min(r % (2 * n - 2), -r % (2 * n - 2)),
        "zeros": lambda r: r if 0 <= r < n else n,
    }[boundary]
    padded = torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim)
    return padded.index_select(
        dim, torch.tensor([wrap(r) for r in range(*rows)], dtype=torch.long)
    )


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("boundary", ["zeros", "periodic", "reflect", "replicate"])
def test_any_width_and_boundary(mesh, boundary):
    from shardtensor import halo_exchange, halo_trim

    whole = torch.randn(3, 7)
    for before, after in [(0, 0), (1, 1), (2, 0), (0, 3), (6, 6), (9, 1)]:
        for sizes in partitions(7, mesh.size()):
            x = shard(whole, mesh, [Shard(1)], {1: sizes})
            local = halo_exchange(x, (before, after), boundary=boundary)
            begin, end = x._spec.interval(1)
            rows = (begin - before, end + after)
            torch.testing.assert_close(local, extended(whole, 1, rows, boundary))
            back = halo_trim(local, x, (before, after), boundary=boundary)
            assert_close(back, whole)


@ranks(1, 2, 3, 4)
def test_without_boundary_the_ends_get_fewer_rows(mesh):
    from shardtensor import halo_exchange, halo_trim

    whole = torch.randn(7, 2)
    for sizes in partitions(7, mesh.size()):
        x = shard(whole, mesh, [Shard(0)], {0: sizes})
        local = halo_exchange(x, {0: (2, 1)})
        begin, end = x._spec.interval(0)
        torch.testing.assert_close(local, whole[max(0, begin - 2) : min(7, end + 1)])
        assert_close(halo_trim(local, x, {0: (2, 1)}), whole)


@ranks(2, 3)
def test_ghost_gradients_go_home(mesh):
    from shardtensor import halo_exchange

    x = shard(torch.ones(6, requires_grad=True), mesh, [Shard(0)])
    halo_exchange(x, 1, boundary="periodic").sum().backward()
    expected = torch.ones(6)
    step = 6 // mesh.size()
    for cut in range(0, 6, step):  # the rows on both sides are seen twice
        expected[cut] += 1
        expected[cut - 1] += 1
    torch.testing.assert_close(x.grad.to_local(), piece(expected, x._spec))


@ranks(2)
def test_wrong_arguments_raise_clear_errors(mesh):
    from shardtensor import halo_exchange, halo_trim

    x = shard(torch.randn(6, 4), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="expected a ShardTensor, got a Tensor"):
        halo_exchange(torch.randn(6), 1)
    with pytest.raises(IndexError, match=r"dim in \[-2, 1\], got 2"):
        halo_exchange(x, 1, dims=2)
    with pytest.raises(ValueError, match=r"widths of 0 or more, got \(-1, -1\)"):
        halo_exchange(x, -1)
    with pytest.raises(ValueError, match="dim 0 twice"):
        halo_exchange(x, 1, dims=[0, -2])
    with pytest.raises(ValueError, match="got 'mirror'"):
        halo_exchange(x, 1, boundary="mirror")
    with pytest.raises(ValueError, match="a pair of widths"):
        halo_exchange(x, (1, 2, 3))
    with pytest.raises(ValueError, match="width names the dims"):
        halo_exchange(x, {0: 1}, dims=[1])
    with pytest.raises(ValueError, match="expected 4 rows with ghost cells"):
        halo_trim(torch.randn(9, 4), x, 1)


@ranks(2)
def test_a_profile_names_messages_bytes_and_peers(mesh):
    x = shard(torch.randn(1, 2, 8, 4), mesh, [Shard(2)]).requires_grad_()
    conv = torch.nn.Conv2d(2, 2, 3, padding=1)
    with torch.profiler.profile() as profile:
        conv(x).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"shardtensor::halo_exchange", "ShardTensorConvBackward"} <= names
    sent = f"(32 bytes to ranks [{1 - mesh.get_rank()}]) aten::conv2d"
    assert f"shardtensor::messages {sent}" in names
    backward = sent.replace("aten", "the backward of aten")
    assert f"shardtensor::messages {backward}" in names
