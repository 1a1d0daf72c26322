"""Operators that get ShardTensors and DTensors give the numbers of one device,
and DTensors get gradients that lie as they do."""

import pytest
import rig
import torch
import torch.nn.functional as F
from dtensor_checks import (
    COLUMNS,
    REPLICATE,
    ROWS,
    assert_gradient,
    check_dtensors,
    cut,
    distributed,
)
from ranks import assert_close, ranks, shard, uneven
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def randn(*sizes, requires_grad=True):
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=requires_grad)


# What DTensors meet: the sizes of the sharded input and the dim it is cut
# along, the sizes of the parameters, the operator.
OPERATORS = {
    "add": ((6, 5), 0, [(5,)], lambda x, w: x + w),
    "radd": ((6, 5), 0, [(5,)], lambda x, w: w + x),
    "mul": ((6, 5), 1, [(6, 5)], lambda x, w: x * w),
    "rsub_scaled": ((6, 5), 1, [(6, 5)], lambda x, w: torch.sub(w, x, alpha=2)),
    "addcmul": ((6, 5), 0, [(5,), (6, 1)], lambda x, v, w: torch.addcmul(x, v, w)),
    "where": ((6, 5), 0, [(6, 5)], lambda x, w: torch.where(x > 0, x, w)),
    "prelu": ((2, 4, 5), 2, [(4,)], F.prelu),
    "copysign": ((6, 5), 0, [(6, 5)], lambda x, w: torch.copysign(x, w) * w),
    "linear": ((3, 7, 4), 1, [(5, 4), (5,)], F.linear),
    "linear_features": ((3, 7, 4), 2, [(5, 4), (5,)], F.linear),
    "matmul": ((6, 4), 0, [(4, 5)], torch.matmul),
    "rmatmul": ((6, 4), 1, [(5, 6)], lambda x, w: w @ x),
    "bmm": ((3, 6, 4), 1, [(3, 4, 5)], torch.bmm),
    "einsum": ((3, 6, 4), 1, [(4, 5)], lambda x, w: torch.einsum("bsi,io->bso", x, w)),
    "addmm": ((6, 4), 0, [(5,), (4, 5)], lambda x, b, w: torch.addmm(b, x, w)),
    "conv1d": ((2, 3, 11), 2, [(4, 3, 3), (4,)], lambda *a: F.conv1d(*a, padding=1)),
    "conv2d": ((2, 4, 11, 5), 2, [(6, 4, 3, 3), (6,)], lambda *a: F.conv2d(*a, 2, 1)),
    "conv3d": ((1, 2, 7, 4, 3), 2, [(4, 2, 3, 1, 1)], F.conv3d),
    "conv_groups": ((2, 4, 9), 2, [(4, 2, 3)], lambda x, w: F.conv1d(x, w, groups=2)),
    "conv_transpose2d": (
        (2, 4, 7, 5),
        2,
        [(4, 3, 2, 2), (3,)],
        lambda *a: F.conv_transpose2d(*a, 2),
    ),
    "group_norm": ((2, 4, 9), 2, [(4,), (4,)], lambda x, *a: F.group_norm(x, 2, *a)),
    "layer_norm": ((3, 7, 4), 1, [(4,), (4,)], lambda x, *a: F.layer_norm(x, (4,), *a)),
    "layer_norm_cut": (
        (3, 7, 4),
        2,
        [(4,), (4,)],
        lambda x, *a: F.layer_norm(x, (4,), *a),
    ),
    "rms_norm": ((3, 7, 4), 1, [(4,)], lambda x, w: F.rms_norm(x, (4,), w)),
    "batch_norm": (
        (2, 4, 9),
        2,
        [(4,), (4,)],
        lambda x, *a: F.batch_norm(x, None, None, *a, training=True),
    ),
    "instance_norm": (
        (2, 4, 9),
        2,
        [(4,), (4,)],
        lambda x, v, w: F.instance_norm(x, weight=v, bias=w),
    ),
    "cat": ((6, 5), 0, [(6, 2), (6, 3)], lambda x, v, w: torch.cat([v, x, w], dim=1)),
    "cat_along_the_cut": ((6, 5), 0, [(4, 5)], lambda x, w: torch.cat([w, x])),
    "stack": ((6, 5), 0, [(6, 5)], lambda x, w: torch.stack([x, w], dim=1)),
    "gather": (
        (6, 5),
        0,
        [(6, 5)],
        lambda x, w: torch.gather(w, 1, x.detach().argsort(1)) * x,
    ),
    "mse_loss": ((6, 5), 0, [(6, 5)], F.mse_loss),
    "smooth_l1_loss": ((6, 5), 0, [(6, 5)], lambda x, w: F.smooth_l1_loss(w, x)),
    "attention": (
        (2, 2, 6, 4),
        2,
        [(2, 2, 3, 4), (2, 2, 3, 4)],
        lambda x, k, v: F.scaled_dot_product_attention(x, k, v),
    ),
    "index": ((6, 5), 0, [(8, 5)], lambda x, w: w[(x[:, 0] > 0).long()] + x),
    "keyword": ((6, 5), 0, [(6, 5)], lambda x, w: torch.add(input=x, other=w)),
    "expand_as": ((6, 5), 0, [(5,)], lambda x, w: w.expand_as(x) * x),
}


