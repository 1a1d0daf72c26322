"""Random numbers are those of one device with the same seed."""

import pytest
import rig
import torch
import torch.nn.functional as F
from layouts import ALL, check, check_native, sweep
from ranks import assert_close, check_op, ranks, shard, sharded
from torch import distributions
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardtensor
from shardtensor import ShardTensor

aten = torch.ops.aten


def samples(x):
    """Of distributions that ask their parameters for new tensors."""
    scale = x.abs() + 0.5
    made = (
        distributions.Exponential(scale),
        distributions.Laplace(x, scale),
        distributions.Cauchy(x, scale),
        distributions.Geometric(x.sigmoid()),
        distributions.Weibull(scale, scale),
    )
    return [d.sample(shape) for d in made for shape in ((), (3,))]


LIKE = {
    "rand_like": lambda x: torch.rand_like(x),
    "rand_like_generator": lambda x: torch.rand_like(x, generator=seeded_generator()),
    "randn_like": lambda x: torch.randn_like(x),
    "rand_like_dtype": lambda x: torch.rand_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 100),
    "randint_like_low": lambda x: torch.randint_like(x, 5, 100),
    "randint_like_tensor": lambda x: torch.randint_like(
        x, torch.tensor(9, device="cpu")
    ),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "bernoulli_broadcast": lambda x: torch.empty_like(x).bernoulli_(x[0].sigmoid()),
    "bernoulli_number": lambda x: torch.empty_like(x).bernoulli_(torch.tensor(0.3)),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "normal_generator": lambda x: torch.empty_like(x).normal_(
        generator=seeded_generator()
    ),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "random_": lambda x: torch.empty_like(x).random_(),
    "random_to": lambda x: torch.empty_like(x).random_(10),
    "random_from": lambda x: torch.empty_like(x).random_(3, 10),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.5),
    "functional": lambda x: (
        aten.uniform(x),
        aten.exponential(x),
        aten.random.to(x, 9),
    ),
    "normal": lambda x: torch.normal(x, x.abs() + 1),
    "normal_broadcast": lambda x: torch.normal(x[0], x.abs() + 1),
    "normal_of_mean": lambda x: torch.normal(x, 2.0),
    "normal_of_deviation": lambda x: torch.normal(1.0, x.abs()),
    "transposed": lambda x: torch.rand_like(x.t()),
    "view": lambda x: torch.zeros_like(x).view(-1).uniform_(),
    "merged": lambda x: torch.bernoulli(x.expand(3, *x.shape).reshape(-1, 5).sigmoid()),
    "distributions": samples,
    "init": lambda x: torch.nn.init.trunc_normal_(torch.empty_like(x)),
}
# These read their input where it is whole: how many numbers an element takes
# depends on its value.
GATHERED = {
    "poisson": lambda x: torch.poisson(x.abs() * 3),
    "gamma": lambda x: torch._standard_gamma(x.abs() + 0.1),
    "dirichlet": lambda x: torch._sample_dirichlet(x.abs() + 0.1),
    "binomial": lambda x: torch.binomial((x.abs() * 9).round(), x.sigmoid()),
    "binomial_broadcast": lambda x: torch.binomial((x * 9).ceil(), x[0].sigmoid()),
    "binomial_plain": lambda x: torch.binomial(
        torch.full((6, 5), 9.0, dtype=x.dtype), x.sigmoid()
    ),
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 3),
    "multinomial_again": lambda x: torch.multinomial(x.softmax(1), 9, True),
}


def seeded_generator():
    return rig.generator(11)


def seeded(fn):
    def run(x):
        torch.manual_seed(5)
        first = fn(x)
        return first, fn(x), torch.rand(3)  # generators advance alike

    return run


