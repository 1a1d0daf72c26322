"""Recurrent layers: cut sequences, and packed ones of several lengths."""

import pytest
import torch
from layouts import check_native, placements_of
from oracle import WHOLE
from ranks import assert_close, ranks, shard, uneven
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import shardtensor

LAYERS = {
    "gru": lambda: nn.GRU(4, 3, bidirectional=True),
    "lstm": lambda: nn.LSTM(4, 3, 2),
    "tanh": lambda: nn.RNN(4, 3),
    "relu": lambda: nn.RNN(4, 3, nonlinearity="relu"),
}


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", LAYERS)
def test_steps_become_whole_and_samples_cut(mesh, name):
    layer = LAYERS[name]().double()
    for layer.batch_first in (False, True) if WHOLE else (mesh.ndim == 2,):
        check_native(mesh, (9, 8, 4), layer)
    if mesh.ndim == 1:
        layer.batch_first = True
        x = torch.randn(5, 9, 4).double()
        x = shard(x, mesh, placements_of(mesh, 1), {1: uneven(9, mesh.size())})
        assert layer(x)[0].to_local().shape[:2] == x.to_local().shape[:2]


@ranks(2, 3)
def test_one_sample_is_gathered_step_by_step(mesh):
    shardtensor.set_fallback_mode("silent")
    layer, x = nn.GRU(4, 3).double(), torch.randn(9, 1, 4).double()
    found, _ = layer(shard(x, mesh, placements_of(mesh, 0)))
    assert_close(found, layer(x)[0])
    assert "aten::unbind" in shardtensor.fallback_counts()


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
