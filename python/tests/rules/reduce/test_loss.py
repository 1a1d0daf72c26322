"""Losses: the mean is over the global count, whatever the cut."""

import itertools

import pytest
import rig
import torch
import torch.nn.functional as F
from oracle import WHOLE
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

REDUCTIONS = ["mean", "sum", "none"]


def positive(x):
    return x.exp()


# name: (loss(x, target, reduction), how to make x, how to make the target)
POINTWISE = {
    "mse": (F.mse_loss, None, None),
    "l1": (F.l1_loss, None, None),
    "smooth_l1": (lambda x, t, **k: F.smooth_l1_loss(x, t, beta=0.3, **k), None, None),
    "smooth_l1_as_l1": (
        lambda x, t, **k: F.smooth_l1_loss(x, t, beta=0.0, **k),
        None,
        None,
    ),
    "huber": (lambda x, t, **k: F.huber_loss(x, t, delta=0.7, **k), None, None),
    "bce": (F.binary_cross_entropy, torch.sigmoid, torch.sigmoid),
    "bce_logits": (F.binary_cross_entropy_with_logits, None, torch.sigmoid),
    "kl_div": (F.kl_div, None, torch.exp),
    "kl_div_log": (lambda x, t, **k: F.kl_div(x, t, log_target=True, **k), None, None),
    "soft_margin": (F.soft_margin_loss, None, torch.sign),
    "poisson": (F.poisson_nll_loss, None, torch.exp),
    "hinge": (F.hinge_embedding_loss, None, torch.sign),
}


def operands(name, shape=(5, 4, 6)):
    _, make_x, make_target = POINTWISE[name]
    x, target = torch.randn(2, *shape, dtype=torch.float64)
    x = make_x(x) if make_x else x
    target = make_target(target) if make_target else target
    differentiable = name not in ("soft_margin", "hinge")
    return x.requires_grad_(), target.requires_grad_(differentiable)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_losses_of_every_cut(mesh, name, reduction):
    x, target = operands(name)
    loss = POINTWISE[name][0]
    for sizes in partitions(5, mesh.size()):
        part = sharded(x, [Shard(0)], {0: sizes})
        for other in (
            sharded(target, [Shard(0)], {0: sizes}),
            sharded(target, [Shard(2)]),
            sharded(target, [Replicate()]),
            target,
        ):
            check_op(
                lambda x, t: loss(x, t, reduction=reduction),
                part, other, mesh=mesh, second_order=True,
            )  # fmt: skip


@ranks("2x2")
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_losses_on_a_grid_of_ranks(mesh, name):
    x, target = operands(name)
    loss = POINTWISE[name][0]
    for placements in ([Shard(0), Shard(2)], [Shard(1), Shard(1)]):
        for reduction in REDUCTIONS:
            for other in (sharded(target, placements), target):
                check_op(
                    lambda x, t, r=reduction: loss(x, t, reduction=r),
                    sharded(x, placements), other, mesh=mesh, second_order=True,
                )  # fmt: skip


@ranks(2, 3)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_binary_cross_entropy(mesh, reduction):
    x, target = operands("bce_logits")
    weight = torch.rand(4, 6, dtype=torch.float64)
    pos_weight = torch.rand(6, dtype=torch.float64)

    def with_logits(x, t, w, p):
        return F.binary_cross_entropy_with_logits(
            x, t, weight=w, pos_weight=p, reduction=reduction
        )

    def plain(x, t, w):
        return F.binary_cross_entropy(x.sigmoid(), t, weight=w, reduction=reduction)

    for dim in range(3):
        part = sharded(x, [Shard(dim)]), sharded(target, [Shard(dim)])
        check_op(with_logits, *part, weight, pos_weight, mesh=mesh, second_order=True)
        check_op(with_logits, *part, sharded(weight, [Shard(0)]), pos_weight, mesh=mesh)
        check_op(plain, *part, weight.expand(5, 4, 6), mesh=mesh, second_order=True)


@ranks(2)
def test_kl_div_of_a_batch(mesh):
    x, target = operands("kl_div")
    check_op(
        lambda x, t: F.kl_div(x, t, reduction="batchmean"),
        sharded(x, [Shard(0)], {0: [4, 1]}), target, mesh=mesh, second_order=True,
    )  # fmt: skip


