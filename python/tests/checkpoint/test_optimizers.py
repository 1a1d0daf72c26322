"""Optimizers in checkpoints: saving changes nothing, and what one job has saved goes on
in another, as if one device had trained all the time."""

import functools

import pytest
import rig
import torch
from data_by_domain import make, over_data, part, whole
from oracle import every
from ranks import assert_close, ranks, run, shard
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard

from shardtensor import checkpoint, parallelize

PRELOAD = ("shardtensor.checkpoint", "torch._inductor.compile_fx")

KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(
        [x for group in p for x in group["params"]], 0.1, max_iter=2
    ),
}


def zero(groups):
    options = {"optimizer_class": torch.optim.AdamW, "lr": 0.01}
    return ZeroRedundancyOptimizer(groups, **options)


class Net(nn.Module):
    """With a parameter that never gets a gradient, and one from the fourth step on."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 5, 3, padding=1)
        self.last = nn.Conv2d(5, 3, 3, padding=1)
        self.idle = nn.Linear(2, 2)
        self.late = nn.Linear(3, 3)

    def forward(self, x, late):
        y = self.last(self.first(x).tanh())
        return self.late(y.movedim(1, -1)) if late else y.movedim(1, -1)


def net():
    torch.manual_seed(5)
    return Net().double()


def groups(model):
    named = dict(model.named_parameters())
    weights = [p for name, p in named.items() if "weight" in name]
    return [
        {"params": weights, "lr": 0.02},
        {"params": [p for name, p in named.items() if "weight" not in name]},
    ]


def batches():
    torch.manual_seed(3)
    return [torch.randn(4, 2, 9, 6).double() for _ in range(6)]


def train(model, optimizer, samples, first, mesh=None):
    for step, x in enumerate(samples, first):

        def closure(x=x, late=step > 3):
            optimizer.zero_grad()
            loss = model(x, late).square().mean()
            loss.backward()
            return loss if mesh is None else over_data(loss, mesh)

        optimizer.step(closure)


@functools.cache
def alone(kind, count):
    model = net()
    train(model, KINDS[kind](groups(model)), batches()[:count], 0)
    return {name: p.detach() for name, p in model.named_parameters()}


def job(name, how, make_optimizer):
    """(model, optimizer, batches, mesh) on this mesh."""
    mesh, axes, domain = make(name)
    options = {"find_unused_parameters": True} if how == "ddp" else {}
    model = parallelize(net(), mesh, how, axes, **options)
    samples = [part(x, mesh, domain) for x in batches()]
    return model, make_optimizer(groups(model)), samples, mesh


def check(model, kind, count):
    inner = getattr(model, "module", model)
    for name, p in inner.named_parameters():
        expected = alone(kind, count)[name]
        torch.testing.assert_close(
            whole(p.detach()), expected, rtol=1e-6, atol=1e-7, msg=f"{kind}, {name}"
        )


def save(mesh, how, kinds, folder, maker=None):
    for kind in kinds:
        model, optimizer, samples, mesh = job("2x2", how, maker or KINDS[kind])
        train(model, optimizer, samples[:3], 0, mesh)
        state = {"model": model, "optimizer": optimizer}
        checkpoint.save(state, folder / kind, 3)
        train(model, optimizer, samples[3:], 3, mesh)
        check(model, kind, 6)


def load(_, name, how, stepped, kinds, folder, maker=None):
    for kind in kinds:
        model, optimizer, samples, mesh = job(name, how, maker or KINDS[kind])
        # What an optimizer has is replaced, also where the checkpoint has less.
        train(model, optimizer, samples[:stepped], 4, mesh)
        checkpoint.load({"model": model, "optimizer": optimizer}, folder / kind)
        check(model, kind, 3)
        train(model, optimizer, samples[3:], 3, mesh)
        check(model, kind, 6)


PLAIN = "AdamW", "LBFGS", "Adafactor", "Rprop"  # all but the first know no DTensors
CUT = [kind for kind in KINDS if kind not in PLAIN[1:]]


@pytest.mark.parametrize("how, kinds", [("hsdp", every(2, CUT)), ("ddp", PLAIN)])
def test_every_optimizer_goes_on_elsewhere(tmp_path, how, kinds):
    run(4, save, how, kinds, tmp_path)
    run(4, load, "2x1x2", how, 0, every(2, kinds, 1), tmp_path)
    run(2, load, "1x2", how, 1, every(2, kinds), tmp_path)
    run(3, load, "1x3", "ddp", 1, every(2, kinds, 1), tmp_path)


def test_a_zero_optimizer_goes_on_elsewhere_and_another_as_one(tmp_path):
    run(4, save, "ddp", ["AdamW"], tmp_path, zero)
    run(2, load, "1x2", "ddp", 1, ["AdamW"], tmp_path, zero)
    run(2, load, "1x2", "fsdp", 0, ["AdamW"], tmp_path)
    run(4, save, "hsdp", ["AdamW"], tmp_path)
    run(3, load, "1x3", "ddp", 1, ["AdamW"], tmp_path, zero)


def trained(optimizer_of, x, saved=None, loaded=None):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = optimizer_of([{"params": [*model.parameters()]}])
    state = {"model": model, "optimizer": optimizer}
    if loaded:
        train_linear(model, optimizer, x)
        checkpoint.load(state, loaded)
    if saved:
        checkpoint.save(state, saved, 0)
    train_linear(model, optimizer, x)
    return model.weight.detach(), len(optimizer.state)


def train_linear(model, optimizer, x):
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(lambda: loss_of(model, x))


def loss_of(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach().full_tensor()


@ranks(2)
def test_saving_leaves_an_optimizer_as_it_was(mesh, tmp_path):
    x = shard(torch.ones(4, 3), mesh, [Shard(0)])
    for kind, make_optimizer in every(2, KINDS.items()):
        expected = trained(make_optimizer, x)
        for options in ({"saved": tmp_path / kind}, {"loaded": tmp_path / kind}):
            assert str(trained(make_optimizer, x, **options)) == str(expected), kind


@ranks(2)
def test_flat_parameters_have_pytorchs_names(mesh, tmp_path):
    def made():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        device = rig.device_of(mesh.get_rank())
        model = FullyShardedDataParallel(layers, device_id=device, use_orig_params=True)
        return model, torch.optim.AdamW(model.parameters(), 0.01)

    def train_one(model, optimizer):
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    train_one(model, optimizer)
    checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path, 0)
    again, its_optimizer = made()
    checkpoint.load({"model": again, "optimizer": its_optimizer}, tmp_path)
    for each in (model, optimizer), (again, its_optimizer):
        train_one(*each)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


class OnePiece(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)


@ranks(1, 2, 3)
@pytest.mark.parametrize("kind", ["AdamW", "Adafactor", "LBFGS"])
def test_optimizers_of_pieces_go_on(mesh, tmp_path, kind):
    whole = torch.randn(4, 3, dtype=torch.float64)
    sizes = {1: [4], 2: [3, 1], 3: [3, 0, 1]}[mesh.size()]
    part = shard(whole, mesh, [Shard(0)], {0: sizes})

    def begun(weight):
        module = OnePiece(weight.detach().clone())
        return module, KINDS[kind]([{"params": [module.weight]}])

    def train(module, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (module.weight - 1).pow(4).sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    plain, module = begun(whole), begun(part)
    for each in (plain, module):
        train(*each)
    checkpoint.save(dict(zip("mo", module, strict=True)), tmp_path, 1)
    other = begun(part)
    checkpoint.load(dict(zip("mo", other, strict=True)), tmp_path)
    for each in (plain, other):
        train(*each)
    assert_close(other[0].weight, plain[0].weight)


@ranks(2)
def test_groups_of_equal_settings_may_be_others(mesh, tmp_path):
    """As many as the parameters' settings need."""

    def made(count, lr):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        parts = [*model.parameters()]
        split = [{"params": parts[i::count]} for i in range(count)]
        return {"m": model, "o": torch.optim.AdamW(split, lr, (lr, lr))}

    for saved, loaded in ((1, 3), (3, 1), (2, 3)):
        for kind in (float, torch.tensor):
            state, again = made(saved, kind(0.25)), made(loaded, kind(0.75))
            model = state["m"]
            model(torch.ones(2, 3)).sum().backward()
            state["o"].step()
            checkpoint.save(state, tmp_path, 0)
            checkpoint.load(again, tmp_path)
            found = again["o"]
            assert len(found.param_groups) == loaded
            for group in found.param_groups:
                assert group["lr"] == group["betas"][0] == 0.25
                assert type(group["lr"]) is type(kind(0.25))
            for p, q in zip(model.parameters(), again["m"].parameters(), strict=True):
                kept = state["o"].state[p]["exp_avg"]
                assert torch.equal(found.state[q]["exp_avg"], kept)


