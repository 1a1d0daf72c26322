"""Values that a kernel refuses, on one rank alone: every rank raises."""

import pytest
import torch
import torch.nn.functional as F
from ranks import ranks, shard, uneven
from torch.distributed.tensor import Replicate, Shard

from shardtensor import random_policy


def division(function):
    def divide(cut):
        return function(cut(torch.full((4,), 7)), cut(torch.tensor([1, 2, 3, 0])))

    return divide


def refused_target(cut):
    return F.binary_cross_entropy(cut(torch.rand(4)), cut(torch.tensor([0, 1, 1, 2.0])))


def drawn_in_place(cut):
    return cut(torch.zeros(4)).bernoulli_(cut(torch.tensor([0.5, 0.5, 0.5, 1.5])))


def drawn_by_counter(*weights):
    def draw(cut):
        rows = torch.ones(4, 3)
        rows[3] = torch.tensor(weights)
        with random_policy("counter"):
            return torch.multinomial(cut(rows), 2)

    return draw


def unordered(cut):
    order = torch.arange(3).repeat(4, 1)
    order[3, 1] = 9
    return torch.searchsorted(
        cut(torch.rand(4, 3)), cut(torch.rand(4, 2)), sorter=cut(order)
    )


REFUSED = {
    "sorter index out of range": [unordered],
    "finite weights of at least 0": [
        drawn_by_counter(1.0, -1.0, 1.0),
        drawn_by_counter(0.0, 0.0, 0.0),
        drawn_by_counter(1.0, 1.0, torch.nan),
    ],
    "between 0 and 1": [
        lambda cut: F.binary_cross_entropy(cut(torch.arange(4.0)), cut(torch.ones(4))),
        refused_target,
        drawn_in_place,
        lambda cut: torch.bernoulli(cut(torch.arange(4) / 2)),
        lambda cut: cut(torch.zeros(4)).bernoulli_(torch.arange(4) / 2),
    ],
    "ZeroDivisionError": [
        division(torch.floor_divide),
        division(torch.remainder),
        division(torch.fmod),
        division(lambda x, y: torch.div(x, y, rounding_mode="trunc")),
        division(lambda x, y: x.remainder_(y)),
        division(lambda _, y: 7 % y),
        lambda cut: cut(torch.arange(4)) // torch.tensor([1, 2, 3, 0]),
        lambda cut: cut(torch.arange(4)) % 0,
        lambda cut: cut(torch.arange(4)) // torch.zeros(4, dtype=torch.long),
    ],
}


def cuts(mesh):
    if mesh.ndim == 2:
        layouts = [[Shard(0), Shard(0)], [Replicate(), Shard(0)]]
        return [lambda x, to=to: shard(x, mesh, to) for to in layouts]
    rows = [uneven(4, mesh.size()), [0] * (mesh.size() - 1) + [4]]
    return [lambda x, to=to: shard(x, mesh, [Shard(0)], {0: to}) for to in rows]


@ranks(2, 3, "2x2")
def test_every_rank_raises(mesh):
    for cut in cuts(mesh):
        for message, calls in REFUSED.items():
            for call in calls:
                with pytest.raises(RuntimeError, match=message):
                    call(cut)
        # And goes on with the others.
        torch.manual_seed(0)
        drawn = cut(torch.full((4,), 0.5)).bernoulli_(cut(torch.full((4,), 0.5)))
        torch.manual_seed(0)
        expected = torch.empty(4).bernoulli_(torch.full((4,), 0.5))
        assert torch.equal(drawn.full_tensor(), expected)
        assert (cut(torch.arange(4)) // 2).full_tensor().tolist() == [0, 0, 1, 1]
