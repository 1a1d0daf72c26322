"""Numbers of the policy "counter": those of an element's place in the whole
tensor, whoever draws them."""

import math
import warnings

import pytest
import rig
import torch
import torch.nn.functional as F
from compiled import Compiled
from layouts import sweep
from memory import MEMORY, layouts_of
from ranks import assert_close, ranks, run_isolated, shard
from torch import distributions
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import shardtensor

PRELOAD = ("torch._inductor.compile_fx",)

aten = torch.ops.aten


def generator():
    return rig.generator(11)


def samples(x):
    """Of distributions that ask their parameters for new tensors."""
    scale = x.abs() + 0.5
    made = (
        distributions.Exponential(scale, validate_args=False),
        distributions.Laplace(x, scale, validate_args=False),
        distributions.Cauchy(x, scale, validate_args=False),
        distributions.Geometric(x.sigmoid(), validate_args=False),
        distributions.Weibull(scale, scale, validate_args=False),
    )
    return [d.sample(shape) for d in made for shape in ((), (3,))]


DRAWS = {
    "rand_like": torch.rand_like,
    "rand_like_half": lambda x: torch.rand_like(x, dtype=torch.half),
    "rand_like_complex": lambda x: torch.rand_like(x, dtype=torch.complex64),
    "randn_like": torch.randn_like,
    "randn_like_bfloat16": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "randn_like_complex": lambda x: torch.randn_like(x, dtype=torch.complex128),
    "randint_like": lambda x: torch.randint_like(x, 5, 100),
    "randint_like_tensor": lambda x: torch.randint_like(
        x, torch.tensor(9, device="cpu")
    ),
    "uniform_": lambda x: x.float().uniform_(-1, 2),
    "normal_": lambda x: x.float().normal_(1, 2),
    "normal_generator": lambda x: x.clone().normal_(generator=generator()),
    "exponential_": lambda x: x.float().exponential_(2),
    "exponential_double": lambda x: x.clone().exponential_(2),
    "cauchy_": lambda x: x.clone().cauchy_(1, 2),
    "log_normal_": lambda x: x.float().log_normal_(),
    "geometric_": lambda x: x.clone().geometric_(0.3),
    "geometric_int": lambda x: x.to(torch.int32).geometric_(0.3),
    "random_": lambda x: x.clone().random_(),
    "random_int8": lambda x: x.to(torch.int8).random_(),
    "random_bool": lambda x: (x > 0).random_(),
    "random_long": lambda x: x.long().random_(),
    "random_all_bits": lambda x: x.long().random_(-(2**63), None),
    "random_large": lambda x: x.long().random_(-5, 2**40),
    "random_to": lambda x: x.to(torch.uint8).random_(10),
    "bernoulli_": lambda x: x.float().bernoulli_(0.3),
    "bernoulli_bool": lambda x: (x > 0).bernoulli_(0.3),
    "bernoulli_tensor": lambda x: x.clone().bernoulli_(x.sigmoid()),
    "bernoulli_row": lambda x: x.float().bernoulli_(x[0].sigmoid()),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.3),
    "functional": lambda x: (aten.uniform(x), aten.random.to(x, 9)),
    "normal": lambda x: torch.normal(x, x.abs() + 1),
    "normal_of_mean": lambda x: torch.normal(x, 2.0),
    "normal_of_deviation": lambda x: torch.normal(1.0, x.abs()),
    "poisson": lambda x: torch.poisson(x.abs() * 20),
    "poisson_float": lambda x: torch.poisson(x.abs().float() * 3),
    "gamma": lambda x: torch._standard_gamma(x.abs() * 3),
    "gamma_half": lambda x: torch._standard_gamma(x.abs().half()),
    "binomial": lambda x: torch.binomial((x.abs() * 50).round(), x.sigmoid()),
    "binomial_plain": lambda x: torch.binomial(
        torch.full(x.shape[-1:], 9.0, dtype=x.dtype), x.sigmoid()
    ),
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x.clone()),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout_half": lambda x: F.dropout(x.bfloat16(), 0.4),
    "dropout_all": lambda x: F.dropout(x, 1.0),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True),
    "fused_dropout": lambda x: torch._fused_dropout(x, 0.4),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: F.rrelu(x * 1, training=True, inplace=True),
    "distributions": samples,
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    "transposed": lambda x: torch.rand_like(x.transpose(0, -1)),
    "step": lambda x: x.clone()[..., ::2].uniform_(),
    "merged": lambda x: torch.rand_like(x.expand(3, *x.shape).flatten(0, 1)),
}
ROWS = {  # the last dim must be whole, or is summed
    "dirichlet": lambda x: torch._sample_dirichlet(x.abs() + 0.1),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 3),
    "multinomial_one": lambda x: torch.multinomial(x.softmax(-1), 1),
    "multinomial_again": lambda x: torch.multinomial(x.softmax(-1), 9, True),
}
FEATURES = {
    "dropout1d": lambda x: F.dropout1d(x.unsqueeze(0), 0.4),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(
        x.unsqueeze(0), 0.4, training=True
    ),
}


