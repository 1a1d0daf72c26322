"""Recurrent layers and cells: each rank runs them on its samples, or on whole packed
sequences, which have several lengths."""

import pytest
import rig
import torch
from layouts import check_native, placements_of
from oracle import WHOLE, check_op, sharded
from ranks import assert_close, partitions, ranks, shard, uneven
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import shardtensor

LAYERS = {
    "gru": lambda: nn.GRU(4, 3, bidirectional=True),
    "lstm": lambda: nn.LSTM(4, 3, 2),
    "tanh": lambda: nn.RNN(4, 3),
    "relu": lambda: nn.RNN(4, 3, nonlinearity="relu"),
}
CELLS = {
    "gru": lambda: nn.GRUCell(4, 3),
    "lstm": lambda: nn.LSTMCell(4, 3),
    "tanh": lambda: nn.RNNCell(4, 3, bias=False),
    "relu": lambda: nn.RNNCell(4, 3, nonlinearity="relu"),
}
TWICE = {"second_order": rig.DEVICE != "cuda"}  # cuDNN knows no second derivative


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", LAYERS)
def test_steps_become_whole_and_samples_cut(mesh, name):
    layer = LAYERS[name]().double()
    for layer.batch_first in (False, True) if WHOLE else (mesh.ndim == 2,):
        check_native(mesh, (9, 8, 4), layer, **TWICE)
    if mesh.ndim == 1:
        layer.batch_first = True
        x = torch.randn(5, 9, 4).double()
        x = shard(x, mesh, placements_of(mesh, 1), {1: uneven(9, mesh.size())})
        assert layer(x)[0].to_local().shape[:2] == x.to_local().shape[:2]


def results(layer, x):
    output, states = layer(x)
    return output, *(states if isinstance(states, tuple) else (states,))


@ranks(2, 3)
@pytest.mark.parametrize("name", LAYERS)
def test_samples_need_no_message(mesh, name):
    """In any pieces, and they lie in memory as those of one device do."""
    layer = LAYERS[name]().double()
    for layer.batch_first in (False, True):
        dim = 0 if layer.batch_first else 1
        x = torch.randn((7, 5, 4) if dim == 0 else (5, 7, 4), dtype=torch.float64)
        expected = results(layer, x)
        for sizes in partitions(7, mesh.size()):
            shardtensor.reset_comm_stats()
            found = results(layer, shard(x, mesh, [Shard(dim)], {dim: sizes}))
            assert shardtensor.comm_stats().bytes == 0
            for one, other in zip(found, expected, strict=True):
                assert_close(one, other)
                assert one.stride() == other.stride()


@ranks(2, 3)
@pytest.mark.parametrize("name", LAYERS)
def test_given_states_are_cut_with_the_samples(mesh, name):
    layer = LAYERS[name]().double()
    count = {"gru": 2, "lstm": 2}.get(name, 1)
    for sizes in partitions(7, mesh.size()):
        x, *states = (
            torch.randn(n, 7, c, dtype=torch.float64, requires_grad=True)
            for n, c in ((5, 4), (count, 3), (count, 3))
        )
        states = states if name == "lstm" else states[:1]
        parts = [sharded(t, [Shard(1)], {1: sizes}) for t in (x, *states)]
        check_op(Stateful(layer), *parts, mesh=mesh, **TWICE)


class Stateful(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *states):
        output, found = self.layer(x, states if len(states) > 1 else states[0])
        return output, found


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", CELLS)
def test_cells(mesh, name):
    cell = CELLS[name]().double()
    check_native(mesh, (9, 4), cell, **TWICE)


@ranks(2, 3)
def test_one_sample_is_gathered(mesh):
    """Step by step, but for cuDNN, which takes all."""
    shardtensor.set_fallback_mode("silent")
    layer, x = nn.GRU(4, 3).double(), torch.randn(9, 1, 4).double()
    found, _ = layer(shard(x, mesh, placements_of(mesh, 0)))
    assert_close(found, layer(x)[0])
    name = "aten::_cudnn_rnn" if x.is_cuda else "aten::unbind"
    assert name in shardtensor.fallback_counts()


