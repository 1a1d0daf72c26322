"""A rank with nothing to do refuses and records what the others do."""

import pytest
import torch
import torch.nn.functional as F
from ranks import assert_close, ranks, shard
from torch import nn
from torch.distributed.tensor import Shard

ONE_PLACE = "refers to a single memory location"

WRITES = {
    "sin_": lambda e: e.sin_(),
    "add_": lambda e: e.add_(1),
    "clamp_": lambda e: e.clamp_(0, 1),
    "copy_": lambda e: e.copy_(torch.ones(2, 4, 6)),
    "uniform_": lambda e: e.uniform_(),
    "cumsum_": lambda e: e.cumsum_(2),
    "scatter_": lambda e: e.scatter_(2, torch.zeros(2, 4, 1).long(), 1.0),
    "out=": lambda e: torch.add(torch.ones(2, 4, 6), 1, out=e),
}
REPEATED = {
    "fill_": lambda e: e.fill_(2),
    "threshold_": lambda e: torch.threshold_(e, 0.5, 0.5),
    "zero_": lambda e: e.zero_(),
    "masked_fill_": lambda e: e.masked_fill_(torch.ones(2, 4, 6) > 0, 3),
}


def cuts(mesh):
    """All of x on one rank, and most of it."""
    yield 0, [0] * (mesh.size() - 1) + [4]
    yield 0, [3, 1] + [0] * (mesh.size() - 2)
    yield 1, [6] + [0] * (mesh.size() - 1)


@ranks(2, 3, "2x2")
def test_writes_into_expanded_tensors(mesh):
    x = torch.randn(4, 6)
    for dim, sizes in cuts(mesh):
        for write in WRITES.values():
            s = shard(x, mesh, [Shard(dim)] * mesh.ndim, {dim: sizes})
            for e in (x.clone().expand(2, 4, 6), s.expand(2, 4, 6)):
                with pytest.raises(RuntimeError, match=ONE_PLACE):
                    write(e)
        for write in REPEATED.values():
            s = shard(x, mesh, [Shard(dim)] * mesh.ndim, {dim: sizes})
            y = x.clone()
            assert_close(write(s.expand(2, 4, 6)), write(y.expand(2, 4, 6)))
            assert_close(s, y)


@ranks(2, 3, "2x2")
def test_a_source_that_overlaps_what_is_written(mesh):
    """PyTorch refuses where it sees it; ranks would see it in their parts."""
    for sizes in ([12] + [0] * (mesh.size() - 1), [5, 7] + [0] * (mesh.size() - 2)):
        for rows in (slice(0, 4), slice(3, 9)):
            x = torch.arange(12.0)
            s = shard(x, mesh, [Shard(0)] * mesh.ndim, {0: sizes})
            later = slice(rows.start + 1, rows.stop + 1)
            s[rows].copy_(s[later])
            x[rows] = x[later].clone()
            assert_close(s, x)
            s[rows].add_(s[later])
            x[rows] += x[later].clone()
            assert_close(s, x)


@ranks(2, 3, "2x2")
def test_indices_out_of_bounds(mesh):
    x = torch.randn(6, 5)
    s = shard(x, mesh, [Shard(1)] * mesh.ndim, {1: [0] * (mesh.size() - 1) + [5]})
    for index in ([0, 6], torch.tensor([[-7]]), torch.tensor(6)):
        with pytest.raises(IndexError, match="out of bounds"):
            x[index]
        with pytest.raises(IndexError, match="out of bounds"):
            s[index]
        with pytest.raises(IndexError, match="out of bounds"):
            s[index] = 2.5
        with pytest.raises(IndexError, match="out of bounds"):
            s[index] += 1
    s[[0, 5]] = 1
    x[[0, 5]] = 1
    assert_close(s, x)
    rows = torch.tensor([0, 6])
    source = s[:2].clone()
    for call in (
        lambda: s.index_select(0, rows),
        lambda: s.index_fill(0, rows, 1.0),
        lambda: s.index_fill_(0, -1 - rows, torch.tensor(1.0)),
        lambda: s.index_copy(0, rows, source),
        lambda: s.index_copy_(0, -rows, source),
        lambda: s.index_add(0, rows, source),
        lambda: s.index_add_(0, -rows, source),
        lambda: s.index_reduce(0, rows, source, "prod"),
    ):
        with pytest.raises(IndexError, match="index -?[67] is out of bounds"):
            call()
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        F.embedding(rows, s)
    assert_close(
        s.index_fill(0, torch.tensor([-6, 5]), 2.0),
        x.index_fill(0, torch.tensor([0, 5]), 2.0),
    )