def seeded(fn, x):
    torch.manual_seed(5)
    with shardtensor.random_policy("counter"):
        return tree_leaves((fn(x), fn(x))), torch.rand(3)


def one_rank(fn, x, mesh):
    """What a rank draws that has the whole tensor."""
    whole = shard(x, mesh, [Replicate()] * mesh.ndim)
    drawn, after = seeded(fn, whole)
    return [d.full_tensor() for d in drawn], after


def check_same(fn, x, mesh, layouts, lay=lambda x: x, what="result"):
    """Bit for bit, in any layout; generators advance alike."""
    expected, expected_after = one_rank(fn, lay(x), mesh)
    for placements, sizes in layouts:
        drawn, after = seeded(fn, lay(shard(x, mesh, placements, sizes)))
        assert torch.equal(after, expected_after)
        for d, e in zip(drawn, expected, strict=True):
            exact = "softmax" not in what and what not in ("dirichlet", "distributions")
            rtol = 0 if exact else 1e-12  # sums as it is cut, powers as it is long
            assert_close(d, e, rtol=rtol, atol=0, what=what)


@ranks(1, 2, 3, 4, "2x2")
def test_numbers_do_not_depend_on_the_layout(mesh):
    x = torch.randn(6, 5, dtype=torch.float64)
    for name, fn in (DRAWS | ROWS | FEATURES).items():
        layouts = list(sweep(mesh, x.shape))
        with shardtensor.fallback_mode("error"):
            check_same(fn, x, mesh, layouts, what=name)


@ranks(1, 2, "2x2")
def test_numbers_do_not_depend_on_memory(mesh):
    """Nor on the strides of the whole tensor, nor on those of the pieces."""
    for shape, lay in MEMORY.values():
        x = torch.randn(shape, dtype=torch.float64)
        for name in ("rand_like", "normal_", "random_long", "dropout", "bernoulli"):
            check_same(DRAWS[name], x, mesh, layouts_of(mesh, shape), lay)
    x = torch.randn(6, 5, dtype=torch.float64)
    turned = seeded(torch.rand_like, shard(x.t().contiguous(), mesh, _whole(mesh)).t())
    assert torch.equal(
        turned[0][0].full_tensor(), one_rank(torch.rand_like, x, mesh)[0][0]
    )


def _whole(mesh):
    return [Replicate()] * mesh.ndim


@ranks(1, 2, 3)
def test_numbers_of_large_pieces(mesh):
    """Past the lanes of the loops, and over several tasks of threads."""
    x = torch.zeros(3, 70, 257)
    layouts = [([Shard(d)], None) for d in range(3)]
    for name in ("uniform_", "normal_", "bernoulli_", "random_long", "rand_like_half"):
        check_same(DRAWS[name], x, mesh, layouts)


@ranks(1, 2)
def test_numbers_are_those_of_philox(mesh):
    x = shard(torch.zeros(6, dtype=torch.int64), mesh, [Shard(0)])
    torch.manual_seed(5)
    key = torch.empty(1, dtype=torch.int64).random_().item()
    torch.manual_seed(5)
    with shardtensor.random_policy("counter"):
        x.random_(-(2**63), None)
    words = [w for block in range(3) for w in philox([block, 0, 0, 0], key)]
    expected = [(words[2 * i] << 32 | words[2 * i + 1]) - 2**63 for i in range(6)]
    expected = [(w + 2**63) % 2**64 - 2**63 for w in expected]
    assert_close(x, torch.tensor(expected))