@ranks(*ALL)
@pytest.mark.parametrize("name", [*LIKE, *GATHERED])
def test_numbers_of_one_device(mesh, name):
    x = torch.randn(6, 5, dtype=torch.float64)
    check(mesh, None, seeded((LIKE | GATHERED)[name]), x=x)


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", ["rand_like", "normal_", "bernoulli"])
def test_numbers_of_large_and_of_empty_tensors(mesh, name):
    check(mesh, None, seeded(LIKE[name]), x=torch.randn(70, 33))
    check(mesh, None, seeded(LIKE[name]), x=torch.randn(4, 0))


DROPOUTS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout_none": lambda x: F.dropout(x, 0.4, training=False),
    "dropout_all": lambda x: F.dropout(x, 1.0),
    "dropout_": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "dropout1d": lambda x: F.dropout1d(x.unsqueeze(0), 0.4),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(
        x.unsqueeze(0), 0.4, training=True
    ),
    "native": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "native_mask": lambda x: torch.native_dropout(x.detach(), 0.4, True),
    "native_none": lambda x: torch.native_dropout(x, 0.4, False)[0],
    "gumbel": lambda x: F.gumbel_softmax(x, dim=1),
}


@ranks(*ALL)
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_of_one_device(mesh, name):
    def run(x):
        torch.manual_seed(5)
        return DROPOUTS[name](x)

    check(mesh, (6, 5), run, second_order=name in ("dropout", "native"))


RRELUS = {
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: F.rrelu(x * 1, 0.2, 0.9, training=True, inplace=True),
    "rrelu_generator": lambda x: torch.rrelu(
        x, training=True, generator=seeded_generator()
    ),
    "rrelu_half": lambda x: F.rrelu(x.to(torch.bfloat16), training=True),
    "functional": lambda x: aten.rrelu_with_noise_functional(
        x.detach(), torch.ones_like(x), 0.1, 0.4, True
    ),
}


@ranks(*ALL)
@pytest.mark.parametrize("name", RRELUS)
def test_rrelu_draws_where_it_is(mesh, name):
    """An element takes a number only if it is not positive."""
    for shape in ((6, 5), (4, 3, 5), (7,), (0, 3)):
        check_native(mesh, shape, seeded(RRELUS[name]), second_order=True)


def network(wrap):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = torch.nn.Sequential(
                torch.nn.Linear(5, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)
            )

        def forward(self, x):
            torch.manual_seed(7)
            result = wrap(self.block, x)
            torch.rand(4)  # the mask is made again from its own state
            return result

    return Net()


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_dropout_in_a_network_and_its_checkpoint(mesh, reentrant):
    def wrap(block, x):
        if reentrant is None:
            return block(x)
        return checkpoint(block, x, use_reentrant=reentrant)

    net = network(wrap)
    x = torch.randn(6, 5, requires_grad=True)
    for placements, sizes in sweep(mesh, (6, 5), dims=[0]):
        if reentrant:  # autograd.grad is not for reentrant checkpoints
            check_backward(net, x, mesh, placements, sizes)
        else:
            check_op(net, sharded(x, placements, sizes), mesh=mesh)


def check_backward(net, x, mesh, placements, sizes):
    gradients = []
    for given in (x.detach().requires_grad_(), shard(x, mesh, placements, sizes)):
        net.zero_grad()
        net(given).square().sum().backward()
        gradients.append([given.grad, *(p.grad.clone() for p in net.parameters())])
    for expected, actual in zip(*gradients, strict=True):
        assert_close(actual, expected)


@ranks(1, 2, 3, "2x2")
def test_drawing_sends_nothing_and_reads_nothing(mesh):
    x = torch.rand(6, 4)
    for placements, sizes in sweep(mesh, (6, 4)):
        s = shard(x, mesh, placements, sizes)
        shardtensor.set_fallback_mode("error")
        shardtensor.reset_comm_stats()
        F.dropout(s), F.dropout(s.clone(), inplace=True), F.alpha_dropout(s, 0.4, True)
        torch.native_dropout(s, 0.5, True)
        torch.rand_like(s), torch.randn_like(s), torch.randint_like(s, 9)
        torch.normal(s, 1.0), torch.empty_like(s).bernoulli_(0.3)
        s.normal_(), s.uniform_(), s.random_(9), s.exponential_()
        stats = shardtensor.comm_stats()
        assert (stats.messages, stats.all_reduces, stats.bytes) == (0, 0, 0)