@ranks(2, 3)
def test_dropout_is_that_of_one_device(mesh):
    layer, x = nn.LSTM(4, 3, 2, dropout=0.5), torch.randn(6, 5, 4)
    outputs = []
    with shardtensor.fallback_mode("silent"):
        for given in (x, shard(x, mesh, [Shard(1)]), shard(x, mesh, [Shard(0)])):
            torch.manual_seed(3)
            outputs.append(layer(given)[0])
    assert_close(outputs[1], outputs[0])
    assert_close(outputs[2], outputs[0])


@ranks(2, 3)
def test_errors_are_those_of_one_device(mesh):
    """On a rank without samples, too."""
    layer, cell, x = nn.GRU(4, 3), nn.GRUCell(4, 3), torch.randn(5, 7, 4)
    sizes = [7] + [0] * (mesh.size() - 1)
    for fn in (
        lambda x: torch.gru(
            x, torch.zeros(1, 7, 5), layer._flat_weights, True, 1, 0.0, False, False,
            False,
        ),
        lambda x: torch.gru_cell(x[0], torch.zeros(7, 5), *cell.parameters()),
        lambda x: cell(x[0], torch.zeros(6, 3)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            fn(x)
        with pytest.raises(RuntimeError):
            fn(shard(x, mesh, [Shard(1)], {1: sizes}))


def of_packed(layer, x, lengths):
    """Outputs, and gradients of the input and all weights."""
    x = x.detach().requires_grad_()
    ordered = all(a >= b for a, b in zip(lengths, lengths[1:]))
    packed = pack_padded_sequence(x, lengths, enforce_sorted=ordered)
    assert type(packed.batch_sizes) is torch.Tensor
    out, state = layer(packed)
    states = state if isinstance(state, tuple) else (state,)
    padded, found = pad_packed_sequence(out, total_length=7)
    assert found.tolist() == lengths
    loss = sum(t.square().sum() for t in (padded, *states))
    given = [x, *layer.parameters()]
    grads = torch.autograd.grad(loss, given, create_graph=not x.is_cuda)
    if x.is_cuda:  # cuDNN knows no second derivative
        return padded, *states, *grads
    loss = sum(g.square().sum() for g in grads)
    second = torch.autograd.grad(loss, given, allow_unused=True)
    assert second[0] is not None
    return padded, *states, *grads, *(g for g in second if g is not None)


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_packed_sequences(mesh, name):
    shardtensor.set_fallback_mode("silent")
    layer = LAYERS[name]().double()
    x = torch.randn(5, 4, 4).double()
    for lengths in ([5, 4, 2, 1], [2, 5, 1, 4]):
        expected = of_packed(layer, x, lengths)
        for dim in range(3):
            found = of_packed(layer, shard(x, mesh, placements_of(mesh, dim)), lengths)
            for one, other in zip(found, expected, strict=True):
                assert_close(one, other)
    assert "aten::_pack_padded_sequence" in shardtensor.fallback_counts()


@ranks(2, 3, "2x2")
def test_weights_that_are_cut(mesh):
    """Operator by operator; samples are cut instead of steps meanwhile."""
    weights = [w.detach().double() for w in nn.LSTM(4, 3)._flat_weights]
    state = torch.zeros(1, 7, 3, dtype=torch.float64)

    def trained(x, weights):
        leaves = [t.detach().requires_grad_() for t in (x, *weights)]
        outputs = torch.lstm(
            leaves[0], (state, state), leaves[1:], True, 1, 0.0, True, False, False
        )
        sum((y * y).sum() for y in outputs).backward()
        return *outputs, *(t.grad for t in leaves)

    x = torch.randn(5, 7, 4, dtype=torch.float64)
    expected = trained(x, weights)
    cut = [shard(w, mesh, placements_of(mesh, 0)) for w in weights]
    with shardtensor.fallback_mode("silent"):
        for dim in range(3):
            found = trained(shard(x, mesh, placements_of(mesh, dim)), cut)
            for one, other in zip(found, expected, strict=True):
                assert_close(one, other)
