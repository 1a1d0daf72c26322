"""Operators that write: into ShardTensors what DTensors hold, and back."""

import pytest
import torch
import torch.nn.functional as F
from dtensor_checks import assert_gradient, distributed
from ranks import assert_close, ranks, shard, uneven
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
)

from shardtensor import ShardTensor

PLACEMENTS = [[Replicate()], [Shard(0)], [Shard(1)]]


def randn(*sizes):
    return torch.randn(*sizes, dtype=torch.float64)


@pytest.mark.parametrize("placements", PLACEMENTS)
@ranks(2, 3)
def test_into_shard_tensors(mesh, placements):
    x, w = randn(7, 5), randn(7, 5)
    given = distributed(w, mesh, placements)
    part = shard(x, mesh, [Shard(0)], {0: uneven(7, mesh.size())})
    assert part.add_(given) is part
    assert_close(part, x + w)
    part.copy_(given)
    assert_close(part, w)
    assert torch.mul(part, given, out=part) is part
    assert_close(part, w * w)
    part[2:4] = given[:2]
    w2 = (w * w).clone()
    w2[2:4] = w[:2]
    assert_close(part, w2)
    torch._foreach_add_([part, part], [given, given])
    assert_close(part, w2 + 2 * w)


@pytest.mark.parametrize("placements", PLACEMENTS)
@ranks(2, 3)
def test_into_dtensors(mesh, placements):
    x, w = randn(7, 5), randn(7, 5)
    given = distributed(w, mesh, placements)
    local = given.to_local()
    part = shard(x, mesh, [Shard(0)], {0: uneven(7, mesh.size())})
    expected = w.clone()

    def check():
        assert isinstance(given, DTensor) and list(given.placements) == placements
        assert given.to_local().data_ptr() == local.data_ptr()
        torch.testing.assert_close(given.full_tensor(), expected)

    assert given.add_(part, alpha=2) is given
    expected.add_(x, alpha=2)
    check()
    given.copy_(part)
    expected.copy_(x)
    check()
    assert torch.mul(part, part, out=given) is given
    torch.mul(x, x, out=expected)
    check()
    if placements != [Shard(0)]:  # DTensor slices a copy along the cut dim
        given[1:3] = part[:2]
        expected[1:3] = x[:2]
        check()
    torch._foreach_mul_([given], [part])
    expected.mul_(x)
    check()


@ranks(2)
def test_history_of_what_was_written(mesh):
    x, w = randn(6, 5).requires_grad_(), randn(6, 5).requires_grad_()
    given = distributed(w, mesh, [Shard(0)])
    part = shard(x, mesh, [Shard(1)])
    changed, expected = given * 2, w * 2
    changed.mul_(part)
    expected.mul_(x)
    assert isinstance(changed, DTensor)
    (changed.square().sum().full_tensor()).backward()
    expected.square().sum().backward()
    assert_gradient(given, w.grad)
    assert_close(part.grad, x.grad)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        given.add_(part)


@ranks(2, 3)
def test_running_statistics(mesh):
    x = randn(4, 3, 9)
    model = nn.Sequential(
        nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)
    )
    whole = model.double()
    whole_state = {k: v.clone() for k, v in whole.state_dict().items()}
    for _ in range(2):
        expected = whole(x)
    parts = nn.Sequential(
        nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)
    ).double()
    parts.load_state_dict(whole_state)
    distribute_module(parts, mesh)
    part = shard(x, mesh, [Shard(2)], {2: uneven(9, mesh.size())})
    for _ in range(2):
        assert isinstance(parts(part), ShardTensor)
    assert_close(parts.eval()(part), whole.eval()(x))
    for buffer, original in zip(parts.buffers(), whole.buffers(), strict=True):
        assert isinstance(buffer, DTensor)
        torch.testing.assert_close(buffer.full_tensor(), original)
    del expected


@ranks(2)
def test_clipping_gradients_of_all_kinds(mesh):
    """Plain parameters, DTensors and ShardTensors in one list."""
    x, w, b = (randn(6, 4).requires_grad_() for _ in range(3))
    part, given = shard(x, mesh, [Shard(0)]), distributed(w, mesh, [Shard(1)])
    plain = b.detach().clone().requires_grad_()
    ((part * given).square() * plain).sum().backward()
    ((x * w).square() * b).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_([part, given], 0.5, foreach=False)
    assert_close(norm, torch.nn.utils.clip_grad_norm_([x, w], 0.5))
    assert_close(part.grad, x.grad)
    assert_gradient(given, w.grad)
    assert F.mse_loss(part.grad, x.grad).item() < 1e-20
