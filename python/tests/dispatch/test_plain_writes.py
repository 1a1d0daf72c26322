"""ShardTensors written into plain tensors: the whole value, on every rank."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fourier import Spectral
from ranks import assert_close, check_op, partitions, ranks, shard, sharded, uneven
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor


def values(*shape):
    return torch.randn(shape, dtype=torch.float64)


def layouts(mesh, dims=(0, 1), extents=(6, 5)):
    """Every dim cut every way, and on two axes both."""
    if mesh.ndim == 2:
        rows = {0: uneven(extents[0], mesh.size(0)), 1: uneven(extents[1], 2)[::-1]}
        return [([Shard(0), Shard(1)], rows), ([Shard(1), Replicate()], {})]
    cuts = [
        ([Shard(dim)], {dim: sizes})
        for dim in dims
        for sizes in partitions(extents[dim], mesh.size())
    ]
    return [*cuts, ([Partial()], {}), ([Replicate()], {})]


def copied(x, plain):
    plain.copy_(x)
    return plain * 2


def set_in_part(x, plain):
    plain[..., 1:6] = x
    return plain.sin()


def set_by_steps(x, plain):
    plain[:, 1:6] = x
    plain[:, 0] = x[:, 2]
    plain[0] = x.sum()
    return plain * plain


def added(x, plain):
    plain[:, :5].add_(x, alpha=3)
    plain *= 2
    return plain


def added_cast_and_broadcast(x, plain):
    single = torch.zeros(2, 6, 5)
    single += x
    return single * 2


def indexed(x, plain):
    plain[torch.tensor([5, 0, 3]), :5] = x[1:4]
    plain.index_add_(1, torch.tensor([0, 0, 3, 1, 2]), x)
    return plain.exp()


def masked(x, plain):
    plain[:, :5][x.detach() > 0] = 7.0
    return plain.masked_fill_(plain > 6, x[0, 0])


def filled(x, plain):
    whole = plain.clone()
    whole[:, 2].fill_(x[1, 1])
    whole.addmm_(x, plain[:5], beta=0.5)
    return whole


CASES = [copied, set_in_part, set_by_steps, added, added_cast_and_broadcast]
CASES += [indexed, masked, filled]


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_a_plain_tensor_takes_the_whole_value_and_its_gradient(mesh, fn):
    shardtensor.set_fallback_mode("silent")
    x = values(6, 5).requires_grad_()
    shape = (6, 5) if fn is copied else (6, 7)
    plain = values(*shape).requires_grad_()
    if fn is added_cast_and_broadcast:
        plain.requires_grad_(False)

    def on_a_copy(x, plain):
        result = fn(x, plain.clone())
        assert type(result) is torch.Tensor
        return result

    for placements, sizes in layouts(mesh):
        check_op(
            on_a_copy,
            sharded(x, placements, sizes),
            plain,
            mesh=mesh,
            second_order=fn is not added_cast_and_broadcast,
            **({"rtol": 1e-5, "atol": 1e-5} if fn is added_cast_and_broadcast else {}),
        )


@ranks(2, 3)
@pytest.mark.parametrize("policy", ["immediate", "coalesced", "deferred"])
def test_a_filled_tensor_may_meet_shards_again(mesh, policy):
    shardtensor.set_fallback_mode("silent")
    x = values(4, 3).requires_grad_()

    def again(x):
        plain = torch.zeros(4, 3, dtype=torch.float64)
        plain.copy_(x * x)
        return (plain * x).sum() + plain.sum()

    with shardtensor.gradient_policy(policy):
        for placements, sizes in layouts(mesh, extents=(4, 3)):
            check_op(again, sharded(x, placements, sizes), mesh=mesh)


@ranks(1, 2, 3)
def test_results_are_written_into_plain_outs(mesh):
    shardtensor.set_fallback_mode("silent")
    whole = values(6, 5)
    calls = {
        "sum": lambda x, out: torch.sum(x, 0, out=out),
        "add": lambda x, out: torch.add(x, 1.5, out=out),
        "mm": lambda x, out: torch.mm(x, x.mT, out=out),
        "cat": lambda x, out: torch.cat([x, x], 1, out=out),
        "stack": lambda x, out: torch.stack([x, x], out=out),
    }
    for sizes in partitions(6, mesh.size()):
        x = shard(whole, mesh, [Shard(0)], {0: sizes})
        for name, call in calls.items():
            out = torch.empty(0, dtype=torch.float64)
            assert call(x, out) is out, name
            assert_close(out, call(whole, torch.empty(0, dtype=torch.float64)))
        out = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
        given = torch.max(x, 0, out=out)
        assert given[0] is out[0] and given[1] is out[1]
        assert_close(out[0], whole.max(0).values)
        assert_close(out[1], whole.max(0).indices)
        single = torch.empty(6, 5)
        torch.mul(x, 2, out=single)
        assert_close(single, (whole * 2).float())


@ranks(2)
def test_a_tuple_of_outs_may_be_of_both_kinds(mesh):
    shardtensor.set_fallback_mode("silent")
    whole = values(6, 5)
    x = shard(whole, mesh, [Shard(0)])
    out = shard(values(5), mesh, [Replicate()]), torch.empty(5, dtype=torch.int64)
    torch.max(x, 0, out=out)
    assert_close(out[0], whole.max(0).values)
    assert_close(out[1], whole.max(0).indices)


# Kept: PyTorch 2.11 compiles nothing more once an operator that it has seen is gone.
LIBRARY = torch.library.Library("written_test", "FRAGMENT")
LIBRARY.define("double_(Tensor(a!) x, Tensor(b!) y) -> ()")
LIBRARY.impl("double_", lambda x, y: None, "CompositeExplicitAutograd")


@ranks(2)
def test_what_one_call_changes_in_place_is_of_one_kind(mesh):
    x = shard(values(6, 5), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="and into ShardTensors at once; make all"):
        torch.ops.written_test.double_(x, values(6, 5))


@ranks(1, 2)
def test_views_versions_and_leaves_are_pytorchs(mesh):
    x = shard(values(4, 3).requires_grad_(), mesh, [Shard(0)])
    plain = torch.zeros(4, 5, dtype=torch.float64)
    part, version = plain[:, 1:4], plain._version
    part.copy_(x)
    assert plain._version == version + 1 and part.grad_fn is not None
    assert_close(plain[:, 1:4], x.full_tensor())
    leaf = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        leaf.add_(x)
    with pytest.raises(RuntimeError, match="don't support automatic diff"):
        torch.add(x, 1, out=torch.zeros(4, 3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        torch.zeros(2, 3).copy_(x)
    saved = plain.clone().requires_grad_() * 1
    squared = saved.square().sum()
    saved[:, :3] = x
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()
    total = torch.zeros((), dtype=torch.float64)
    alias = total.view(1)
    total += x.sum()
    assert type(total) is torch.Tensor
    assert_close(alias, x.full_tensor().sum().reshape(1))


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", ["scatter_add_", "index_add_"])
def test_of_rows_that_are_added_only_sums_are_gathered(mesh, name):
    """The degrees of nodes, as graph libraries count them."""
    x = values(13, 4).requires_grad_()
    plain = values(6, 4).requires_grad_()
    ends = torch.tensor([0, 5, 5, 1, 2, 2, 0, 4, 1, 1, 0, 5, 4])
    index = ends[:, None].expand(-1, 4) if name == "scatter_add_" else ends
    alpha = {} if name == "scatter_add_" else {"alpha": 3}

    def added(x, plain, index):
        result = getattr(plain.clone(), name)(0, index, x, **alpha)
        assert type(result) is torch.Tensor
        return result

    def degrees(ends):
        whole = torch.zeros(6, dtype=torch.long)
        return getattr(whole, name)(0, ends, torch.ones_like(ends), **alpha)

    by_rows = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    for placements in (by_rows, [Shard(0)] * mesh.ndim):
        cut = sharded(index, placements), sharded(ends, placements)
        with shardtensor.fallback_mode("error"):
            rows = sharded(x, placements)
            check_op(added, rows, plain, cut[0], mesh=mesh, second_order=True)
            check_op(degrees, cut[1], mesh=mesh)


@ranks(2, 3)
def test_it_is_counted_said_and_forbidden_as_a_fallback(mesh):
    x = shard(values(6, 5), mesh, [Shard(0)], {0: uneven(6, mesh.size())})
    plain = torch.zeros(6, 5, dtype=torch.float64)
    shardtensor.reset_fallback_counts()
    with pytest.warns(UserWarning, match=r"aten::copy_ has no rule.*Said once"):
        plain.copy_(x)
    calls, elements = shardtensor.fallback_counts()["aten::copy_"]
    assert calls == 1 and elements == 6 * 5 * (mesh.size() - 1)
    with shardtensor.fallback_mode("error"):
        with pytest.raises(NotImplementedError, match="aten::copy_ has no rule"):
            plain.copy_(x)
        total = torch.zeros((), dtype=torch.float64)
        total += x.sum()  # one number: nothing is gathered
        assert_close(total, x.full_tensor().sum())
    mode = shardtensor.TensorPromotionMode.DISABLED
    with ShardTensor.promotion_mode(mode), pytest.raises(ValueError, match="disabled"):
        plain.copy_(x)


@ranks(1, 2)
def test_lists_of_both_kinds_are_written_place_by_place(mesh):
    whole = [values(4), values(3, 2), values(4)]
    others = [values(4).requires_grad_(), values(3, 2), values(4)]

    def both_kinds(tensors):
        first, second, third = tensors
        return [shard(first, mesh, [Shard(0)]), second.clone(), third.clone()]

    mixed = both_kinds(whole)
    given = [shard(t, mesh, [Shard(0)]) for t in others[:2]] + others[2:]
    torch._foreach_add_(mixed, given, alpha=2)
    torch._foreach_mul_(mixed, [2.0, 3.0, 4.0])
    expected = [t.clone() for t in whole]
    torch._foreach_add_(expected, others, alpha=2)
    torch._foreach_mul_(expected, [2.0, 3.0, 4.0])
    for actual, wanted in zip(mixed, expected, strict=True):
        assert_close(actual, wanted)
    assert [isinstance(t, ShardTensor) for t in mixed] == [True, False, False]
    scale = shard(values(4), mesh, [Shard(0)]).sum()
    plain = [t.clone() for t in whole]
    torch._foreach_mul_(plain, scale)
    for actual, start in zip(plain, whole, strict=True):
        assert_close(actual, start * scale.full_tensor())


@ranks(2)
def test_plain_tensors_do_not_take_a_shards_memory(mesh):
    x = shard(values(4), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match=r"aten::set_.*use copy_\(\)"):
        torch.zeros(4, dtype=torch.float64).set_(x)


def one_hot(x):
    return F.one_hot(x.detach().argsort(1), 7)


def ctc_loss(x):
    probabilities = x.reshape(5, 2, 3).log_softmax(-1)
    targets = torch.tensor([[1, 2], [2, 1]])
    return F.ctc_loss(probabilities, targets, (5, 4), (2, 1))


@ranks(2, "2x2")
def test_lengths_of_ctc_loss_may_be_cut(mesh):
    shardtensor.set_fallback_mode("silent")
    probabilities = values(5, 2, 3).log_softmax(-1)
    targets = torch.tensor([[1, 2], [2, 1]])
    lengths = [torch.tensor([5, 4]), torch.tensor([2, 1])]
    expected = F.ctc_loss(probabilities, targets, *lengths)
    cut = [shard(x, mesh, [Shard(0)] * mesh.ndim) for x in lengths]
    assert_close(F.ctc_loss(probabilities, targets, *cut), expected)
    with pytest.raises(RuntimeError, match="ctc_loss: expected lengths of integers"):
        F.ctc_loss(probabilities, targets, cut[0].float(), cut[1])


def linear_cross_entropy(x):
    weight = torch.linspace(-1, 1, 20, dtype=x.dtype).reshape(4, 5)
    return F.linear_cross_entropy(x, weight, torch.arange(6) % 4)


def matrix_exp(x):
    return torch.matrix_exp((x.mT @ x) / 9)


def matrix_rank(x):
    return torch.linalg.matrix_rank(x)


def trace(x):
    return torch.trace(x[:5])


FILLING = [one_hot, ctc_loss, linear_cross_entropy, matrix_exp, matrix_rank, trace]


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("fn", FILLING, ids=lambda fn: fn.__name__)
def test_composites_that_fill_a_tensor_of_their_own(mesh, fn):
    if fn is linear_cross_entropy and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("not in this version of PyTorch")
    shardtensor.set_fallback_mode("silent")
    x = values(6, 5).requires_grad_()
    for placements, sizes in layouts(mesh):
        check_op(fn, sharded(x, placements, sizes), mesh=mesh)


@ranks(1, 2, 3, "2x2")
def test_a_fourier_layer(mesh):
    shardtensor.set_fallback_mode("silent")
    layer = Spectral(3, 2)
    x = values(2, 3, 6, 7).requires_grad_()
    rows = {2: uneven(6, mesh.size(0))}
    cuts = [([Shard(dim)], rows if dim == 2 else {}) for dim in range(4)]
    if mesh.ndim == 2:
        cuts = [([Shard(2), Shard(3)], rows), ([Shard(0), Shard(2)], {})]
    for placements, sizes in cuts:
        check_op(copy.deepcopy(layer), sharded(x, placements, sizes), mesh=mesh)
