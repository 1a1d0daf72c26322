"""Forward-mode differentiation: tangents are those of one tensor, or an error."""

from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from ranks import assert_close, from_spec, ranks, shard
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensor

KERNEL = torch.arange(12, dtype=torch.float64).view(2, 2, 3)
WEIGHT = torch.arange(24, dtype=torch.float64).view(2, 12)

OPERATORS = {
    "scale": lambda x: x * 2,
    "square": lambda x: (x * x).sum(-1),
    "shift": lambda x: 1 - x,
    "divide": lambda x: x / (x * x + 1),
    "relu": torch.relu,
    "sum": lambda x: (x * 1.5).sum(),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "amax": lambda x: x.amax(-1),
    "softmax": lambda x: x.softmax(-1),
    "conv": lambda x: F.conv1d(x, KERNEL, padding=1),
    "pool": lambda x: F.avg_pool1d(x, 3, 1, 1),
    "max pool": lambda x: F.max_pool1d(x, 2),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "linear": lambda x: F.linear(x, WEIGHT),
    "mse": lambda x: F.mse_loss(x, x * x),
    "view": lambda x: x.view(2, 12),
    "quantile": lambda x: x.quantile(0.25, 1),
    "roll": lambda x: x.roll(1, -1),
    "slice": lambda x: x[..., 2:9],
    "cat": lambda x: torch.cat([x, x * 3], -1),
}


PIECES = {2: [8, 4], 3: [6, 2, 4]}


def sample(mesh, pieces=None):
    """A value and its tangent, whole and in pieces."""
    pair = torch.randn(2, 1, 2, 12, dtype=torch.float64)
    placements = [Shard(2), Shard(1)][: mesh.ndim]
    sizes = {2: pieces or PIECES[mesh.size(0)]}
    return pair, [shard(v, mesh, placements, sizes) for v in pair]


def tangent_of(fn, value, tangent):
    with fwAD.dual_level():
        return fwAD.unpack_dual(fn(fwAD.make_dual(value, tangent))).tangent


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_tangents(mesh, name, empty):
    pieces = {2: [0, 12], 3: [7, 0, 5]}[mesh.size(0)] if empty else None
    whole, parts = sample(mesh, pieces)
    fn = OPERATORS[name]
    actual = tangent_of(fn, *parts)
    assert actual is not None
    assert_close(actual, tangent_of(fn, *whole))


@ranks(2, 3)
@pytest.mark.parametrize("name", OPERATORS)
def test_tangents_of_what_also_requires_grad(mesh, name):
    whole, (value, tangent) = sample(mesh)
    actual = tangent_of(OPERATORS[name], value.requires_grad_(), tangent)
    assert_close(actual, tangent_of(OPERATORS[name], *whole))


@ranks(2)
def test_tangents_change_layout_with_their_tensors(mesh):
    (_, whole), (value, tangent) = sample(mesh)
    for placements in [[Shard(1)], [Replicate()]]:
        move = partial(ShardTensor.redistribute, placements=placements)
        assert_close(tangent_of(move, value, tangent), whole)
    assert_close(tangent_of(ShardTensor.to_local, value, tangent), tangent.to_local())
    for elsewhere in [tangent.redistribute(mesh, [Shard(1)]), whole]:
        for name in ["sum", "conv", "scale"]:
            expected = OPERATORS[name](whole)
            assert_close(tangent_of(OPERATORS[name], value, elsewhere), expected)


@ranks(2, 3)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["conv", "interpolate", "pool", "sum", "group norm"])
def test_tangents_pass_through_backward(mesh, name, create_graph):
    """Forward over reverse. The gradient is linear in what comes back to it."""
    norm = {"group norm": lambda x: F.group_norm(x, 2)}
    fn = {**OPERATORS, **norm}[name]
    (whole, _), _ = sample(mesh)
    pieces = {2: PIECES[mesh.size()]}
    seed = torch.randn_like(fn(whole))
    layout = fn(shard(whole, mesh, [Shard(2)], pieces))._spec

    def gradient(x, seed):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(fn(x), x, seed, create_graph=create_graph)[0]

    expected = gradient(whole, 2 * seed)
    seeds = [from_spec(v, layout) for v in (seed, 2 * seed)]
    part = shard(whole, mesh, [Shard(2)], pieces)
    actual = tangent_of(partial(gradient, part), *seeds)
    assert actual is not None
    assert_close(actual, expected)


@ranks(2)
def test_zeros_without_memory(mesh):
    """Forward mode's own zeros beside a ShardTensor."""
    (whole, _), (x, _) = sample(mesh)
    zeros = torch._efficientzerotensor(
        whole.shape, dtype=whole.dtype, device=whole.device
    )
    assert_close(zeros + x, whole)
    assert_close(x - zeros, whole)
    assert_close(zeros - x, -whole)
    assert_close(zeros * x, torch.zeros_like(whole))


@ranks(2)
def test_norms_say_that_they_have_no_tangents(mesh):
    _, parts = sample(mesh)
    for norm in [
        lambda x: F.group_norm(x, 1),
        lambda x: F.layer_norm(x, (12,)),
        lambda x: F.batch_norm(x, None, None, training=True),
    ]:
        with pytest.raises(NotImplementedError, match="of . dims .* reverse mode"):
            tangent_of(norm, *parts)


@ranks(2)
def test_plain_tensors_say_that_they_have_no_tangents(mesh):
    _, (x, _) = sample(mesh)
    plain = torch.randn(2, 12, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="a plain tensor beside"):
        tangent_of(lambda weight: x * weight, plain, plain)
    target = torch.zeros(1, 12, dtype=torch.long)
    with pytest.raises(NotImplementedError, match="class weights"):
        tangent_of(
            lambda weight: F.cross_entropy(x, target, weight, label_smoothing=0.1),
            *plain[:, :2],
        )