def philox(counter, key):
    """Philox4x32-10 as it is published."""
    keys, mask = [key & 0xFFFFFFFF, key >> 32], 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            *((b >> 32) ^ counter[1] ^ keys[0], b & mask),
            *((a >> 32) ^ counter[3] ^ keys[1], a & mask),
        ]
        keys = [(keys[0] + 0x9E3779B9) & mask, (keys[1] + 0xBB67AE85) & mask]
    return counter


def test_philox_of_the_published_vectors():
    ones = 0xFFFFFFFF
    zero = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    full = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox([0] * 4, 0) == zero
    assert philox([ones] * 4, ones << 32 | ones) == full


# ---- distributions ----------------------------------------------------------

SQRT2 = math.sqrt(2)
CONTINUOUS = {  # draw, cumulative distribution
    "uniform": (lambda x: x.uniform_(-1, 3), lambda v: (v + 1) / 4),
    "normal": (
        lambda x: x.normal_(2, 3),
        lambda v: (1 + torch.erf((v - 2) / 3 / SQRT2)) / 2,
    ),
    "exponential": (lambda x: x.exponential_(2), lambda v: 1 - torch.exp(-2 * v)),
    "cauchy": (
        lambda x: x.cauchy_(1, 2),
        lambda v: 0.5 + torch.atan((v - 1) / 2) / math.pi,
    ),
    "log_normal": (
        lambda x: x.log_normal_(0.5, 0.7),
        lambda v: (1 + torch.erf((v.log() - 0.5) / 0.7 / SQRT2)) / 2,
    ),
    "gamma": (
        lambda x: torch._standard_gamma(x + 2.5),
        lambda v: torch.special.gammainc(torch.tensor(2.5, dtype=v.dtype), v),
    ),
    "small_gamma": (
        lambda x: torch._standard_gamma(x + 0.4),
        lambda v: torch.special.gammainc(torch.tensor(0.4, dtype=v.dtype), v),
    ),
    "dirichlet": (  # the first of two is uniform
        lambda x: torch._sample_dirichlet(x.unsqueeze(-1).expand(*x.shape, 2) + 1)[
            ..., 0
        ],
        lambda v: v,
    ),
}
DISCRETE = {  # draw, probability of k = 0, 1, 2, ...
    "bernoulli": (lambda x: x.bernoulli_(0.3), [0.7, 0.3]),
    "bernoulli_tensor": (lambda x: x.bernoulli_(x * 0 + 0.2), [0.8, 0.2]),
    "integers": (lambda x: x.random_(0, 7), [1 / 7] * 7),
    "geometric": (
        lambda x: x.geometric_(0.4),
        [0, *(0.4 * 0.6**k for k in range(12))],
    ),
    "poisson": (
        lambda x: torch.poisson(x * 0 + 3.5),
        [math.exp(-3.5) * 3.5**k / math.factorial(k) for k in range(12)],
    ),
    "large_poisson": (
        lambda x: torch.poisson(x * 0 + 14.0),
        [math.exp(-14.0) * 14.0**k / math.factorial(k) for k in range(30)],
    ),
    "binomial": (
        lambda x: torch.binomial(x + 9, x + 0.3),
        [math.comb(9, k) * 0.3**k * 0.7 ** (9 - k) for k in range(10)],
    ),
    "large_binomial": (
        lambda x: torch.binomial(x + 60, x + 0.7),
        [math.comb(60, k) * 0.7**k * 0.3 ** (60 - k) for k in range(61)],
    ),
    "multinomial": (
        lambda x: torch.multinomial(_weights(x), 1),
        [0.1, 0.2, 0.3, 0.4],
    ),
    "multinomial_again": (
        lambda x: torch.multinomial(_weights(x), 4, True),
        [0.1, 0.2, 0.3, 0.4],
    ),
}


def _weights(x):
    return x[:, :4] * 0 + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)


def drawn(mesh, draw, dtype, shape=(200, 1000)):
    torch.manual_seed(3)
    with shardtensor.random_policy("counter"):
        x = shard(torch.zeros(shape, dtype=dtype), mesh, [Shard(0)])
        return draw(x).full_tensor().double().flatten()


