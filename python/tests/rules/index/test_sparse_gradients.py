"""Sparse gradients of tables looked up by a cut index: plain, of all ranks' rows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from layouts import placements_of
from ranks import partitions, ranks, shard
from torch import nn

INDEX = torch.tensor([[1, 2, 3], [3, 3, 0], [5, 1, 2], [0, 0, 4]])

LOOKUPS = {
    "embedding": lambda w, i: F.embedding(i, w, sparse=True),
    "padding": lambda w, i: F.embedding(i, w, padding_idx=3, sparse=True),
    "bags": lambda w, i: F.embedding_bag(i, w, mode="sum", sparse=True),
    "means": lambda w, i: F.embedding_bag(i, w, mode="mean", sparse=True),
    "offsets": lambda w, i: F.embedding_bag(
        i.flatten(), w, torch.tensor([0, 4, 9]), mode="sum", sparse=True
    ),
}


def gradient(lookup, weight, index):
    weight = weight.clone().requires_grad_()
    lookup(weight, index).sin().sum().backward()
    return weight.grad


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", LOOKUPS)
def test_gradients(mesh, name):
    weight = torch.randn(6, 4, dtype=torch.float64)
    expected = gradient(LOOKUPS[name], weight, INDEX)
    for sizes in partitions(4, mesh.size(0)):
        cut = shard(INDEX, mesh, placements_of(mesh, 0)[:1] * mesh.ndim, None)
        if mesh.ndim == 1:
            cut = shard(INDEX, mesh, placements_of(mesh, 0), {0: sizes})
        found = gradient(LOOKUPS[name], weight, cut)
        assert found.is_sparse and not found.is_coalesced()
        torch.testing.assert_close(found._indices(), expected._indices())
        torch.testing.assert_close(found._values(), expected._values())


@ranks(2, 3)
def test_steps(mesh):
    model = nn.Embedding(6, 4, sparse=True)
    one = copy.deepcopy(model)
    cut = shard(INDEX, mesh, placements_of(mesh, 0))
    for layer, index in (model, cut), (one, INDEX):
        optimizer = torch.optim.SparseAdam(layer.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            layer(index).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(model.weight, one.weight)


@ranks(2)
def test_what_pytorch_refuses(mesh):
    cut = shard(INDEX, mesh, placements_of(mesh, 0))
    weight = torch.randn(6, 4)
    for how, message in (
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq not supported with sparse"),
        ({"mode": "max"}, "max mode does not support sparse weights"),
    ):
        lookup = F.embedding_bag if "mode" in how else F.embedding
        with pytest.raises((RuntimeError, ValueError), match=message):
            gradient(
                lambda w, i, lookup=lookup, how=how: lookup(i, w, sparse=True, **how),
                weight,
                cut,
            )
