"""A sequence in pieces is sorted without any rank having all of it."""

import pytest
import torch
from layouts import sweep
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

import shardtensor

LONG = 20_000  # shorter ones are gathered


def sequence(kind):
    x = torch.randn(LONG)
    if kind == "few values":
        return (x * 2).round()
    if kind == "equal":
        return torch.full_like(x, -0.5)
    if kind == "sorted":
        return (x * 50).round().sort()[0]
    if kind == "nan, inf and zeros of both signs":
        x[::5], x[1::7], x[2::9] = float("nan"), float("inf"), -float("inf")
        x[3::4], x[4::4] = 0.0, -0.0
        x[8] = -torch.tensor(float("nan"))
    return x


KINDS = ["any", "few values", "equal", "sorted", "nan, inf and zeros of both signs"]


def check_order(s, x, **options):
    """Values, with the signs of zeros, and the one order that is stable."""
    values, indices = s.sort(stable=True, **options)
    expected_values, expected = x.sort(stable=True, **options)
    assert values.dtype == x.dtype and indices.dtype == torch.int64
    assert values._spec == indices._spec
    assert torch.equal(indices.full_tensor(), expected)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.element_size())
    whole = values.full_tensor()
    if x.is_floating_point():
        whole, expected_values = whole.view(bits), expected_values.view(bits)
    assert torch.equal(whole, expected_values)
    return values


@ranks(2, 3, 4, "2x2")
@pytest.mark.parametrize("kind", KINDS)
def test_in_every_layout(mesh, kind):
    x = sequence(kind)
    for placements, sizes in sweep(mesh, x.shape):
        for descending in (False, True):
            s = shard(x, mesh, placements, sizes)
            values = check_order(s, x, descending=descending)
            assert_close(values[:5], values.full_tensor()[:5])


@ranks(2, 3)
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.uint16, torch.int16, torch.int64, torch.half,
     torch.bfloat16, torch.double],
)  # fmt: skip
def test_dtypes(mesh, dtype):
    x = (torch.randn(LONG) * 30).to(dtype)
    for sizes in partitions(LONG, mesh.size()):
        for descending in (False, True):
            check_order(
                shard(x, mesh, [Shard(0)], {0: sizes}), x, descending=descending
            )


@ranks(2, 3, "2x2")
def test_each_rank_keeps_its_share(mesh):
    for kind in KINDS[:4]:
        x = sequence(kind)
        s = shard(x, mesh, [Shard(0)] * mesh.ndim)
        shardtensor.reset_comm_stats()
        with shardtensor.fallback_mode("error"):
            values = s.sort()[0]
        assert values._spec == s._spec
        # Values and indices, at most once between the bounds and once home.
        assert shardtensor.comm_stats().bytes <= 2 * 12 * s.to_local().numel() + 4096


@ranks(2, 3, "2x2")
def test_gradients(mesh):
    x = torch.randn(LONG, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(LONG, dtype=torch.float64)
    for placements, sizes in sweep(mesh, x.shape):
        for call in (
            lambda x: x.sort()[0].square() * weight,
            lambda x: x[x.argsort(descending=True)] * weight,
            lambda x: x.msort()[::3],
            lambda x: x[None, :, None].sort(1)[0],
        ):
            check_op(call, sharded(x, placements, sizes), mesh=mesh, second_order=True)


FOLLOWS = {
    "quantile": lambda x: torch.quantile(x, x.new_tensor([0.1, 0.5, 0.93])),
    "searchsorted": lambda x: torch.searchsorted(x.detach().sort()[0], x.detach()),
    "cumsum": lambda x: x.sort(descending=True)[0].cumsum(0)[::7],
    "ranks": lambda x: x.detach().argsort().argsort(),
    "gather": lambda x: x.gather(0, x.argsort(descending=True)),
    "scatter": lambda x: torch.zeros_like(x).scatter(0, x.argsort(), x),
    "flip": lambda x: x.sort()[0].flip(0),
    "where": lambda x: torch.where(x > x.sort()[0][LONG // 3], x, 0),
    "mask": lambda x: x.sort()[0][x.detach() > 0],
    "view": lambda x: x.sort()[0].view(200, 100).mean(0),
    "split": lambda x: torch.cat(x.sort()[0].split(1000)[::-1]),
}


@ranks(2, 3, "2x2")
def test_what_follows(mesh):
    x = torch.randn(LONG, dtype=torch.float64, requires_grad=True)
    for placements, sizes in sweep(mesh, x.shape):
        for call in FOLLOWS.values():
            check_op(call, sharded(x, placements, sizes), mesh=mesh)


@ranks("2x2")
def test_along_one_axis_of_two(mesh):
    x = sequence("few values")
    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(0)]):
        check_order(shard(x, mesh, placements), x)


@ranks(2, 3)
def test_forms(mesh):
    x = torch.randn(LONG)
    s = shard(x, mesh, [Shard(0)])
    out = shard(torch.zeros(LONG), mesh, [Shard(0)]), shard(x.long(), mesh, [Shard(0)])
    torch.sort(s, stable=True, out=out)
    for ours, theirs in zip(out, x.sort(stable=True), strict=True):
        assert_close(ours, theirs)
    assert_close((s + s.sum()).sort()[0], (x + x.sum()).sort()[0])
    assert_close(torch.func.grad(lambda x: x.sort()[0][:9].sum())(s),
                 torch.func.grad(lambda x: x.sort()[0][:9].sum())(x))  # fmt: skip
    assert s.to("meta").sort()[0].shape == x.shape
    with pytest.raises(RuntimeError, match="not implemented|not support"):
        s.to(torch.complex64).sort()
    with pytest.raises(RuntimeError, match="not implemented"):
        s.to(torch.float8_e4m3fn).sort()
    with pytest.raises(IndexError, match="out of range"):
        s.sort(1)


@ranks(2)
def test_compiled(mesh):
    x = torch.randn(LONG)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sort()[0] * 2, backend="aot_eager")
    assert_close(compiled(shard(x, mesh, [Shard(0)])), x.sort()[0] * 2)
