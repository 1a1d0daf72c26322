"""out= and in-place forms without a rule of their own: what the functional form gives,
written; nothing is gathered."""

import warnings

import pytest
import torch
from ranks import assert_close, ranks, shard, uneven
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor

aten = torch.ops.aten


def values(*shape):
    return torch.randn(shape, dtype=torch.float64)


# With out=; x is 6 x 6.
OUT = {
    "addbmm": lambda x, **o: torch.addbmm(x, x[None], x[None], beta=2, **o),
    "addmm": lambda x, **o: torch.addmm(x, x, x, alpha=3, **o),
    "addmv": lambda x, **o: torch.addmv(x[0], x, x[:, 1], **o),
    "addr": lambda x, **o: torch.addr(x, x[0], x[1], **o),
    "alias_copy": lambda x, **o: torch.alias_copy(x, **o),
    "avg_pool2d": lambda x, **o: aten.avg_pool2d(x[None], 2, **o),
    "bmm": lambda x, **o: torch.bmm(x[None], x[None], **o),
    "cumsum": lambda x, **o: torch.cumsum(x, 0, **o),
    "dot": lambda x, **o: torch.dot(x[0], x[:, 1], **o),
    "expand_copy": lambda x, **o: torch.expand_copy(x, (2, 6, 6), **o),
    "fft": lambda x, **o: torch.fft.fft(x, **o),
    "gather": lambda x, **o: torch.gather(x, 1, x.argsort(1), **o),
    "index_add": lambda x, **o: torch.index_add(x, 0, torch.tensor([1, 3]), x[:2], **o),
    "isin": lambda x, **o: torch.isin(x, x[0], **o),
    "linear": lambda x, **o: aten.linear(x, x, x[0], **o),
    "log_softmax": lambda x, **o: torch.log_softmax(x, 0, **o),
    "logcumsumexp": lambda x, **o: torch.logcumsumexp(x, 1, **o),
    "max": lambda x, **o: torch.max(x, **o),
    "mm": lambda x, **o: torch.mm(x, x, **o),
    "mv": lambda x, **o: torch.mv(x, x[0], **o),
    "norm": lambda x, **o: torch.linalg.vector_norm(x, 2, 0, **o),
    "norm of complex": lambda x, **o: torch.linalg.vector_norm(x + 1j * x.T, 2, 0, **o),
    "renorm": lambda x, **o: torch.renorm(x, 2, 0, 1.5, **o),
    "scatter": lambda x, **o: torch.scatter(x, 0, x.argsort(0), x, **o),
    "softmax": lambda x, **o: torch.softmax(x, 0, **o),
    "std": lambda x, **o: torch.std(x, 0, **o),
    "tril": lambda x, **o: torch.tril(x, 1, **o),
    "stack": lambda x, **o: torch.stack([x, x * 2], 1, **o),
}
OUTS = {
    "aminmax": lambda x, **o: torch.aminmax(x, dim=0, **o),
    "cummax": lambda x, **o: torch.cummax(x, 0, **o),
    "kthvalue": lambda x, **o: torch.kthvalue(x, 2, 0, **o),
    "max": lambda x, **o: torch.max(x, 0, **o),
    "mode": lambda x, **o: torch.mode(x, 1, **o),
    "sort": lambda x, **o: torch.sort(x, 0, **o),
    "topk": lambda x, **o: torch.topk(x, 2, 0, **o),
    "batch norm": lambda x, **o: torch.native_batch_norm(
        x, None, None, None, None, True, 0.1, 1e-5, **o
    ),
}
IN_PLACE = {
    "addbmm_": lambda x: x.addbmm_(x[None] * 2, x[None] + 1),
    "addmm_": lambda x: x.addmm_(x * 2, x + 1),
    "addmv_": lambda x: x[0].addmv_(x * 2, x[:, 1] + 1),
    "addr_": lambda x: x.addr_(x[0] * 2, x[1] + 1),
    "baddbmm_": lambda x: x[None].baddbmm_(x[None] * 2, x[None] + 1),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([1, 4]), 2.0),
    "scatter_add_": lambda x: x.scatter_add_(0, x.argsort(0), x * 2),
}