@pytest.mark.parametrize("placements", [REPLICATE, ROWS, COLUMNS])
@ranks(2, 3)
def test_operators_take_dtensors(mesh, placements):
    for name, (sizes, dim, parameters, fn) in OPERATORS.items():
        weights = [randn(*s) for s in parameters]
        try:
            check_dtensors(
                fn,
                cut(randn(*sizes), [Shard(dim)], mesh),
                *weights,
                mesh=mesh,
                placements=placements,
            )
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("placements", [REPLICATE, ROWS])
@ranks(2, 3)
def test_embedding_of_sharded_indices(mesh, placements):
    table = randn(9, 4)
    weight = distributed(table, mesh, placements)
    indices = torch.randint(9, (5, 7))
    rows = shard(indices, mesh, [Shard(1)], {1: uneven(7, mesh.size())})
    found, expected = F.embedding(rows, weight), F.embedding(indices, table)
    assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert_gradient(weight, table.grad)


@ranks(2, 3)
def test_losses_take_class_weights(mesh):
    scores, weights = randn(6, 4), torch.rand(4, dtype=torch.float64)
    target = torch.randint(4, (6,))
    given = distributed(weights, mesh, [Replicate()])
    for cut_dim in (0, 1):
        x = shard(scores, mesh, [Shard(cut_dim)])
        loss = F.cross_entropy(x, distributed(target, mesh, [Shard(0)]), weight=given)
        assert_close(loss, F.cross_entropy(scores, target, weight=weights))
    (gradient,) = torch.autograd.grad(
        F.cross_entropy(scores, target, weight=weights), scores
    )
    loss.backward()
    assert_close(x.grad, gradient)


@ranks(2, 3)
def test_partial_dtensors_are_summed(mesh):
    term, x = randn(5), randn(6, 5)
    weight = DTensor.from_local(term.detach(), mesh, [Partial()]).requires_grad_()
    out = shard(x, mesh, [Shard(0)]) * weight
    assert_close(out, x * term * mesh.size())
    out.sum().backward()
    # Each term has the gradient of the sum, as DTensor has it.
    assert weight.grad.placements == (Replicate(),)
    torch.testing.assert_close(weight.grad.to_local(), x.sum(0).detach())


@ranks(2)
def test_numbers_and_buffers_without_gradient(mesh):
    x, scale = randn(6, 5), torch.tensor(3.0, dtype=torch.float64)
    part = shard(x, mesh, [Shard(0)])
    number = distributed(scale, mesh, [Replicate()])
    for out in (part * number, number * part, part.mul(number), part / number * 9):
        assert_close(out, x * scale)
    assert_close(torch.maximum(part, number) * scale, torch.maximum(x, scale) * scale)
    number.requires_grad_()
    (part * number * scale).sum().backward()
    assert_gradient(number, (x * scale).sum().detach())


