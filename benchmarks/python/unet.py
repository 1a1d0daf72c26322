"""A training step of a 2-D UNet on one 512 x 512 image."""

import torch
from halo import (
    DomainGroupNorm,
    HaloConv2d,
    HaloUpsample,
    MeetingGroupNorm,
    sum_gradients,
)
from report import Table
from timing import compare, median_ratio, on_rank_0
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardTensor

EXTENT = 512
ROUNDS = 7


class UNet(nn.Module):
    def __init__(self, conv=nn.Conv2d, norm=nn.GroupNorm, upsample=None, width=16):
        super().__init__()
        self.upsample = upsample or nn.Upsample(scale_factor=2, mode="bilinear")

        def block(inputs, outputs):
            layers = []
            for channels in (inputs, outputs):
                layers += [conv(channels, outputs, 3, padding=1, bias=False)]
                layers += [norm(4, outputs), nn.SiLU()]
            return nn.Sequential(*layers)

        widths = [width, 2 * width, 4 * width]
        self.first = block(3, width)
        pairs = list(zip(widths, widths[1:], strict=False))
        self.downs = nn.ModuleList(conv(a, b, 3, stride=2, padding=1) for a, b in pairs)
        self.encoders = nn.ModuleList(block(b, b) for _, b in pairs)
        self.decoders = nn.ModuleList(block(a + b, a) for a, b in pairs)
        self.head = conv(width, 3, 1)

    def forward(self, x):
        x = self.first(x)
        skips = []
        for down, encoder in zip(self.downs, self.encoders, strict=True):
            skips.append(x)
            x = encoder(down(x))
        for decoder in reversed(self.decoders):
            x = decoder(torch.cat([skips.pop(), self.upsample(x)], 1))
        return self.head(x)


def table(mesh):
    torch.manual_seed(0)
    image = torch.randn(1, 3, EXTENT, EXTENT)
    steps = variants(image, mesh)
    last = channels_last(image, mesh)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        check_gradients(steps, steps["one process, 1 thread"]())
        check_gradients(last, steps["one process, 1 thread"]())
    times = compare(steps, ROUNDS)
    note = f"{count(steps['ShardTensor'])} {of_ceiling(times)}"
    title = f"UNet training step, {EXTENT} x {EXTENT}"
    rows = {"step": times, "channels last": compare(last, ROUNDS)}
    return Table(title, "no communication", rows, note)


def piece_of(image, mesh):
    return image.chunk(mesh.size(), 2)[mesh.get_local_rank()].contiguous()


def channels_last(image, mesh):
    piece = piece_of(image, mesh).contiguous(memory_format=torch.channels_last)
    return {
        "ShardTensor": step(ShardTensor.from_local(piece, mesh, (Shard(2),))),
        "no communication": step(piece),
    }


def variants(image, mesh):
    """Functions that run one step and return the model."""
    piece = piece_of(image, mesh)
    shard = ShardTensor.from_local(piece, mesh, (Shard(2),))
    return {
        "by hand": step_by_hand(piece, mesh.size()),
        "ShardTensor": step(shard),
        "ShardTensor, compiled": step(shard, compiled=True),
        "no communication": step(piece),
        "no communication, compiled": step(piece, compiled=True),
        "only meeting": step(piece, norm=MeetingGroupNorm),
        "one process, 1 thread": on_rank_0(step(image)),
        "one process, all threads": on_rank_0(step(image), mesh.size()),
    }


def make(**layers):
    torch.manual_seed(0)
    return UNet(**layers)


def step(x, compiled=False, **layers):
    model = make(**layers)
    call = torch.compile(model, fullgraph=True) if compiled else model

    def run():
        model.zero_grad()
        call(x).square().mean().backward()
        return model

    return run


def step_by_hand(piece, ranks):
    model = make(conv=HaloConv2d, norm=DomainGroupNorm, upsample=HaloUpsample())

    def run():
        model.zero_grad()
        (model(piece).square().mean() / ranks).backward()
        sum_gradients(model)
        return model

    return run


def check_gradients(steps, expected):
    """By hand and sharded, they are those of one process, which has them."""
    for name in ("by hand", "ShardTensor", "ShardTensor, compiled"):
        if name not in steps:
            continue
        model = steps[name]()
        if expected is None:
            continue
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        for actual, wanted in pairs:
            torch.testing.assert_close(actual.grad, wanted.grad, rtol=1e-3, atol=1e-5)


def of_ceiling(times):
    of = {
        name: median_ratio(times, "no communication", name)
        for name in ("ShardTensor", "only meeting", "by hand")
    }
    return (
        f"Of the speed without communication ShardTensor reaches "
        f"{of['ShardTensor']:.0%}, by hand {of['by hand']:.0%}; meeting once in "
        f"each group norm, forward and backward, with nothing to say leaves "
        f"{of['only meeting']:.0%}."
    )


def count(run):
    shardtensor.reset_comm_stats()
    run()
    stats = shardtensor.comm_stats()
    return (
        f"ShardTensor sends {stats.messages} messages and takes part in "
        f"{stats.all_reduces} all-reduces per step and rank, "
        f"{stats.bytes / 2**20:.2f} MiB."
    )