def layouts(mesh):
    if mesh.ndim == 2:
        return [
            ([Shard(0), Shard(1)], {0: uneven(6, 2)}),
            ([Shard(1), Replicate()], {}),
        ]
    cuts = [([Shard(dim)], {dim: uneven(6, mesh.size())}) for dim in (0, 1)]
    return [*cuts, ([Partial()], {}), ([Shard(0)], {0: [6] + [0] * (mesh.size() - 1)})]


def shards_like(mesh, x):
    """Cut another way than what is written into it."""
    other = [Replicate()] * (mesh.ndim - 1)
    return shard(x, mesh, [Shard(x.dim() - 1) if x.dim() else Replicate(), *other])


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("name", OUT)
def test_out_is_written_without_a_gather(mesh, name):
    x = values(6, 6)
    expected = OUT[name](x)
    for placements, sizes in layouts(mesh):
        part = shard(x, mesh, placements, sizes)
        shardtensor.reset_fallback_counts()
        empty = shards_like(mesh, torch.empty(0, dtype=expected.dtype))
        for out in (shards_like(mesh, torch.ones_like(expected)), empty):
            assert OUT[name](part, out=out) is out
            assert_close(out, expected)
            assert_close(out * 2, expected * 2)
        assert shardtensor.fallback_counts() == {}


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("name", OUTS)
def test_several_outs(mesh, name):
    """Also where one of them is plain: it takes the whole value."""
    x = values(6, 6)
    expected = OUTS[name](x)
    shardtensor.set_fallback_mode("silent")
    for placements, sizes in layouts(mesh):
        part = shard(x, mesh, placements, sizes)
        out = tuple(shards_like(mesh, torch.zeros_like(e)) for e in expected)
        shardtensor.reset_fallback_counts()
        found = OUTS[name](part, out=out)
        for given, e, f in zip(out, expected, found):
            assert f is given
            assert_close(f, e)
        assert shardtensor.fallback_counts() == {}
        out = (out[0], *(torch.zeros_like(e) for e in expected[1:]))
        OUTS[name](part, out=out)
        for given, e in zip(out, expected):
            assert_close(given, e)


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_forms_write_without_a_gather(mesh, name):
    x = values(6, 6)
    whole = x.clone()
    expected = IN_PLACE[name](whole)
    for placements, sizes in layouts(mesh):
        part = shard(x, mesh, placements, sizes)
        shardtensor.reset_fallback_counts()
        assert_close(IN_PLACE[name](part), expected)
        assert_close(part, whole)
        assert shardtensor.fallback_counts() == {}


@ranks(2)
def test_gradients_pass_through_what_was_written(mesh):
    def written(x):
        return (x * 2).addmm_(x, x + 1)

    x = values(6, 6).requires_grad_()
    written(x).square().sum().backward()
    for placements, sizes in layouts(mesh):
        part = shard(x, mesh, placements, sizes)
        written(part).square().sum().backward()
        assert_close(part.grad, x.grad)


@ranks(2)
def test_errors_and_types_are_those_of_one_device(mesh):
    x = values(6, 6)
    part = shard(x, mesh, [Shard(0)])
    for dtype in (torch.float32, torch.complex128):
        whole = torch.cumsum(x, 0, out=torch.zeros(6, 6, dtype=dtype))
        out = shards_like(mesh, torch.zeros(6, 6, dtype=dtype))
        assert_close(torch.cumsum(part, 0, out=out), whole)
    for call, wrong in (
        (lambda x, out: torch.mm(x, x, out=out), torch.zeros(6, 6, dtype=torch.long)),
        (
            lambda x, out: torch.gather(x, 0, x.argsort(0), out=out),
            torch.zeros(6, 6).int(),
        ),
        (
            lambda x, out: torch.aminmax(x, dim=0, out=(out, out.clone())),
            torch.zeros(6),
        ),
    ):
        with pytest.raises(RuntimeError) as expected:
            call(x, wrong)
        with pytest.raises(RuntimeError) as found:
            call(part, shards_like(mesh, wrong))
        assert str(found.value)[:30] == str(expected.value)[:30]
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.mm(part.requires_grad_(), part, out=shards_like(mesh, x))
    with pytest.raises(RuntimeError, match="size|shape|expand"):
        shard(x[0], mesh, [Shard(0)]).addmm_(part.detach(), part.detach())