@ranks(2, 3)
def test_second_derivatives(mesh):
    x, w = randn(6, 4), randn(4, 3)
    for placements in (REPLICATE, ROWS):
        given, part = distributed(w, mesh, placements), shard(x, mesh, [Shard(0)])
        results = []
        for a, b in ((x, w), (part, given)):
            (first,) = torch.autograd.grad((a @ b).tanh().sum(), b, create_graph=True)
            second = torch.autograd.grad(first.square().sum(), (a, b))
            results.append((first, *second))
        (first, gx, gw), (first_part, gx_part, gw_part) = results
        torch.testing.assert_close(first_part.full_tensor(), first)
        assert_close(gx_part, gx)
        torch.testing.assert_close(gw_part.full_tensor(), gw)
        assert first_part.placements == gw_part.placements == given.placements


@ranks(2)
def test_history_of_a_dtensor_goes_on(mesh):
    """A parameter that DTensor operators made of others."""
    w, x = randn(5, 4), randn(6, 4)
    given = distributed(w, mesh, [Shard(0)])
    F.linear(shard(x, mesh, [Shard(0)]), given * 2).square().sum().backward()
    F.linear(x, w * 2).square().sum().backward()
    assert_gradient(given, w.grad)


@ranks(2)
def test_gradients_accumulate_and_belong_to_the_parameter(mesh):
    """Also where an operator gives two inputs one gradient."""
    w, x = randn(6, 5), randn(6, 5)
    given = distributed(w, mesh, [Shard(0)])
    part = shard(x, mesh, [Shard(0)])
    for _ in range(3):
        (part + given).square().sum().backward()
        (x + w).square().sum().backward()
    assert_close(part.grad, x.grad)
    assert_gradient(given, w.grad)


@ranks(2)
def test_memory_order_of_gradients(mesh):
    """Fused optimizers walk through parameter and gradient side by side."""
    w = randn(4, 3, 3, 3).detach().to(memory_format=torch.channels_last)
    w.requires_grad_()
    x = randn(2, 3, 8, 5)
    check_dtensors(
        F.conv2d, cut(x, [Shard(2)], mesh), w, mesh=mesh, placements=REPLICATE
    )
    check_dtensors(
        lambda x, w: x @ w.t(),
        cut(randn(6, 5), [Shard(0)], mesh),
        randn(5, 4).detach().t().requires_grad_(),
        mesh=mesh,
        placements=REPLICATE,
    )


@ranks(2)
def test_a_change_before_backward_is_noticed(mesh):
    part = shard(randn(6, 4), mesh, [Shard(0)])
    given = distributed(randn(6, 4), mesh, [Shard(0)])
    out = (part * given).sum()
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@ranks(2)
def test_promotion_is_of_plain_tensors(mesh):
    from shardtensor import ShardTensor, TensorPromotionMode

    x = randn(6, 4)
    part, given = shard(x, mesh, [Shard(0)]), distributed(x, mesh, [Replicate()])
    with ShardTensor.promotion_mode(TensorPromotionMode.DISABLED):
        assert_close(part + given, x + x)
        with pytest.raises(ValueError, match="promotion is disabled"):
            part + torch.ones(4)


@ranks(2)
def test_autocast(mesh):
    x, w = randn(6, 16).float(), randn(8, 16).detach().float().requires_grad_()
    given = distributed(w, mesh, [Replicate()])
    with rig.autocast(torch.bfloat16):
        out = F.linear(shard(x, mesh, [Shard(0)]), given)
        expected = F.linear(x, w)
    assert_close(out, expected)
    out.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert_gradient(given, w.grad, rtol=2e-2, atol=2e-1)
