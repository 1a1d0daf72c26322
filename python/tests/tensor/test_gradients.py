"""Gradients of plain parameters: complete, plain, in few messages, whoever
looks at them and whenever."""

import pytest
import rig
import torch
import torch.distributed as dist
import torch.nn as nn
from perceptrons import assert_same_gradients, data, network, pair, rows_on
from ranks import assert_close, partitions, ranks, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardtensor as st


class policy:
    """set_gradient_policy within a with-block."""

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.before = st.get_gradient_policy()
        st.set_gradient_policy(self.name)

    def __exit__(self, *_):
        st.set_gradient_policy(self.before)


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("name", ["immediate", "coalesced"])
def test_gradients_are_plain_and_complete(mesh, name):
    model, reference = pair()
    with policy(name):
        model(rows_on(mesh, data())).square().mean().backward()
    reference(data()).square().mean().backward()
    assert_same_gradients(model, reference)


@ranks(2, 3)
@pytest.mark.parametrize("name", ["immediate", "coalesced"])
def test_gradients_accumulate(mesh, name):
    model, reference = pair()
    with policy(name):
        for scale in (1.0, 2.0):
            (model(rows_on(mesh, data())) * scale).sum().backward()
            (reference(data()) * scale).sum().backward()
    assert_same_gradients(model, reference)


@ranks(2)
def test_all_parameters_travel_in_one_message(mesh):
    counts = []
    for layers in (1, 8):
        model = network(layers=layers)
        loss = model(rows_on(mesh, data())).square().sum().full_tensor()
        st.reset_comm_stats()
        loss.backward()
        counts.append(st.comm_stats().all_reduces)
    assert counts == [1, 1]


@ranks(2)
def test_torch_autograd_grad_sees_complete_gradients(mesh):
    model, reference = pair()
    loss = model(rows_on(mesh, data())).square().mean()
    got = torch.autograd.grad(loss, list(model.parameters()))
    want = torch.autograd.grad(
        reference(data()).square().mean(), list(reference.parameters())
    )
    torch.testing.assert_close(got, want)
    assert all(p.grad is None for p in model.parameters())


@ranks(2, 3)
def test_second_derivatives_of_parameters(mesh):
    def penalty(model, x):
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return sum(g.square().sum() for g in grads)

    model, reference = pair()
    penalty(model, rows_on(mesh, data())).backward()
    penalty(reference, data()).backward()
    assert_same_gradients(model, reference)