@ranks(2)
def test_a_resized_out_is_said_as_on_one_device(mesh):
    x = values(6, 6)
    part = shard(x, mesh, [Shard(0)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = shards_like(mesh, torch.zeros(2, 3, dtype=torch.float64))
        torch.cumsum(part, 0, out=out)
    assert_close(out, x.cumsum(0))
    assert any("was resized" in str(w.message) for w in said)


@ranks(2, 3)
def test_values_tell_the_sizes_of_an_out(mesh):
    """Which no Meta kernel knows."""
    x = (values(5, 4) > 0).double()
    for placement in (Shard(0), Shard(1), Replicate()):
        part = shard(x, mesh, [placement])
        for call, dtype in (
            (torch.nonzero, torch.long),
            (lambda x, **o: torch.masked_select(x, x > 0, **o), torch.double),
        ):
            for size in (0, 3):
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    out = shards_like(mesh, torch.zeros(size, dtype=dtype))
                    assert call(part, out=out) is out
                assert_close(out, call(x))
                resized = any("was resized" in str(w.message) for w in said)
                assert resized == (size > 0)
            with pytest.raises(RuntimeError, match="expected an out of dtype"):
                call(part, out=shards_like(mesh, torch.zeros(0, dtype=torch.int)))


@ranks(2)
def test_zeros_and_ones_are_drawn_into_any_dtype(mesh):
    p = torch.tensor([0.0, 1.0, 0.0, 1.0])
    part = shard(p, mesh, [Shard(0)], {0: [3, 1]})
    for dtype in (torch.bool, torch.int64, torch.float64):
        for size in (4, 0):
            out = shards_like(mesh, torch.zeros(size, dtype=dtype))
            assert torch.bernoulli(part, out=out) is out
            assert_close(out, p.to(dtype))


# Composite, of a 6 x 6 x.
COMPOSITE = {
    "inner": lambda x, **o: torch.inner(x, x, **o),
    "kron": lambda x, **o: torch.kron(x, x, **o),
    "matrix_power": lambda x, **o: torch.linalg.matrix_power(x, 3, **o),
    "matrix_rank": lambda x, **o: torch.linalg.matrix_rank(x, **o),
    "multi_dot": lambda x, **o: torch.linalg.multi_dot([x, x, x], **o),
    "norm": lambda x, **o: torch.linalg.norm(x, **o),
    "norm of rows": lambda x, **o: torch.linalg.norm(x, 1, 1, **o),
    "nuclear norm": lambda x, **o: torch.linalg.matrix_norm(x, "nuc", **o),
    "quantile": lambda x, **o: torch.quantile(x, 0.3, dim=0, **o),
    "tensordot": lambda x, **o: torch.tensordot(x, x, 1, **o),
}


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("name", COMPOSITE)
def test_out_of_a_composite_operator_is_resized(mesh, name):
    x = values(6, 6)
    expected = COMPOSITE[name](x)
    shardtensor.set_fallback_mode("silent")
    for placements, cuts in layouts(mesh):
        part = shard(x, mesh, placements, cuts)
        for sizes in ((0,), (0, 3), (2, 3)):
            out = shards_like(mesh, torch.zeros(sizes, dtype=expected.dtype))
            version = out._version
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it was resized
                assert COMPOSITE[name](part, out=out) is out
            assert out._version > version
            assert_close(out, expected)


@ranks(2)
def test_out_of_a_composite_operator_of_another_dtype(mesh):
    part = shard(values(6, 6), mesh, [Shard(0)])
    out = shards_like(mesh, torch.zeros((), dtype=torch.int))
    with pytest.raises(RuntimeError, match="Expected a floating point .* Got Int"):
        torch.linalg.norm(part, out=out)


@ranks(2)
def test_gradients_pass_through_out_of_a_composite_operator(mesh):
    x = values(6, 6).requires_grad_()
    part = shard(x, mesh, [Shard(0)])
    torch.inner(x, x).sin().sum().backward()
    out = shards_like(mesh, torch.zeros(6, 6, dtype=torch.float64))
    torch.inner(part, part, out=out)
    out.sin().sum().backward()
    assert_close(part.grad, x.grad)