REFUSED = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin((0, 1)),
    "max": lambda x: x.max(),
    "max along a dim": lambda x: x.max(1),
    "argmax": lambda x: x.argmax(),
    "argmin along a dim": lambda x: x.argmin(0),
    "var": lambda x: x.long().var(1),
    "std": lambda x: x.long().std(),
    "var_mean": lambda x: torch.var_mean(x.long(), 0),
    "std_mean": lambda x: torch.std_mean(x.bool()),
    "norm": lambda x: x.long().norm(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x.long(), dim=1),
    "vector_norm in another dtype": lambda x: torch.linalg.vector_norm(
        x.long(), 0, dtype=torch.float64
    ),
    "fft": lambda x: torch.fft.fft(x.to(torch.complex32)),
    "fft2": lambda x: torch.fft.fft2(x.to(torch.complex32)),
    "irfft": lambda x: torch.fft.irfft(x.to(torch.complex32), 8, 0),
}


@ranks(2, 3, "2x2")
def test_dtypes_that_a_kernel_refuses(mesh):
    x = torch.randn(4, 6, dtype=torch.complex128)
    for dim, sizes in cuts(mesh):
        s = shard(x, mesh, [Shard(dim)] * mesh.ndim, {dim: sizes})
        for name, call in REFUSED.items():
            if "fft" in name and x.is_cuda:
                continue  # which cuFFT takes
            with pytest.raises(Exception) as plain:
                call(x)
            with pytest.raises(plain.type):
                call(s)
                pytest.fail(name)
        bits = shard(x.real > 0, mesh, [Shard(dim)] * mesh.ndim, {dim: sizes})
        with pytest.raises(RuntimeError, match="argmin.*does not support bool"):
            bits.argmin(1)
        assert_close(bits.amax(1), (x.real > 0).amax(1))


def ones(*sizes):
    return torch.ones(sizes, dtype=torch.bool)


# Of truth values (4, 6).
REFUSED_OF_TRUTH = {
    "mm": lambda x: x @ ones(6, 3),
    "mv": lambda x: x @ ones(6),
    "dot": lambda x: x[:, 0].dot(ones(4)),
    "addmm": lambda x: torch.addmm(ones(3), x, ones(6, 3)),
    "addmv": lambda x: torch.addmv(ones(1), x, ones(6)),
    "bmm": lambda x: x[None].bmm(ones(1, 6, 3)),
    "baddbmm": lambda x: torch.baddbmm(ones(3), x[None], ones(1, 6, 3)),
    "matmul": lambda x: x[None] @ ones(6, 3),
    "linear": lambda x: F.linear(x, ones(3, 6)),
    "bilinear": lambda x: F.bilinear(x, x, ones(2, 6, 6)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, ones(3, 6)),
    "searchsorted": lambda x: torch.searchsorted(ones(3), x),
    "bucketize": lambda x: torch.bucketize(x, ones(3)),
    "cdist": lambda x: torch.cdist(x.half(), x.half()),
    "bincount": lambda x: torch.bincount(x[:, 0]),
    "trace": lambda x: x.trace(),
}


@ranks(2, 3, "2x2")
def test_truth_values_that_a_kernel_refuses(mesh):
    x = ones(4, 6)
    layouts = [([Shard(dim)] * mesh.ndim, {dim: sizes}) for dim, sizes in cuts(mesh)]
    if mesh.ndim == 2:
        layouts.append(([Shard(0), Shard(1)], {0: [0, 4]}))
    for placements, sizes in layouts:
        s = shard(x, mesh, placements, sizes)
        for name, call in REFUSED_OF_TRUTH.items():
            try:
                call(x)
            except Exception as error:
                with pytest.raises(type(error)):
                    call(s)
                    pytest.fail(name)


@ranks(2, "2x2")
def test_class_weights_that_require_grad(mesh):
    x, target = torch.randn(4, 6), torch.tensor([0, 1, 5, 2])
    weight = torch.rand(6, requires_grad=True)
    for dim, sizes in cuts(mesh):
        s = shard(x, mesh, [Shard(dim)] * mesh.ndim, {dim: sizes})
        for loss in (F.nll_loss, F.cross_entropy):
            for given in (x, s):
                with pytest.raises(RuntimeError, match="argument 'weight'"):
                    loss(given, target, weight)
            with torch.no_grad():
                assert_close(loss(s, target, weight), loss(x, target, weight))


@ranks(2, 3, "2x2")
def test_second_order_of_evaluated_norms(mesh):
    norms = (
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4),
        nn.InstanceNorm2d(4, track_running_stats=True),
    )
    for norm in norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 4, 9, 3)
    for dim in (0, 1, 2):
        sizes = [0] * (mesh.size() - 1) + [x.size(dim)]
        for norm in norms:
            found = []
            for t in (
                x.clone(),
                shard(x, mesh, [Shard(dim)] * mesh.ndim, {dim: sizes}),
            ):
                t.requires_grad_()
                y = norm.eval()(t)
                (g,) = torch.autograd.grad(y.sum(), t, create_graph=True)
                assert g.requires_grad
                (g.square().sum() + y.square().sum()).backward()
                found.append((y.detach(), g.detach(), t.grad))
            for expected, result in zip(*found, strict=True):
                assert_close(result, expected)
