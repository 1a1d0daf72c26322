"""Random numbers come in the order in which one device's memory lies."""

import pytest
import rig
import torch
import torch.nn.functional as F
from memory import MEMORY, layouts_of
from ranks import assert_close, ranks, shard
from torch.utils._pytree import tree_leaves

import shardtensor

aten = torch.ops.aten


def generator():
    return rig.generator(11)


def positive(x):
    return x.sigmoid()


def rows(x):
    """Weights of categories."""
    return rows(x[0]) if x.dim() > 2 else positive(x)


FUNCTIONS = {
    "rand_like": torch.rand_like,
    "rand_like_contiguous": lambda x: torch.rand_like(
        x, memory_format=torch.contiguous_format
    ),
    "randn_like": torch.randn_like,
    "randn_like_float": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 3, 100),
    "bernoulli": lambda x: torch.bernoulli(positive(x)),
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.3),
    "dropout": lambda x: F.dropout(x, 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_eval": F.rrelu,
    "normal": lambda x: torch.normal(x, x.abs() + 1),
    "normal_of_mean": lambda x: torch.normal(x, 2.0),
    "normal_of_deviation": lambda x: torch.normal(1.0, x.abs()),
    "functional": lambda x: (
        aten.uniform(x),
        aten.exponential(x),
        aten.geometric(x, 0.5),
    ),
    "functional_normal": lambda x: aten.normal_functional(x),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=0),
    "poisson": lambda x: torch.poisson(x.abs() * 3),
    "gamma": lambda x: torch._standard_gamma(x.abs() + 0.1),
    "dirichlet": lambda x: torch._sample_dirichlet(x.abs() + 0.1),
    "binomial": lambda x: torch.binomial((x.abs() * 9).round(), positive(x)),
    "multinomial": lambda x: torch.multinomial(rows(x), 2),
    "multinomial_again": lambda x: torch.multinomial(rows(x), 9, True),
}
IN_PLACE = {
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 2),
    "normal_generator": lambda x: x.normal_(generator=generator()),
    "exponential_": lambda x: x.exponential_(),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "geometric_": lambda x: x.geometric_(0.5),
    "random_": lambda x: x.random_(),
    "random_from": lambda x: x.random_(3, 10),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_tensor": lambda x: x.bernoulli_(positive(x)),
    "dropout_": lambda x: F.dropout(x, 0.4, inplace=True),
    "rrelu_": lambda x: F.rrelu(x, training=True, inplace=True),
    "trunc_normal_": torch.nn.init.trunc_normal_,
}


def seeded(fn, x):
    torch.manual_seed(5)
    return fn(x), torch.rand(3)


def check_order(mesh, memory, name):
    shape, lay = MEMORY[memory]
    base = torch.randn(shape, dtype=torch.float64)
    fn = FUNCTIONS.get(name) or IN_PLACE[name]
    for placements, sizes in layouts_of(mesh, shape):
        what = f"{name} of {memory}, {placements} {sizes}"
        whole, part = base.clone(), shard(base, mesh, placements, sizes)
        given, got = lay(whole), lay(part)
        assert got.stride() == given.stride(), what
        expected, actual = (tree_leaves(seeded(fn, x)) for x in (given, got))
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, what=what)
            assert a.stride() == e.stride(), f"{what}: {a.stride()}, {e.stride()}"
        assert_close(part, whole, what=what)


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("memory", MEMORY)
def test_numbers_come_in_the_order_of_memory(mesh, memory):
    names = [*FUNCTIONS] if memory == "expanded" else [*FUNCTIONS, *IN_PLACE]
    with shardtensor.fallback_mode("silent"):
        for name in names:
            check_order(mesh, memory, name)


@ranks(2, 3)
def test_a_dim_of_one_element_tells_the_order_too(mesh):
    """Row-major for all that is_contiguous() says; TensorIterator reads its stride."""
    column, row = torch.randn(4, 1), torch.randn(1, 3)
    product = "...i,ij->j..."
    expected = torch.einsum(product, column, row)
    for placements in layouts_of(mesh, (4, 1)):
        actual = torch.einsum(product, shard(column, mesh, *placements), row)
        assert actual.stride() == expected.stride() == (1, 3)
        dropped, e = (seeded(F.dropout, x)[0] for x in (actual, expected))
        assert_close(dropped, e)