@ranks(2)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_distributions(mesh, name):
    draw, cumulative = CONTINUOUS[name]
    for dtype in (torch.float32, torch.float64):
        values = drawn(mesh, draw, dtype).sort().values
        steps = torch.arange(len(values)).double() / len(values)
        distance = (cumulative(values) - steps).abs().max().item()
        assert distance < 1.95 / math.sqrt(len(values))  # Kolmogorov, 0.1 %


@ranks(1, 2, "2x2")
def test_samples_have_pytorchs_gradients(mesh):
    """Of gammas that policies draw in their ways, and of what no gamma has."""
    x = torch.rand(6, 5, dtype=torch.float64) + 0.1
    for placements, sizes in sweep(mesh, x.shape):
        for policy in ("counter", "one_device"):
            s = shard(x, mesh, placements, sizes).requires_grad_()
            plain = x.clone().requires_grad_()
            with shardtensor.random_policy(policy):
                gamma = torch._standard_gamma(s)
                parts = distributions.dirichlet._Dirichlet.apply(s)
                with shardtensor.fallback_mode("error"):
                    (actual,) = torch.autograd.grad(gamma.sum(), s)
            expected = torch._standard_gamma_grad(plain, gamma.full_tensor().detach())
            assert_close(actual, expected)
            (actual,) = torch.autograd.grad(parts[:, 0].sum(), s)
            p = parts.full_tensor().detach()
            total = x.sum(-1, True).expand_as(x)
            grad = torch.zeros_like(p)
            grad[:, 0] = 1
            expected = torch._dirichlet_grad(p, x, total)
            assert_close(actual, expected * (grad - (p * grad).sum(-1, True)))
    with shardtensor.random_policy("counter"):
        for impossible in (-1.0, math.nan, math.inf):
            y = torch._standard_gamma(shard(x, mesh, placements) * 0 + impossible)
            assert y.full_tensor().isnan().all()
        y = torch.binomial(s.detach() * 0 + math.nan, s.detach())
        assert y.full_tensor().isnan().all()