@ranks(2)
def test_what_does_not_fit_is_said(mesh, tmp_path):
    model = nn.Linear(3, 2)
    adam = torch.optim.AdamW(model.parameters())
    checkpoint.save({"m": model, "o": adam}, tmp_path, 0)
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: o.p"):
        checkpoint.load({"m": model, "o": sgd}, tmp_path)
    bias = torch.optim.AdamW([model.bias])
    checkpoint.save({"m": model, "o": bias}, tmp_path, 1)
    with pytest.raises(ValueError, match="no group of parameters in 'o' has weight, "):
        checkpoint.load({"m": model, "o": adam}, tmp_path)
    unlike = torch.optim.AdamW(
        [{"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias]}]
    )
    checkpoint.save({"m": model, "o": unlike}, tmp_path, 2)
    with pytest.raises(ValueError, match="'o' has weight and bias, .*decay 0.5 and"):
        checkpoint.load({"m": model, "o": adam}, tmp_path)
    others = torch.optim.SGD(nn.Linear(3, 2).parameters())
    with pytest.raises(ValueError, match="beside the optimizer 'o' has all its"):
        checkpoint.save({"o": others, "m": model}, tmp_path, 2)
    late = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, overlap_with_ddp=1
    )
    with pytest.raises(RuntimeError, match="has been fully initialized"):
        checkpoint.save({"m": model, "o": late}, tmp_path, 2)
