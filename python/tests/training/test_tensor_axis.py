"""parallelize on data x domain x tensor is one device on the whole batch."""

import functools

import pytest
import rig
import torch
import torch.distributed as dist
from oracle import WHOLE
from ranks import ranks, shard, uneven
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import gelu, scaled_dot_product_attention

from shardtensor import check_replicas, parallelize

PRELOAD = ("torch._inductor.compile_fx",)
AXES = ("data", "domain", "tensor")
STEPS = 10


class Block(nn.Module):
    """Attention over the rows, two heads of four, and a perceptron."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))
        self.query, self.key, self.value = (nn.Linear(6, 8) for _ in range(3))
        self.out = nn.Linear(8, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        y = self.norms[0](x)
        heads = [
            p(y).unflatten(-1, (-1, 4)).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        ]
        y = scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(gelu(self.up(self.norms[1](x))))


def block():
    torch.manual_seed(7)
    return Block().double()


def cut_along(mesh, all_of_them=True):
    names = ("query", "key", "value", "up")
    plan = {name: ColwiseParallel() for name in names}
    plan |= {name: RowwiseParallel() for name in ("out", "down")}
    model = parallelize_module(block(), mesh, plan)
    return distribute_module(model, mesh) if all_of_them else model


def batches():
    torch.manual_seed(3)
    return [torch.randn(4, 7, 6).double() for _ in range(STEPS)]


def part(x, mesh):
    mine = x.chunk(mesh.size(0))[mesh.get_local_rank(0)]
    sizes = uneven(7, mesh.size(1))
    return shard(mine, mesh["domain"], [Shard(1)], {1: sizes})


def train(model, batches, clip, run=None):
    """foreach, the default on GPUs, takes no DTensors beside plain parameters."""
    run = model if run is None else run
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    for x in batches:
        run(x).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    return model


@functools.cache
def alone(clip):
    return train(block(), batches(), clip)


def check(model, mesh, clip=True, run=None):
    train(model, [part(x, mesh) for x in batches()], clip, run)
    inner = getattr(model, "module", model)
    for (name, p), q in zip(
        inner.named_parameters(), alone(clip).parameters(), strict=True
    ):
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(
            whole, q, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
    check_replicas(inner, mesh)


@ranks(4)
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
def test_steps_are_those_of_one_device(mesh, shape):
    mesh = init_device_mesh(rig.DEVICE, shape, mesh_dim_names=AXES)
    wrappers = ("hsdp", "fsdp") if shape[0] == 2 else ("fsdp", None, "hsdp")
    for data in wrappers if WHOLE else wrappers[:1]:
        model = cut_along(mesh["tensor"])
        spoil(model)
        check(parallelize(model, mesh, data, tensor="tensor"), mesh)


@pytest.mark.tail
@ranks(4, timeout=120.0)
@pytest.mark.parametrize(
    "shape, data",
    [
        ((2, 1, 2), "fsdp"),
        ((1, 2, 2), "fsdp"),
        ((2, 1, 2), "hsdp"),
    ],
)
def test_compiled_steps_are_those_of_one_device(mesh, shape, data):
    mesh = init_device_mesh(rig.DEVICE, shape, mesh_dim_names=AXES)
    model = parallelize(cut_along(mesh["tensor"]), mesh, data, tensor="tensor")
    torch._dynamo.reset()
    check(model, mesh, run=torch.compile(model, backend="aot_eager"))


def spoil(model):
    """Other values on all ranks but the first that holds a parameter or piece."""
    with torch.no_grad():
        for p in model.parameters():
            if not isinstance(p, DTensor) and dist.get_rank() > 0:
                p.zero_()
            if isinstance(p, DTensor) and dist.get_rank() > 1:
                p.to_local().zero_()


@ranks(4)
def test_plain_parameters_along_the_tensor_axis(mesh):
    """Equal on all ranks, whatever they began with. DDP has no others."""
    for shape in ((2, 1, 2), (1, 2, 2)):
        mesh = init_device_mesh(rig.DEVICE, shape, mesh_dim_names=AXES)
        model = block()
        spoil(model)
        check(parallelize(model, mesh, "ddp", tensor="tensor"), mesh)
        model = cut_along(mesh["tensor"], all_of_them=False)
        spoil(model)
        check(parallelize(model, mesh, "fsdp", tensor=("tensor",)), mesh, clip=False)


@ranks(4)
def test_tensor_axes_that_cannot_be(mesh):
    mesh = init_device_mesh(rig.DEVICE, (2, 1, 2), mesh_dim_names=AXES)
    model = cut_along(mesh["tensor"])
    with pytest.raises(ValueError, match=r"tensor: expected axes of .* got \('x',\)"):
        parallelize(model, mesh, tensor="x")
    with pytest.raises(ValueError, match=r"the axes \['domain'\] are the domain's"):
        parallelize(model, mesh, tensor=("tensor", "domain"))
    with pytest.raises(ValueError, match=r"the axes \['data'\] have other samples"):
        parallelize(model, mesh, None, tensor="tensor")
    with pytest.raises(ValueError, match='data: .* is a DTensor, of which "ddp"'):
        parallelize(model, mesh, "ddp", tensor="tensor")


class Shared(nn.Module):
    """The root reads the weight of a child that is cut over samples and tensor axis."""

    def __init__(self):
        super().__init__()
        self.block = block()

    def forward(self, x):
        return self.block(x) @ self.block.up.weight.t()


@ranks(4)
def test_a_unit_outside_of_which_its_parameters_are_read(mesh):
    mesh = init_device_mesh(rig.DEVICE, (2, 1, 2), mesh_dim_names=AXES)
    model = Shared()
    model.block = cut_along(mesh["tensor"])
    model = parallelize(model, mesh, "fsdp", tensor="tensor")
    with pytest.raises(NotImplementedError, match=r"along \['tensor'\], too, meets a"):
        model(part(batches()[0], mesh))