@ranks(2, 3)
def test_gradient_of_a_mean_on_an_uneven_cut_is_not_multiplied(mesh):
    x = torch.arange(6.0).reshape(6, 1)
    part = shard(x.requires_grad_(), mesh, [Shard(0)], {0: [5, 1, 0][: mesh.size()]})
    loss = F.mse_loss(part, torch.zeros(6, 1))
    loss.backward()
    assert loss.item() == pytest.approx(55 / 6)
    torch.testing.assert_close(part.grad.full_tensor(), x.detach() / 3)


# ---- classes ----------------------------------------------------------------

SHAPES = [(7, 5), (3, 5, 6), (2, 5, 4, 3), (2, 5, 3, 2, 2)]


def classes(shape, ignored=True):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    if ignored:
        target.view(-1)[::4] = -100
    return x, target


def cross_entropy(x, target, weight=None, **options):
    return F.cross_entropy(x, target, weight, **options)


def nll(x, target, weight=None, **options):
    return F.nll_loss(x.log_softmax(1), target, weight, **options)


OPTIONS = {
    "plain": {},
    "weight": {"weight": torch.tensor([0.1, 2, 0, 1, 0.5], dtype=torch.float64)},
    "ignored_class": {"ignore_index": 2},
    "all": {
        "weight": torch.tensor([0.1, 2, 0, 1, 0.5], dtype=torch.float64),
        "ignore_index": 0,
    },
}


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("loss", [cross_entropy, nll])
@pytest.mark.parametrize("shape", SHAPES)
def test_class_losses_of_every_cut(mesh, shape, loss, options):
    options = OPTIONS[options]
    x, target = classes(shape, ignored=not options)
    turns = itertools.cycle(REDUCTIONS)
    for dim in {0, 1, len(shape) - 1}:
        for sizes in partitions(shape[dim], mesh.size()):
            part = sharded(x, [Shard(dim)], {dim: sizes})
            for reduction in REDUCTIONS if WHOLE else [next(turns)]:
                check_op(
                    lambda x, t, r=reduction: loss(x, t, reduction=r, **options),
                    part, target, mesh=mesh, second_order=True,
                )  # fmt: skip


@ranks(2, 3)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS)
def test_label_smoothing(mesh, options, reduction):
    x, target = classes((4, 5, 6), ignored=options == "plain")

    def loss(x, target):
        return F.cross_entropy(
            x, target, label_smoothing=0.2, reduction=reduction, **OPTIONS[options]
        )

    for dim in range(3):
        check_op(loss, sharded(x, [Shard(dim)]), target, mesh=mesh, second_order=True)


@ranks(2, 3)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_probabilities_as_targets(mesh, reduction):
    x, _ = classes((4, 5, 6))
    target = torch.rand(4, 5, 6, dtype=torch.float64).softmax(1).requires_grad_()
    weight = torch.rand(5, dtype=torch.float64)

    def loss(x, target, w):
        return F.cross_entropy(x, target, w, label_smoothing=0.1, reduction=reduction)

    for dim in range(3):
        part = sharded(x, [Shard(dim)])
        for other in (target, sharded(target, [Shard(2)])):
            for w in (None, weight):
                check_op(loss, part, other, w, mesh=mesh, second_order=True)


@ranks(2, 3)
def test_targets_in_another_layout(mesh):
    x, target = classes((4, 5, 6))
    part = sharded(x, [Shard(2)], {2: [6, 0, 0][: mesh.size()]})
    for placement in (Shard(0), Shard(1), Replicate()):
        for reduction in REDUCTIONS:
            check_op(
                lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r),
                part, sharded(target, [placement]), mesh=mesh, second_order=True,
            )  # fmt: skip


@ranks("2x2")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dims", [(0, 2), (1, 2), (0, 1), (1, 1), (None, 1), (2, None)])
def test_class_losses_on_a_grid_of_ranks(mesh, dims, reduction):
    x, target = classes((3, 5, 6))
    placements = [Replicate() if d is None else Shard(d) for d in dims]
    for options in OPTIONS.values():
        check_op(
            lambda x, t, o=options: F.cross_entropy(x, t, reduction=reduction, **o),
            sharded(x, placements), target.clamp(min=0), mesh=mesh, second_order=True,
        )  # fmt: skip


@ranks(2)
def test_one_sample_without_a_batch(mesh):
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    for reduction in REDUCTIONS:
        check_op(
            lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r),
            sharded(x, [Shard(0)]), torch.tensor(3), mesh=mesh, second_order=True,
        )  # fmt: skip