class OwnLinear(torch.autograd.Function):
    """Of a user, who returns the gradients of what forward was given."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, (x.t() @ grad).t(), grad.sum(0)


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("create_graph", [False, True])
def test_ones_own_function_gives_plain_parameters_plain_gradients(mesh, create_graph):
    """Whatever layout it has, the first time and when it is added."""
    model, reference = pair()
    x, rows = data(), rows_on(mesh, data())
    for _ in range(3):
        for layers, signal in (model[::2], rows), (reference[::2], x):
            for layer in layers:
                signal = OwnLinear.apply(signal, layer.weight, layer.bias).sigmoid()
            signal.square().mean().backward(create_graph=create_graph)
        assert_same_gradients(model, reference)


@ranks(2)
def test_a_hook_may_compute_with_shard_tensors(mesh):
    """Which stay what they are while the gradient of a plain tensor is added."""
    (model, _), rows, seen = pair(), rows_on(mesh, data()), []
    model[0].bias.register_post_accumulate_grad_hook(
        lambda _: seen.append(rows.cumsum(1).mean(1))
    )
    model(rows).sum().backward()
    (mean,) = seen
    assert isinstance(mean, st.ShardTensor) and mean.placements == rows.placements
    torch.testing.assert_close(mean.full_tensor(), data().cumsum(1).mean(1))


@ranks(2)
def test_hooks_see_complete_gradients(mesh):
    model, reference = pair()
    seen = {"tensor": [], "accumulated": []}
    weight, want = model[0].weight, reference[0].weight
    weight.register_hook(lambda g: seen["tensor"].append(g.clone()))
    bias = model[0].bias
    bias.register_post_accumulate_grad_hook(
        lambda p: seen["accumulated"].append(p.grad.clone())
    )
    model(rows_on(mesh, data())).square().mean().backward()
    reference(data()).square().mean().backward()
    torch.testing.assert_close(seen["tensor"], [want.grad])
    torch.testing.assert_close(seen["accumulated"], [reference[0].bias.grad])


@ranks(2)
def test_a_shared_weight_gets_both_contributions(mesh):
    model, reference = pair()
    for net in (model, reference):
        net[2].weight = net[0].weight
    model(rows_on(mesh, data())).square().mean().backward()
    reference(data()).square().mean().backward()
    assert_same_gradients(model, reference)


@ranks(2)
def test_a_weight_that_is_not_a_leaf(mesh):
    scale = torch.tensor(2.0, dtype=torch.double, requires_grad=True)
    want = scale.detach().clone().requires_grad_()
    base = data(6, 6)
    (rows_on(mesh, data()) @ (base * scale)).square().mean().backward()
    (data() @ (base * want)).square().mean().backward()
    torch.testing.assert_close(scale.grad, want.grad)


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients(mesh, reentrant):
    model, reference = pair()
    x = rows_on(mesh, data(), requires_grad=True)
    checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
    reference(data()).square().mean().backward()
    assert_same_gradients(model, reference)


@ranks(2)
def test_a_failed_backward_leaves_nothing_behind(mesh):
    model, reference = pair()
    x = rows_on(mesh, data(), requires_grad=True)

    def fail(_):
        raise RuntimeError("stop here")

    handle = x.register_hook(fail)
    with pytest.raises(RuntimeError, match="stop here"):
        model(x).square().mean().backward()
    handle.remove()
    assert all(p.grad is None for p in model.parameters())
    model(x).square().mean().backward()
    reference(data()).square().mean().backward()
    assert_same_gradients(model, reference)


@ranks(2)
def test_optimizers_keep_replicas_equal(mesh):
    model, reference = pair()
    for net, x in ((model, rows_on(mesh, data())), (reference, data())):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_gradient_policy_names_what_it_takes():
    with pytest.raises(ValueError, match="'immediate', 'coalesced' or 'deferred'"):
        st.set_gradient_policy("sometimes")


# ---- data parallel beside domain parallel -----------------------------------


def batches(mesh):
    """This data-parallel replica's own batch, and all of them together."""
    every = [data() + i for i in range(mesh.size(0))]
    return every[mesh.get_local_rank(0)], torch.cat(every)


@ranks("2x2")
@pytest.mark.parametrize("name", ["immediate", "coalesced"])
def test_ddp_over_the_data_axis(mesh, name):
    model, reference = pair()
    mine, every = batches(mesh)
    domain = mesh["domain_w"]
    wrapped = nn.parallel.DistributedDataParallel(
        model, process_group=mesh.get_group(0)
    )
    with policy(name):
        wrapped(rows_on(domain, mine)).square().mean().backward()
    reference(every).square().mean().backward()
    assert_same_gradients(model, reference)


@ranks("2x2")
def test_ddp_over_the_whole_mesh_with_deferred_gradients(mesh):
    model, reference = pair()
    mine, every = batches(mesh)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=dist.group.WORLD)
    with policy("deferred"):
        st.reset_comm_stats()
        loss = wrapped(rows_on(mesh["domain_w"], mine)).square().mean()
        loss.backward()
        assert st.comm_stats().all_reduces == 0
    reference(every).square().mean().backward()
    assert_same_gradients(model, reference)


