"""From which size on should a convolution compute while its neighbours' rows
travel? What this says of a device is what kDeviceBytes (rules/stencil/conv.cpp)
should be there."""

import itertools

import torch
from device import DEVICE
from report import Table
from timing import compare
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardTensor

NEVER = 2**62
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORMATS = {"": torch.contiguous_format, ", channels last": torch.channels_last}
CHANNELS = 32
# Rows and columns of a rank's piece.
PIECES = (
    [(16, 64), (64, 128), (128, 256)]
    if DEVICE == "cpu"
    else [(16, 64), (128, 256), (256, 1024), (512, 2048), (1024, 4096)]
)
ROUNDS = 9


def table(mesh):
    rows = {}
    for piece, dtype, form in itertools.product(PIECES, DTYPES, FORMATS):
        x = torch.randn(1, CHANNELS, *piece, dtype=DTYPES[dtype])
        x = x.contiguous(memory_format=FORMATS[form])
        kibibytes = x.numel() * x.element_size() >> 10
        rows[f"{kibibytes} KiB, {dtype}{form}"] = compare(ways(mesh, x), ROUNDS)
    note = f"Forward and backward, {CHANNELS} channels; the input's bytes per rank."
    return Table("Convolutions 3 x 3 that join rows or don't", "joined", rows, note)


def ways(mesh, x):
    conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1).to(x.dtype)
    own = ShardTensor.from_local(x, mesh, [Shard(2)]).requires_grad_()
    grad = torch.ones_like(own)

    def by(bytes):
        def run():
            own.grad = None
            with shardtensor.conv_overlap_bytes(bytes):
                conv(own).backward(grad)

        return run

    return {"joined": by(NEVER), "apart": by(0)}