@ranks(2)
def test_pieces_differ_and_replicas_do_not(mesh):
    x = torch.zeros(8, 50)
    pieces = torch.rand_like(shard(x, mesh, [Shard(0)])).full_tensor()
    assert len(pieces.flatten().unique()) == pieces.numel()
    torch.manual_seed(3)
    replica = torch.rand_like(shard(x, mesh, [Replicate()])).to_local()
    torch.manual_seed(3)
    assert torch.equal(replica, torch.rand(8, 50))


@ranks(2)
def test_drawing_into_a_partial_sum_and_a_view(mesh):
    x = torch.randn(6, 4)
    total = shard(x, mesh, [Shard(0)]).sum(0)
    torch.manual_seed(1)
    total.uniform_()
    torch.manual_seed(1)
    assert_close(total, torch.empty(4).uniform_())
    s = shard(x, mesh, [Shard(0)])
    torch.manual_seed(1)
    s[2].uniform_()
    s[:, ::2].normal_()
    torch.manual_seed(1)
    expected = x.clone()
    expected[2].uniform_()
    expected[:, ::2].normal_()
    assert_close(s, expected)


@ranks(2)
def test_wrong_calls_raise_on_every_rank(mesh):
    s = shard(torch.rand(6, 4), mesh, [Shard(0)])
    if s.is_cpu:  # a device is not waited for
        with pytest.raises(RuntimeError, match="p_in >= 0 && p_in <= 1|between 0 and"):
            torch.tensor(0.5).bernoulli_(s.sum())
    below = s - 1
    with pytest.raises(RuntimeError, match="deviations of at least 0, got -"):
        torch.normal(s, below)
    with pytest.raises(RuntimeError, match="bernoulli_ expects p to be in"):
        s.bernoulli_(2.0)


@ranks(1, 2)
def test_a_plain_tensor_takes_the_numbers_of_one_device(mesh):
    whole = torch.rand(6, 4)
    s = shard(whole, mesh, [Shard(0)])
    torch.manual_seed(3)
    drawn = torch.empty(6, 4).bernoulli_(s)
    torch.manual_seed(3)
    assert_close(drawn, torch.empty(6, 4).bernoulli_(whole))


@ranks(2)
def test_check_mode_finds_generators_that_differ(mesh):
    s = shard(torch.rand(6, 4), mesh, [Shard(0)])
    shardtensor.set_check_mode(True)
    assert_close(F.dropout(s, 0.0), s.full_tensor())
    if mesh.get_rank() == 1:
        torch.rand(1)
    with pytest.raises(
        ValueError, match="aten::(bernoulli_|native_dropout).*same state on all ranks"
    ):
        F.dropout(s)
    same = seeded_generator()
    torch.rand_like(s, generator=same)
    other = rig.generator(mesh.get_rank())
    with pytest.raises(ValueError, match="aten::rand_like.*same state on all ranks"):
        torch.rand_like(s, generator=other)


@ranks(2)
def test_replicas_drop_alike_wherever_they_lie(mesh):
    """CUDA deals its numbers out otherwise where it cannot load vectors."""
    rank = mesh.get_local_rank()
    memory = torch.ones(1025)[rank : rank + 1024]
    x = ShardTensor.from_local(memory, mesh, [Replicate()])
    torch.manual_seed(1)
    dropped = F.dropout(x, 0.5).to_local()
    torch.manual_seed(1)
    assert_close(dropped, F.dropout(torch.ones(1024), 0.5))
