"""Models prepared by distribute_module and fully_shard, trained on shards."""

import copy
import sys

import pytest
import torch
from dtensor_checks import assert_gradient, distributed
from oracle import every
from programs import EXAMPLES
from ranks import assert_close, ranks, shard, uneven
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.nn.utils import clip_grad_norm_

import shardtensor
from shardtensor import ShardTensor

sys.path.append(str(EXAMPLES))
from unet import UNet, segmentation_loss  # noqa: E402

PRELOAD = ("torch._inductor.compile_fx",)  # torch.optim imports the compiler

OPTIMIZERS = {
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


class Net(nn.Module):
    """A little of everything that has parameters or buffers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 8, 2, stride=2, bias=False)
        self.group = nn.GroupNorm(2, 8)
        self.slope = nn.PReLU(8)
        self.head = nn.Linear(8, 4)
        self.layer = nn.LayerNorm(4)
        self.place = nn.Parameter(torch.randn(1, 1, 1, 4))
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x):
        x = self.slope(self.norm(self.conv(x)))
        x = self.group(self.down(x)).movedim(1, -1)
        return self.layer(self.head(x)) * self.scale + self.place


def net():
    torch.manual_seed(1)
    return Net().double()


def steps(model, optimizer, x, target, clip=None):
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        return loss.full_tensor() if isinstance(loss, ShardTensor) else loss

    return [optimizer.step(closure).detach() for _ in range(3)]


def assert_equal_states(model, whole, **tolerance):
    for (name, part), expected in zip(
        model.state_dict().items(), whole.state_dict().values(), strict=True
    ):
        assert isinstance(part, DTensor), name
        torch.testing.assert_close(
            part.full_tensor(), expected, msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )


def data(mesh):
    x, target = torch.randn(2, 3, 14, 6).double(), torch.randn(2, 7, 3, 4).double()
    sizes = uneven(14, mesh.size())
    return (x, target), (
        shard(x, mesh, [Shard(2)], {2: sizes}),
        distributed(target, mesh, [Replicate()]),
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@ranks(2, 3)
def test_distribute_module_trains(mesh, optimizer):
    make, whole = OPTIMIZERS[optimizer], net()
    model = distribute_module(net(), mesh)
    given, parts = data(mesh)
    clip = None if optimizer == "lbfgs" else 0.5
    expected = steps(whole, make(whole.parameters()), *given, clip)
    found = steps(model, make(model.parameters()), *parts, clip)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))
    assert_equal_states(model, whole)


@ranks(2)
def test_sharded_parameters_train(mesh):
    """Each parameter cut along dim 0, where it has more than one row."""

    def cut_rows(name, module, mesh):
        for key, value in module.named_parameters(recurse=False):
            part = distributed(value, mesh, [Shard(0)])
            module.register_parameter(key, nn.Parameter(part))

    make, whole = OPTIMIZERS["adamw_fused"], net()
    model = distribute_module(net(), mesh, cut_rows)
    given, parts = data(mesh)
    expected = steps(whole, make(whole.parameters()), *given, 0.5)
    found = steps(model, make(model.parameters()), *parts, 0.5)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))
    assert_equal_states(model, whole)


MODULES = {
    "attention": lambda: SelfAttention(),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    "bilinear": lambda: Twice(nn.Bilinear(8, 8, 3)),
    "lstm": lambda: First(nn.LSTM(8, 5, batch_first=True)),
    "embedding": lambda: nn.Sequential(Rounded(), nn.Embedding(4, 3)),
}


class SelfAttention(nn.MultiheadAttention):
    def __init__(self):
        super().__init__(8, 2, batch_first=True)

    def forward(self, x):
        return super().forward(x, x, x)[0]


class Twice(nn.Sequential):
    def forward(self, x):
        return self[0](x, x)


class First(nn.Sequential):
    def forward(self, x):
        return self[0](x)[0]


class Rounded(nn.Module):
    def forward(self, x):
        return (x[..., 0] > 0).long() + 2 * (x[..., 1] > 0).long()


@pytest.mark.parametrize("name", MODULES)
@ranks(2, 3)
def test_modules(mesh, name):
    torch.manual_seed(1)
    whole = MODULES[name]().double()
    model = distribute_module(copy.deepcopy(whole), mesh)
    x = torch.randn(2, 7, 8).double()
    part = shard(x, mesh, [Shard(1)], {1: uneven(7, mesh.size())})
    with shardtensor.fallback_mode("silent"):
        found, expected = model(part), whole(x)
        assert_close(found, expected)
        found.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert_gradient(p, q.grad)


@ranks(2)
def test_state_dict_of_one_device_loads(mesh):
    whole, model = net(), distribute_module(Net().double(), mesh)
    model.load_state_dict(
        {k: distributed(v, mesh, [Replicate()]) for k, v in whole.state_dict().items()}
    )
    (x, _), (part, _) = data(mesh)
    assert_close(model.eval()(part), whole.eval()(x))


@ranks("2x2")
def test_fsdp_over_the_data_axis(mesh):
    """Parameters on the domain mesh that FSDP cuts along the other one: each
    data rank has a sample of its own, cut over the domain."""
    data_mesh, domain = mesh["domain_h"], mesh["domain_w"]
    whole = net()
    model = distribute_module(net(), domain)
    fully_shard(model, mesh=data_mesh)
    samples, target = torch.randn(2, 2, 3, 14, 6).double(), torch.randn(2, 7, 3, 4)
    mine = samples[data_mesh.get_local_rank()]
    part = shard(mine, domain, [Shard(2)], {2: uneven(14, 2)})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, model)]
    whole.norm.eval(), model.norm.eval()  # its statistics are each data rank's own
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [(whole(x) - target.double()).square().mean() for x in samples]
        (sum(losses) / 2).backward()
        (model(part) - target.double()).square().mean().backward()
        for name, p in model.named_parameters():
            expected = whole.get_parameter(name).grad
            assert p.grad.placements == p.placements
            torch.testing.assert_close(p.grad.full_tensor(), expected)
        for optimizer in optimizers:
            optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.full_tensor(), whole.get_parameter(name).data)


@ranks(2, "2x2")
def test_the_unet_trains(mesh):
    for norm in every(2, ("group", "batch"), mesh.ndim - 1):
        check_the_unet_trains(mesh, norm)


def check_the_unet_trains(mesh, norm):
    torch.manual_seed(1)
    whole = UNet((4, 8, 12), norm=norm).double()
    model = distribute_module(copy.deepcopy(whole), mesh)
    volume, labels = (
        torch.randn(1, 1, 13, 10, 7).double(),
        torch.randint(3, (1, 13, 10, 7)),
    )
    cuts = [uneven(n, mesh.size(i)) for i, n in zip(range(mesh.ndim), (13, 10))]
    parts = [
        shard(
            t,
            mesh,
            [Shard(first + i) for i in range(mesh.ndim)],
            {first + i: c for i, c in enumerate(cuts)},
        )
        for t, first in ((volume, 2), (labels, 1))
    ]
    for net, given in ((whole, (volume, labels)), (model, parts)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
        for _ in range(3):
            optimizer.zero_grad()
            segmentation_loss(net(given[0]), given[1]).backward()
            optimizer.step()
    assert_equal_states(model, whole, rtol=1e-7, atol=1e-9)


@ranks(2)
def test_a_leaf_gets_its_gradient(mesh):
    """ShardTensor.from_dtensor of a leaf, and the result its own, too."""
    x = torch.randn(6, 4)
    leaf = distributed(x.requires_grad_(), mesh, [Shard(0)])
    part = ShardTensor.from_dtensor(leaf)
    (part**3).sum().backward()
    assert leaf.grad.placements == (Shard(0),)
    torch.testing.assert_close(leaf.grad.full_tensor(), 3 * x.detach() ** 2)
    assert_close(part.grad, 3 * x.detach() ** 2)
    assert ShardTensor.from_dtensor(part) is part