@ranks(2, 3)
def test_targets_of_bytes(mesh):
    x = torch.randn(6, 200, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([255, 156, 0, 199, 255, 7], dtype=torch.uint8)
    for loss, dim in itertools.product((cross_entropy, nll), (0, 1)):
        for ignored in (255, 156, -100):
            check_op(
                lambda x, t, i=ignored, f=loss: f(x, t, ignore_index=i),
                sharded(x, [Shard(dim)]), target if ignored == 255 else target % 200,
                mesh=mesh,
            )  # fmt: skip


@ranks(2, 3)
def test_nothing_but_ignored_targets_is_nan(mesh):
    x, target = classes((4, 5))
    target.fill_(-100)
    check_op(F.cross_entropy, sharded(x, [Shard(0)]), target, mesh=mesh)


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types(mesh, dtype):
    x = torch.randn(6, 5, 9).to(dtype).requires_grad_()
    target = torch.randint(5, (6, 9))
    for reduction in REDUCTIONS:
        for dim in range(3):
            part = sharded(x, [Shard(dim)])
            check_op(
                lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r),
                part, target, mesh=mesh,
            )  # fmt: skip
            check_op(
                lambda x, t, r=reduction: F.mse_loss(x, t, reduction=r),
                part, torch.randn(6, 5, 9).to(dtype), mesh=mesh,
            )  # fmt: skip


# ---- wrong input ------------------------------------------------------------


@ranks(2, 3)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_target_out_of_bounds_is_the_same_error_everywhere(mesh, dim, reduction):
    x, target = classes((4, 5))
    target[0] = 5
    part = shard(x, mesh, [Shard(dim)])
    with pytest.raises(IndexError, match=r"1 targets are out of bounds.*\[0, 5\)"):
        F.cross_entropy(part, target, reduction=reduction)


@ranks(2)
def test_targets_and_weights_of_the_wrong_size(mesh):
    x, target = classes((4, 5))
    part = shard(x, mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"sizes \[4\] .* sizes \[4, 5\], got \[3\]"):
        F.cross_entropy(part, target[:3])
    with pytest.raises(RuntimeError, match=r"a weight of sizes \[5\].* got \[4\]"):
        F.cross_entropy(part, target, torch.ones(4))
    with pytest.raises(RuntimeError, match="label_smoothing"):
        F.cross_entropy(part, target, label_smoothing=1.5)


@ranks(2)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_soft_margin_loss_does_not_broadcast_its_input(mesh, reduction):
    target = shard(torch.ones(5, 3), mesh, [Shard(0)], {0: [1, 4]})
    for x in torch.zeros(1, 3), torch.zeros(5, 1), target[:1]:
        told = rf"shape \[{x.shape[0]}, {x.shape[1]}\] .* shape \[5, 3\]"
        with pytest.raises(RuntimeError, match=told):
            F.soft_margin_loss(x, target, reduction=reduction)


@ranks(2)
def test_one_message_for_a_mean_over_classes(mesh):
    import shardtensor

    x, target = classes((4, 5, 6))
    part = shard(x, mesh, [Shard(2)])
    shardtensor.reset_comm_stats()
    shardtensor.reset_fallback_counts()
    F.cross_entropy(part, target).backward()
    stats = shardtensor.comm_stats()
    assert (stats.exchanges, stats.all_reduces) == (0, 1)
    assert shardtensor.fallback_counts() == {}


@ranks(1, 2)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_under_autocast(mesh, smoothing):
    """Weights are in float32, what a layer gives is not."""
    x, target = torch.randn(3, 5, 4).bfloat16(), torch.randint(0, 5, (3, 4))
    part = shard(x, mesh, [Shard(2)]).requires_grad_()
    weights = [torch.rand(5)]
    weights.append(weights[0].bfloat16())
    for weight in weights:
        for reduction in REDUCTIONS:
            options = {"reduction": reduction, "label_smoothing": smoothing}
            with rig.autocast(torch.bfloat16):
                expected = F.cross_entropy(x, target, weight, **options)
                y = F.cross_entropy(part, target, weight, **options)
            assert y.dtype == expected.dtype
            assert_close(y, expected, rtol=2e-2, atol=2e-2)
            assert torch.autograd.grad(y.sum(), part)[0].dtype == x.dtype
