"""A training step of a UNet by DDP: samples cut over two ranks, beside two ranks with
samples of half the size that know nothing of each other's."""

import torch
from halo import MeetingGroupNorm
from report import Table
from timing import compare
from torch import nn
from torch.distributed.tensor import Shard
from unet import make, piece_of

from shardtensor import ShardTensor, parallelize

EXTENTS = 512, 1024
ROUNDS = 7


def table(mesh):
    rows = {f"{extent} x {extent}": row(extent, mesh) for extent in EXTENTS}
    title = "UNet training step by DDP, samples cut in two"
    note = (
        "plain DDP: each rank's sample has half the rows, nothing else is sent. Only "
        "meeting: the same, but ranks wait for each other once in each group norm, "
        "forward and backward."
    )
    return Table(title, "plain DDP", rows, note)


def row(extent, mesh):
    torch.manual_seed(0)
    piece = piece_of(torch.randn(1, 3, extent, extent), mesh)
    shard = ShardTensor.from_local(piece, mesh, (Shard(2),))
    meeting = make(norm=MeetingGroupNorm)
    variants = {
        "plain DDP": step(nn.parallel.DistributedDataParallel(make()), piece),
        "only meeting": step(nn.parallel.DistributedDataParallel(meeting), piece),
        "parallelize": step(parallelize(make(), mesh), shard),
    }
    return compare(variants, ROUNDS)


def step(model, x):
    optimizer = torch.optim.AdamW(model.parameters())

    def run():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return run
