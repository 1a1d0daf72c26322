"""Sums of gradients beside backward: started early, by all ranks in one order, waited
for at its end."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from perceptrons import assert_same_gradients, data, network, pair, rows_on
from ranks import ranks, shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import shardtensor as st

LAYER_BYTES = 8 * (6 * 6 + 6)  # of network()'s layers
WIDTHS = [1, LAYER_BYTES, 2 * LAYER_BYTES, 1 << 30]


def all_reduces():
    return st.comm_stats().all_reduces


def loss_of(model, x):
    return model(x).square().mean()


def input_on(mesh):
    """No leaf: those are reached before the parameters of the layer behind them."""
    return rows_on(mesh, data(), requires_grad=True) * 1


def note_all_reduces(model, x, seen):
    """Appends, whenever backward has gone through one more layer of the forward that
    follows."""
    st.reset_comm_stats()

    def note(grad):
        assert all(p.grad is None for p in model.parameters())
        seen.append(all_reduces())

    x.register_hook(note)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _, __, y: y.register_hook(note) and None)


@ranks(2, 3)
def test_buckets_start_while_backward_goes_on(mesh):
    model, reference = network(layers=4), network(layers=4)
    x = input_on(mesh)
    seen = []
    note_all_reduces(model, x, seen)
    with st.gradient_bucket_bytes(LAYER_BYTES):
        loss_of(model, x).backward()
    assert seen == [0, 1, 2, 3, 4]
    loss_of(reference, data()).backward()
    assert_same_gradients(model, reference)


@ranks(2)
def test_what_is_left_starts_with_the_last_term(mesh):
    x = input_on(mesh)
    model, seen = network(), []
    note_all_reduces(model, x, seen)
    loss_of(model, x).backward()
    assert seen == [0, 0, 0, 1]


@ranks(2)
@pytest.mark.parametrize("bytes, messages", [(1, 8), (336, 4), (337, 3), (1 << 30, 1)])
def test_a_bucket_travels_from_so_many_bytes_on(mesh, bytes, messages):
    model = network(layers=4)
    loss = loss_of(model, rows_on(mesh, data()))
    st.reset_comm_stats()
    with st.gradient_bucket_bytes(bytes):
        loss.backward()
    assert all_reduces() == messages


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("bytes", WIDTHS)
def test_gradients_are_those_of_one_device(mesh, bytes):
    model, reference = pair()
    with st.gradient_bucket_bytes(bytes):
        for scale in (1.0, 2.0):  # the second one adds
            (model(rows_on(mesh, data())) * scale).sum().backward()
            (reference(data()) * scale).sum().backward()
    assert_same_gradients(model, reference)


@ranks(2)
def test_two_ranks_give_the_same_bits_in_any_buckets(mesh):
    grads = []
    for bytes in WIDTHS:
        model = network()
        with st.gradient_bucket_bytes(bytes):
            loss_of(model, rows_on(mesh, data())).backward()
        grads.append([p.grad for p in model.parameters()])
    for other in grads[1:]:
        assert all(map(torch.equal, grads[0], other))


@ranks(2)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_gradient_has_memory_of_its_own(mesh, layers):
    model = network(layers=layers)
    for bytes in (1, 1 << 30):
        model.zero_grad()
        with st.gradient_bucket_bytes(bytes):
            loss_of(model, rows_on(mesh, data())).backward()
        for p in model.parameters():
            assert p.grad.untyped_storage().nbytes() == p.grad.nbytes


@ranks(2)
def test_dtypes_fill_buckets_of_their_own(mesh):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(6, 6)
            self.middle = nn.Linear(6, 6, dtype=torch.double)
            self.last = nn.Linear(6, 6, dtype=torch.cfloat)

        def forward(self, x):
            x = self.middle(self.first(x).double())
            return self.last(x.to(torch.cfloat)).abs()

    model, reference = Mixed(), Mixed()
    st.reset_comm_stats()
    loss_of(model, rows_on(mesh, data().float())).backward()
    assert all_reduces() == 3
    loss_of(reference, data().float()).backward()
    assert_same_gradients(model, reference)


@ranks(2, 3)
@pytest.mark.parametrize("bytes", WIDTHS)
def test_unused_parameters_have_no_gradient(mesh, bytes):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5)).double()

        def forward(self, x, used):
            dropped = self.layers[0](x)  # in forward, not in backward
            for i in used:
                x = torch.tanh(self.layers[i](x))
            return x, dropped

    model, reference = Branches(), Branches()
    for used in ([1, 3], [4, 2], [3]):
        model.zero_grad()
        reference.zero_grad()
        with st.gradient_bucket_bytes(bytes):
            model(rows_on(mesh, data()), used)[0].square().mean().backward()
        reference(data(), used)[0].square().mean().backward()
        for i, layer in enumerate(model.layers):
            assert (layer.weight.grad is None) == (i not in used)
            if i in used:
                assert_same_gradients(layer, reference.layers[i])


@ranks(2, 3)
def test_backward_of_chosen_inputs_sums_theirs_alone(mesh):
    model, reference = network(layers=4), network(layers=4)
    st.reset_comm_stats()
    with st.gradient_bucket_bytes(LAYER_BYTES):
        loss_of(model, rows_on(mesh, data())).backward(inputs=[*model[4].parameters()])
    assert all_reduces() == 1
    loss_of(reference, data()).backward(inputs=[*reference[4].parameters()])
    for layer in model:
        for p in layer.parameters():
            assert (p.grad is None) == (layer is not model[4])
    assert_same_gradients(model[4], reference[4])


@ranks(2, 3)
@pytest.mark.parametrize("in_thread", ["layer", "product"])
def test_ranks_may_go_through_backward_in_another_order(mesh, in_thread):
    """A thread numbers what it records from 0: its nodes come last in backward."""
    model, reference = pair()
    orders = []
    for layer in (model[0], model[2]):
        layer.register_forward_hook(
            lambda layer, _, y: y.register_hook(lambda _: orders.append(layer)) and None
        )

    def forward(model, x, threaded):
        first = model[0](x)
        steps = {"layer": model[2], "product": lambda y: y * 2}
        second = x
        for name, step in steps.items():

            def run(step=step):
                nonlocal second
                second = step(second)

            if threaded and name == in_thread:
                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
            else:
                run()
        return first.sum() + second.square().sum()

    network()(rows_on(mesh, data()))  # this thread is beyond 0
    with st.gradient_bucket_bytes(1):
        forward(model, rows_on(mesh, data()), dist.get_rank() == 0).backward()
    expected = [model[2], model[0]]
    assert orders == (expected[::-1] if dist.get_rank() == 0 else expected)
    forward(reference, data(), False).backward()
    for i in (0, 2):
        assert_same_gradients(model[i], reference[i])


@ranks(2, 3)
@pytest.mark.parametrize("bytes", WIDTHS)
def test_a_failed_backward_leaves_nothing_behind(mesh, bytes):
    model, reference = pair()
    x = input_on(mesh)
    hidden = []
    model[2].register_forward_hook(lambda _, __, y: hidden.append(y) and None)

    def fail(_):
        raise RuntimeError("stop here")

    with st.gradient_bucket_bytes(bytes):
        for where in ("middle", "end"):
            loss = loss_of(model, x)
            at = x if where == "end" else hidden[-1]
            handle = at.register_hook(fail)
            with pytest.raises(RuntimeError, match="stop here"):
                loss.backward()
            handle.remove()
            assert all(p.grad is None for p in model.parameters())
        loss_of(model, x).backward()
    loss_of(reference, data()).backward()
    assert_same_gradients(model, reference)


@ranks(2, 3)
def test_a_rank_that_fails_late_holds_up_nobody(mesh):
    """It has started all its sums."""
    model, reference = pair()
    x = input_on(mesh)

    def fail(_):
        raise RuntimeError("stop here")

    with st.gradient_bucket_bytes(1):
        if dist.get_rank() == 1:
            x.register_hook(fail)
            with pytest.raises(RuntimeError, match="stop here"):
                loss_of(model, x).backward()
            assert all(p.grad is None for p in model.parameters())
            return
        loss_of(model, x).backward()
    loss_of(reference, data()).backward()
    assert_same_gradients(model, reference)


@ranks(2)
@pytest.mark.parametrize("bytes", WIDTHS)
def test_a_graph_that_is_kept(mesh, bytes):
    model, reference = pair()
    with st.gradient_bucket_bytes(bytes):
        for net, x in ((model, rows_on(mesh, data())), (reference, data())):
            loss = loss_of(net, x)
            loss.backward(retain_graph=True)
            loss.backward()
    assert_same_gradients(model, reference)


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_within_backward(mesh, reentrant):
    model, reference = network(layers=4), network(layers=4)
    x = input_on(mesh)
    with st.gradient_bucket_bytes(LAYER_BYTES):
        h = checkpoint(model[:4], x, use_reentrant=reentrant)
        model[4:](h).square().mean().backward()
    loss_of(reference, data()).backward()
    assert_same_gradients(model, reference)


@ranks(2)
def test_hooks_and_buckets_in_one_backward(mesh):
    model, reference = network(layers=4), network(layers=4)
    seen = []
    for p in (model[6].weight, model[2].bias):
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = input_on(mesh)
    with st.gradient_bucket_bytes(LAYER_BYTES):
        loss_of(model, x).backward()
    loss_of(reference, data()).backward()
    assert_same_gradients(model, reference)
    torch.testing.assert_close(seen, [reference[6].weight.grad, reference[2].bias.grad])


@ranks(2, 3)
@pytest.mark.parametrize("bytes", [1, 1 << 30])
def test_halos_travel_between_buckets(mesh, bytes):
    def make():
        torch.manual_seed(0)
        parts = [nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3)]
        return nn.Sequential(*parts).double()

    model, reference = make(), make()
    x = torch.randn(2, 2, 11, 5).double()
    with st.gradient_bucket_bytes(bytes):
        loss_of(model, shard(x, mesh, [Shard(2)])).backward()
    loss_of(reference, x).backward()
    assert_same_gradients(model, reference)


@ranks("2x2")
@pytest.mark.parametrize("bytes", [1, 1 << 30])
def test_sums_over_one_axis_and_over_both(mesh, bytes):
    model, reference = pair()
    x = data(8)
    with st.gradient_bucket_bytes(bytes):
        y = model[:2](shard(x, mesh, [Shard(0), Shard(0)]))
        z = model[2:](rows_on(mesh, x))
        (y.sum() + z.square().mean()).backward()
    (reference[:2](x).sum() + reference[2:](x).square().mean()).backward()
    assert_same_gradients(model, reference)


def test_bucket_bytes_are_a_setting():
    assert st.get_gradient_bucket_bytes() == 25 << 20  # the default
    with st.gradient_bucket_bytes(5):
        assert st.get_gradient_bucket_bytes() == 5
    assert st.get_gradient_bucket_bytes() == 25 << 20
    for bytes in (0, -1):
        with pytest.raises(ValueError, match=f"positive number of bytes, got {bytes}"):
            st.set_gradient_bucket_bytes(bytes)
