"""parallelize with what programs train by: scalers, casts, averages, checkpoints,
schedules, compilers, optimizers. Each is one device on the whole batch after ten
steps, on every mesh."""

import functools

import pytest
import rig
import torch
from data_by_domain import MESHES, make, over_data, part, whole
from oracle import WHOLE, every
from ranks import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from shardtensor import check_replicas, parallelize

PRELOAD = ("torch._inductor.compile_fx",)
STEPS = 10


class Net(nn.Module):
    """With a layer that is used twice, a frozen one, and one in a checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.frozen = nn.Conv2d(6, 6, 1).requires_grad_(False)
        self.last = nn.Conv2d(6, 3, 3, padding=1, stride=2)
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        if self.reentrant is None:
            x = self.middle(x).tanh()
        else:
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant).tanh()
        return self.last(self.twice(self.frozen(self.twice(x))))


class Way:
    """How a program trains. This one: AdamW, as it is."""

    reentrant = None
    options: dict = {}
    tolerance = 1e-5

    def __init__(self, model, mesh):
        self.model, self.mesh = model, mesh
        self.optimizer = self.make_optimizer(model.parameters())
        self.prepare()

    def make_optimizer(self, parameters):
        return torch.optim.AdamW(parameters, 0.01)

    def prepare(self):
        pass

    def loss(self, x):
        return self.model(x).square().mean()

    def step(self, x):
        self.optimizer.zero_grad()
        self.loss(x).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def results(self):
        inner = getattr(self.model, "module", self.model)
        return {name: whole(p).detach() for name, p in inner.named_parameters()}


class Reentrant(Way):
    reentrant = True


class NotReentrant(Way):
    reentrant = False


class Scaled(Way):
    """One step overflows, which is then left out."""

    def prepare(self):
        self.scaler = torch.amp.GradScaler(
            rig.DEVICE, init_scale=2.0**10, growth_interval=3
        )
        self.count = 0

    def step(self, x):
        self.count += 1
        factor = torch.inf if self.count == 4 else 1.0
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(x) * factor).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Scheduled(Way):
    def prepare(self):
        self.schedules = [
            torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=4),
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS),
        ]

    def step(self, x):
        super().step(x)
        for schedule in self.schedules:
            schedule.step()


class Foreach(Way):
    def make_optimizer(self, parameters):
        return torch.optim.AdamW(parameters, 0.01, foreach=True)


class Fused(Way):
    def make_optimizer(self, parameters):
        return torch.optim.AdamW(parameters, 0.01, fused=True)


class Lbfgs(Way):
    def make_optimizer(self, parameters):
        parameters = [p for p in parameters if p.requires_grad]
        return torch.optim.LBFGS(parameters, 0.1, max_iter=2)

    def step(self, x):
        def closure():
            self.optimizer.zero_grad()
            loss = self.loss(x)
            loss.backward()
            return over_data(loss, self.mesh)

        self.optimizer.step(closure)


class Zero(Way):
    def make_optimizer(self, parameters):
        parameters = [p for p in parameters if p.requires_grad]
        if self.mesh is None:
            return super().make_optimizer(parameters)
        return ZeroRedundancyOptimizer(
            parameters, optimizer_class=torch.optim.AdamW, lr=0.01
        )


class Averaged(Way):
    def prepare(self):
        inner = getattr(self.model, "module", self.model)
        self.average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def step(self, x):
        super().step(x)
        self.average.update_parameters(getattr(self.model, "module", self.model))

    def results(self):
        averaged = self.average.module.named_parameters()
        return super().results() | {f"mean {n}": whole(p).detach() for n, p in averaged}


class Cast(Way):
    """bf16 inside: within what bf16 tells apart."""

    tolerance = 2e-2

    def loss(self, x):
        with rig.autocast(torch.bfloat16):
            y = self.model(x)
        return y.float().square().mean()


class Policy(Way):
    """FSDP's own: parameters and samples are bf16 inside, sums of gradients fp32."""

    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    tolerance = 2e-2

    def loss(self, x):
        if self.mesh is not None:
            return self.model(x).float().square().mean()
        parameters = {n: p.bfloat16() for n, p in self.model.named_parameters()}
        y = functional_call(self.model, parameters, x.bfloat16())
        return y.float().square().mean()


class AveragedByHand(Way):
    """FSDP's modules cannot be copied."""

    def prepare(self):
        self.average = [p.detach().clone() for p in self.model.parameters()]

    def step(self, x):
        super().step(x)
        now = [p.detach() for p in self.model.parameters()]
        get_ema_multi_avg_fn(0.8)(self.average, now, None)

    def results(self):
        means = {f"mean {i}": whole(x) for i, x in enumerate(self.average)}
        return super().results() | means


class Compiled(Way):
    def prepare(self):
        torch._dynamo.reset()
        self.run = torch.compile(self.model, backend="aot_eager")

    def loss(self, x):
        return (self.run if self.mesh else self.model)(x).square().mean()


WAYS = {
    "ddp": (
        Reentrant, NotReentrant, Scaled, Scheduled, Foreach, Fused, Lbfgs, Zero,
        Averaged, Cast,
    ),
    "fsdp": (
        Way, Reentrant, NotReentrant, Scaled, Scheduled, Foreach, Fused, Cast,
        Policy, AveragedByHand,
    ),
    "hsdp": (Way, NotReentrant, Foreach, Policy),
}  # fmt: skip


def net(reentrant):
    torch.manual_seed(5)
    return Net(reentrant)


def run(way, model, mesh, batches):
    training = way(model, mesh)
    for x in batches:
        training.step(x)
    return training


def batches():
    torch.manual_seed(3)
    return [torch.randn(4, 2, 9, 6) for _ in range(STEPS)]


@functools.cache
def alone(way):
    return run(way, net(way.reentrant), None, batches()).results()


def check(way, data, mesh, axes, domain):
    model = parallelize(net(way.reentrant), mesh, data, axes, **way.options)
    training = run(way, model, mesh, [part(x, mesh, domain) for x in batches()])
    results = training.results()
    for name, expected in alone(way).items():
        torch.testing.assert_close(
            results[name],
            expected,
            rtol=way.tolerance,
            atol=way.tolerance,
            msg=lambda text, n=name: f"{way.__name__}, {data}, {n}: {text}",
        )
    check_replicas(getattr(model, "module", model), mesh)


def cases():
    """The commonest ones always, the others where time is."""
    for name in MESHES:
        for data in WAYS:
            often = name == "2x2" and data != "hsdp"
            yield pytest.param(name, data, marks=() if often else pytest.mark.tail)


@ranks(4, timeout=240.0)
@pytest.mark.parametrize("name, data", [*cases()])
def test_every_way_is_that_of_one_device(mesh, name, data):
    mesh, axes, domain = make(name)
    for way in WAYS[data] if WHOLE or data == "ddp" else WAYS[data][2::3]:
        check(way, data, mesh, axes, domain)


@ranks(4, timeout=120.0)
@pytest.mark.parametrize("data", every(3, ["ddp", "fsdp", "hsdp"]))
@pytest.mark.parametrize("name", ["2x2", pytest.param("2x1x2", marks=pytest.mark.tail)])
def test_compiled_training_is_that_of_one_device(mesh, name, data):
    mesh, axes, domain = make(name)
    check(Compiled, data, mesh, axes, domain)
