"""What first_gpu.py counts on one rank of many whose peers are not there: nothing is
sent, what arrives has no meaning, and all that this rank queues is real. Over NCCL a
gather is one call; here, as over gloo, each rank's number is a message."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from first_gpu_tools import launched, queued_microseconds
from torch import nn
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor

PIECE = (1, 8, 16, 32)


def join(ranks):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # One with a neighbour on each side, where there are three ranks.
    dist.init_process_group(
        "fake", rank=ranks // 2, world_size=ranks, store=FakeStore()
    )


def call_of(make):
    def run(mesh):
        shapes = {0: [PIECE] * mesh.size()}
        x = ShardTensor.from_local(
            torch.randn(PIECE), mesh, [Shard(2)], sharding_shapes=shapes
        )
        call = make()
        with torch.no_grad():
            call(x)  # plans
            launches, _ = launched(lambda: call(x))
            return f"{launches} launches, {queued_microseconds(lambda: call(x)):.0f} us"

    return run


def measurements(ranks):
    gather = f"{2 * min(ranks, 8) - 1} copies"
    return {
        "convolution": (call_of(lambda: nn.Conv2d(8, 8, 3, padding=1)), "at most 18"),
        "GroupNorm": (call_of(lambda: lambda x: F.group_norm(x, 4)), gather),
        "softmax": (call_of(lambda: lambda x: x.softmax(2)), gather),
        "max": (call_of(lambda: lambda x: x.amax()), gather),
        "sum": (call_of(lambda: lambda x: x.sum((0, 1, 2)).full_tensor()), "2"),
        "the whole": (
            call_of(lambda: lambda x: x.full_tensor()),
            f"{2 * ranks - 1} copies; one over NCCL",
        ),
    }
