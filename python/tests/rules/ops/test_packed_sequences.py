"""Sequences of several lengths, packed, in recurrent layers."""

import pytest
import torch
from layouts import placements_of
from ranks import assert_close, ranks, shard
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import shardtensor

LAYERS = {
    "gru": lambda: nn.GRU(4, 3, 2, bidirectional=True),
    "lstm": lambda: nn.LSTM(4, 3, bidirectional=True),
    "tanh": lambda: nn.RNN(4, 3),
    "relu": lambda: nn.RNN(4, 3, nonlinearity="relu"),
}


def results(layer, x, lengths):
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
    grads = torch.autograd.grad(loss, [x, *layer.parameters()], create_graph=True)
    loss = sum(g.square().sum() for g in grads)
    second = torch.autograd.grad(loss, [x, *layer.parameters()], allow_unused=True)
    assert second[0] is not None
    return padded, *states, *grads, *(g for g in second if g is not None)


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_packed_sequences(mesh, name):
    shardtensor.set_fallback_mode("silent")
    layer = LAYERS[name]().double()
    x = torch.randn(5, 4, 4).double()
    for lengths in ([5, 4, 2, 1], [2, 5, 1, 4]):
        expected = results(layer, x, lengths)
        for dim in range(3):
            found = results(layer, shard(x, mesh, placements_of(mesh, dim)), lengths)
            for one, other in zip(found, expected, strict=True):
                assert_close(one, other)
    assert "aten::_pack_padded_sequence" in shardtensor.fallback_counts()
