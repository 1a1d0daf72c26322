"""torch.compile of stencils: the exchange and the local call in one graph."""

import pytest
import torch
import torch.nn.functional as F
from compiled import Compiled
from ranks import check_op, ranks, shard, sharded
from torch import nn
from torch.distributed.tensor import Shard
from torch.profiler import profile

import shardtensor

PRELOAD = ("torch._inductor.compile_fx",)


class Padded(nn.Module):
    def forward(self, x):
        return F.pad(x, [1, 2, 3, 1])


MODULES = {
    "conv": nn.Conv2d(2, 3, 3, padding=1),
    "dilated": nn.Conv2d(2, 4, 3, padding=2, dilation=2, groups=2, bias=False),
    "strided": nn.Conv2d(2, 3, 3, stride=2, padding=1),
    "transposed": nn.ConvTranspose2d(2, 3, 3, stride=2),
    "circular": nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    "reflect": nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    "max": nn.MaxPool2d(3, 2, 1),
    "average": nn.AvgPool2d(2),
    "adaptive": nn.AdaptiveAvgPool2d(3),
    "adaptive max": nn.AdaptiveMaxPool2d(3),
    "global": nn.AdaptiveAvgPool2d(1),
    "doubling": nn.Upsample(scale_factor=2, mode="bilinear"),
    "weighted": nn.Upsample(size=(13, 9), mode="bilinear"),
    "nearest": nn.Upsample(size=(13, 9), mode="nearest"),
    "padded": Padded(),
    "unshuffled": nn.PixelUnshuffle(2),
}


@ranks(2)
@pytest.mark.parametrize("name", list(MODULES))
def test_compiled_modules_give_the_eager_numbers(mesh, name):
    torch.manual_seed(0)
    check_op(
        Compiled(MODULES[name], backend="aot_eager", fullgraph=True),
        sharded(torch.randn(2, 2, 8, 10, requires_grad=True), [Shard(2)], {2: [5, 3]}),
        mesh=mesh,
    )


@ranks(2, 3)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "channels_last", [False, pytest.param(True, marks=pytest.mark.tail)]
)
def test_a_convolution_computes_while_its_messages_travel(mesh, backend, channels_last):
    """It is one operator of the graph, its gradients another."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 2, 5, padding=2)
    )
    x = torch.randn(2, 2, 14, 10)
    if channels_last:
        module, x = (
            module.to(memory_format=torch.channels_last),
            x.contiguous(memory_format=torch.channels_last),
        )
    sizes = [8, 6] if mesh.size() == 2 else [5, 4, 5]
    part = sharded(x.requires_grad_(), [Shard(2)], {2: sizes})
    compiled = Compiled(module, backend=backend, fullgraph=True)
    check_op(compiled, part, mesh=mesh)
    with profile() as events:
        compiled(shard(x, mesh, [Shard(2)], {2: sizes})).sum().backward()
    names = [event.name for event in events.events()]
    assert names.count("shardtensor::conv_overlap") == 2
    assert names.count("shardtensor::conv_overlap_backward") == 2


def sent(fn, x):
    shardtensor.reset_comm_stats()
    fn(x)
    stats = shardtensor.comm_stats()
    return stats.messages, stats.bytes


@ranks(2)
@pytest.mark.parametrize("name", list(MODULES))
def test_compiled_modules_send_what_eager_ones_send(mesh, name):
    x = shard(torch.randn(2, 2, 8, 10), mesh, [Shard(2)], {2: [5, 3]})
    torch._dynamo.reset()
    compiled = torch.compile(MODULES[name], backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(x)
        assert sent(compiled, x) == sent(MODULES[name], x)