@ranks(2)
def test_moments_and_neighbours(mesh):
    """Also of neighbours that share a block, and in 16 bits."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.half):
        values = drawn(mesh, lambda x: x.normal_(), dtype)
        bound = 4 / math.sqrt(len(values))
        assert abs(values.mean()) < bound
        assert abs(values.var() - 1) < 2 * bound
        for step in (1, 2, 3, 1000):
            assert abs((values[step:] * values[:-step]).mean()) < bound
            squares = values.square() - 1
            assert abs((squares[step:] * squares[:-step]).mean()) < 3 * bound
        uniform = drawn(mesh, lambda x: x.uniform_(), dtype)
        assert uniform.min() >= 0 and uniform.max() < 1
        assert abs(uniform.mean() - 0.5) < (0.01 if dtype == torch.bfloat16 else bound)


@ranks(2)
@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_distributions(mesh, name):
    draw, probabilities = DISCRETE[name]
    for dtype in (torch.float32, torch.float64):
        values = drawn(mesh, draw, dtype, shape=(2000, 50))
        for k, p in enumerate(probabilities):
            share = (values == k).double().mean().item()
            error = math.sqrt(p * (1 - p) / len(values))
            assert abs(share - p) <= 4.5 * error, (k, share, p)


@ranks(2)
def test_integers_of_every_dtype_stay_in_range(mesh):
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        largest = torch.iinfo(dtype).max
        values = drawn(mesh, lambda x: x.random_(), dtype, (50, 100))
        assert values.min() >= 0 and values.max() <= largest
        assert abs(values.mean() / largest - 0.5) < 0.03
        values = drawn(mesh, lambda x: x.random_(3, 6), dtype, (50, 100))
        assert values.unique().tolist() == [3, 4, 5]
    for dtype, digits in ((torch.half, 11), (torch.bfloat16, 8), (torch.float32, 24)):
        values = drawn(mesh, lambda x: x.random_(), dtype, (50, 100))
        assert values.min() >= 0 and values.max() <= 2**digits


@ranks(2)
def test_calls_differ_and_pieces_do_too(mesh):
    x = shard(torch.zeros(8, 50), mesh, [Shard(0)])
    with shardtensor.random_policy("counter"):
        first, second = (torch.rand_like(x).full_tensor() for _ in range(2))
    assert len(torch.cat([first, second]).flatten().unique()) > 795


# ---- generators, checkpoints, compiled code ---------------------------------


@ranks(2)
def test_the_generator_rules_the_numbers(mesh):
    x = shard(torch.zeros(6, 4), mesh, [Shard(0)])
    with shardtensor.random_policy("counter"):
        torch.manual_seed(1)
        first = torch.rand_like(x)
        state = rig.default_generator().get_state()
        second = F.dropout(x + 1)
        rig.default_generator().set_state(state)
        assert torch.equal(F.dropout(x + 1).full_tensor(), second.full_tensor())
        torch.manual_seed(1)
        assert torch.equal(torch.rand_like(x).full_tensor(), first.full_tensor())
        torch.manual_seed(2)
        assert not torch.equal(torch.rand_like(x).full_tensor(), first.full_tensor())
        state = rig.default_generator().get_state()
        own = torch.rand_like(x, generator=generator())
        assert torch.equal(rig.default_generator().get_state(), state)
        again = torch.empty_like(x).uniform_(generator=generator())
        assert torch.equal(own.full_tensor(), again.full_tensor())


class Net(torch.nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.block = torch.nn.Sequential(
            torch.nn.Linear(5, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)
        )

    def forward(self, x):
        if self.reentrant is None:
            return F.dropout(self.block(x), 0.3)
        result = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return F.dropout(result, 0.3)


def gradients(net, x):
    net.zero_grad()
    torch.manual_seed(7)
    with shardtensor.random_policy("counter"):
        output = net(x)
        torch.rand(4)  # the mask is made again from its own state
        output.square().sum().backward()
    gradient = x.grad.full_tensor()
    x.grad = None
    return [output.full_tensor(), gradient, *(p.grad for p in net.parameters())]


@ranks(1, 2, 3, "2x2")
def test_checkpoints_draw_the_same_again(mesh):
    x = torch.randn(6, 5, requires_grad=True)
    expected = gradients(Net(), shard(x, mesh, [Replicate()] * mesh.ndim))
    for placements, sizes in sweep(mesh, (6, 5), dims=[0]):
        for reentrant in (None, False, True):
            part = shard(x, mesh, placements, sizes)
            torch.testing.assert_close(gradients(Net(reentrant), part), expected)


@ranks(1, 2)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.tail)]
)
def test_compiled_code_draws_the_same(mesh, backend):
    class Draws(torch.nn.Module):
        def forward(self, x):
            y = F.dropout(x, 0.4) + F.dropout(x, 0.4)
            y = y + torch.rand_like(x) + torch.empty_like(x).normal_()
            return y * torch.native_dropout(x, 0.5, True)[0]

    x = shard(
        torch.randn(7, 4), mesh, [Shard(0)], {0: [7] if mesh.size() == 1 else [5, 2]}
    )
    compiled = Compiled(Draws(), backend=backend, fullgraph=True)
    for seed in (1, 2):
        with shardtensor.random_policy("counter"):
            torch.manual_seed(seed)
            expected = Draws()(x)
            torch.manual_seed(seed)
            actual = compiled(x)
        assert_close(actual, expected.full_tensor())


@ranks(1, 2)
def test_compiled_dropout_has_the_gradient_of_its_mask(mesh):
    x = shard(torch.randn(6, 5, requires_grad=True), mesh, [Shard(0)])
    net = Net()
    expected = gradients(net, x)
    compiled = Compiled(net, backend="aot_eager", fullgraph=True)
    compiled.block = net.block
    torch.testing.assert_close(gradients(compiled, x)[:6], expected)


# ---- edges ------------------------------------------------------------------


@ranks(2, "2x2")
def test_drawing_into_a_partial_sum_and_a_view(mesh):
    x = torch.randn(6, 4)
    with shardtensor.random_policy("counter"):
        torch.manual_seed(1)
        expected = shard(torch.zeros(4), mesh, [Replicate()] * mesh.ndim).uniform_()
        total = shard(x, mesh, [Shard(0)] * mesh.ndim).sum(0)
        torch.manual_seed(1)
        assert_close(total.uniform_(), expected.full_tensor())
        s = shard(x, mesh, [Shard(0)] * mesh.ndim)
        torch.manual_seed(1)
        s[2].uniform_()
        assert_close(s[2], expected.full_tensor())
        assert_close(s[3:], x[3:])


@ranks(2)
def test_nothing_is_sent(mesh):
    s = shard(torch.rand(8, 4), mesh, [Shard(0)], {0: [7, 1]})
    shardtensor.set_fallback_mode("error")
    # A row of another rank; the least deviation of all; whether to draw again;
    # whether all are probabilities.
    asking = {"bernoulli_row", "normal", "normal_of_deviation", "trunc_normal_"}
    asking |= {"bernoulli", "bernoulli_tensor"}
    for name in sorted(DRAWS.keys() - asking):
        shardtensor.reset_comm_stats()
        with shardtensor.random_policy("counter"):
            DRAWS[name](s)
        stats = shardtensor.comm_stats()
        assert (name, stats.messages, stats.bytes) == (name, 0, 0)


@ranks(2)
def test_wrong_arguments_raise_what_pytorch_raises(mesh):
    s = shard(torch.rand(6, 4), mesh, [Shard(0)])
    calls = {
        "bernoulli_ expects p to be in": lambda: s.bernoulli_(2.0),
        "expects std >= 0": lambda: s.normal_(0, -1),
        "expects to return a .from, to. range": lambda: s.uniform_(2, 1),
        "expects lambda > 0": lambda: s.exponential_(-1),
        "expects 'from' to be less than 'to'": lambda: s.random_(5, 3),
        "between 0 and 1, got 1.5": lambda: torch.native_dropout(s, 1.5, True),
        "at most 4": lambda: torch.multinomial(s, 5),
        "_standard_gamma: expected floating": lambda: torch._standard_gamma(s.long()),
        "Double and Float": lambda: torch.binomial(s.double(), s),
        "floating-point counts, got Long": lambda: torch.binomial(s.long(), s),
    }
    if s.is_cpu:  # a device is not waited for
        calls["p_in <= 1"] = lambda: s.bernoulli_(s + 5)
        calls["with a sum above 0"] = lambda: torch.multinomial(s * 0, 1)
    state = rig.default_generator().get_state()
    with shardtensor.random_policy("counter"):
        for message, call in calls.items():
            with pytest.raises((RuntimeError, ValueError), match=message):
                call()
    assert torch.equal(rig.default_generator().get_state(), state)  # nothing was drawn


@ranks(1)
def test_policies_have_names(mesh):
    assert shardtensor.get_random_policy() == "one_device"
    with shardtensor.random_policy("counter"):
        assert shardtensor.get_random_policy() == "counter"
    assert shardtensor.get_random_policy() == "one_device"
    with pytest.raises(ValueError, match="'one_device' or 'counter', got 'local'"):
        shardtensor.set_random_policy("local")


@ranks(2)
def test_check_mode_finds_generators_that_differ(mesh):
    s = shard(torch.rand(6, 4), mesh, [Shard(0)])
    shardtensor.set_check_mode(True)
    with shardtensor.random_policy("counter"):
        F.dropout(s)
        if mesh.get_rank() == 1:
            torch.rand(1)
        with pytest.raises(
            ValueError, match="aten::(bernoulli_|native_dropout).*same state"
        ):
            F.dropout(s)


def draw_much():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(rig.DEVICE, (2,), mesh_dim_names=("domain",))
    x = shardtensor.empty(1 << 16, 300, device_mesh=mesh, placements=[Shard(0)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with shardtensor.random_policy("counter"):
            x.uniform_()
        F.dropout(x[:100])
        before = len(said)
        x.uniform_()
        x.uniform_()
    return before, [str(w.message) for w in said]


def test_drawing_much_for_a_smaller_piece_is_said_once():
    for outcome in run_isolated(2, draw_much):
        before, said = outcome.value
        assert before == 0 and len(said) == 1
        assert "aten::uniform_: drawing 75 MiB" in said[0]
        assert "set_random_policy('counter')" in said[0]


@ranks(1, 2)
def test_gammas_of_small_shapes_are_no_zeros(mesh):
    with shardtensor.random_policy("counter"):
        for small in (1e-3, 1e-4):
            shapes = shard(torch.full((500, 4), small), mesh, [Shard(0)])
            assert (torch._standard_gamma(shapes) > 0).all()
            shares = distributions.Dirichlet(shapes).sample().full_tensor()
            assert_close(shares.sum(-1), torch.ones(500))