@ranks("2x2")
@pytest.mark.parametrize("name", [None, "immediate", "coalesced", "deferred"])
def test_fsdp_by_hand(mesh, name):
    """Over any axes: it reads gradients inside backward, whose end is too late."""
    from torch.distributed.fsdp import fully_shard

    mine, every = batches(mesh)
    everywhere = init_device_mesh(rig.DEVICE, (4,))
    for over, batch in (
        (mesh["domain_h"], every),
        (mesh["domain_w"], mine),
        (everywhere, every),
    ):
        model, reference = pair()
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
        with policy(name or st.get_gradient_policy()):
            loss = model(rows_on(mesh["domain_w"], mine)).square().mean()
        if name == "deferred" and over == mesh["domain_h"]:
            with pytest.raises(ValueError, match=OTHERS):
                loss.backward()
            continue
        loss.backward()
        reference(batch).square().mean().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


OTHERS = (
    r"policy 'deferred': a parameter of sizes \[.*\] is averaged over 2 ranks, "
    r"expected at least all along axis 0 of Mesh\(2: domain_w\)"
)


@ranks("2x2")
def test_deferred_gradients_that_ddp_averages_over_other_ranks(mesh):
    wrapped = nn.parallel.DistributedDataParallel(
        network(), process_group=mesh.get_group(0)
    )
    with policy("deferred"):
        loss = wrapped(rows_on(mesh["domain_w"], data())).square().mean()
    with pytest.raises(ValueError, match=OTHERS):
        loss.backward()


@ranks(2)
def test_a_parameter_that_somebody_frees(mesh):
    x = rows_on(mesh, data(), requires_grad=True)
    weight = torch.ones(6, requires_grad=True)

    def free(_):
        weight.untyped_storage().resize_(0)

    x.register_hook(free)
    told = r"sizes \[6\] was freed before the end of backward; use .* 'immediate'"
    with pytest.raises(RuntimeError, match=told):
        (x * 1 + weight).sum().backward()


@ranks(1, 2, "2x2")
def test_a_leaf_that_is_shown_otherwise_since(mesh):
    whole = torch.arange(6.0, requires_grad=True)
    part = shard(whole, mesh, [Shard(0)] * mesh.ndim)
    for x in (whole, part):
        y = (x * 2).sum()
        with torch.no_grad():
            x.unsqueeze_(0)
        y.backward()
    assert_close(part.grad, whole.grad)


@ranks(2)
def test_numbers_of_gradients_in_integers(mesh):
    """PyTorch has them require grad, and nobody can ask for it."""
    x = shard(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
    for i in (torch.arange(4), torch.tensor(0)):
        part = shard(i, mesh, [Shard(0) if i.dim() else Replicate()])
        part.fill_(x.sum())
        assert part.requires_grad
        assert part.full_tensor().tolist() == i.fill_(6).tolist()


@ranks(1, 2)
def test_accumulation_never_writes_into_a_gradient_somebody_holds(mesh):
    kept = []
    for x in (rows_on(mesh, data()), data()):
        x = x.detach().requires_grad_()
        inner = x * 1
        flat, other = inner.view(x.shape), x * 2
        other.retain_grad()
        (flat * 1 + other + (inner * 3)).sum().backward()
        kept += [other.grad, x.grad]
    for got, want in zip(kept[:2], kept[2:], strict=True):
        torch.testing.assert_close(got.full_tensor(), want)


@ranks(2, 3)
@pytest.mark.parametrize("pin_memory", [False, True])
def test_saved_on_the_cpu_stays_in_pieces(mesh, pin_memory):
    x = torch.randn(2, 7, dtype=torch.float64)
    w = torch.randn(7, 3, dtype=torch.float64)
    st.set_fallback_mode("error")

    def gradients(x):
        leaves = x.detach().requires_grad_(), w.clone().requires_grad_()
        with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
            y = (leaves[0] @ leaves[1]).sin().square().sum()
        return torch.autograd.grad(y, leaves)

    for sizes in partitions(7, mesh.size()):
        for dim in (0, 1):
            cut = shard(x, mesh, [Shard(dim)], {1: sizes} if dim else None)
            for found, expected in zip(gradients(cut), gradients(x), strict=True):
                assert_close(found, expected)
