"""Subjects that fail, each in one of the ways that the sweep tells apart."""

import time

import torch
import torch.distributed as dist

from conformance.sample import Sample
from shardtensor import ShardTensor


def wrong(x):
    return x + 1 if isinstance(x, ShardTensor) else x


def wrong_gradient(x):
    return x * x.detach() if isinstance(x, ShardTensor) else x * x


def differs(x):
    if isinstance(x, ShardTensor) and dist.get_rank() == 1:
        raise ValueError("shard 1 alone")
    return x.sum() * 1


def waits(x):
    """Rank 1 leaves the others waiting for its message."""
    if isinstance(x, ShardTensor) and dist.get_rank() == 1:
        raise ValueError("shard 1 alone")
    return x.full_tensor() if isinstance(x, ShardTensor) else x


def hangs(x):
    while isinstance(x, ShardTensor):
        time.sleep(0.1)
    return x


def unexplained(x):
    if isinstance(x, ShardTensor):
        raise RuntimeError("something about strides")
    return x.clone()


def accepted(x):
    if not isinstance(x, ShardTensor):
        raise ValueError("never")
    return x.clone()


def samples(name, count):
    x = torch.arange(5.0, dtype=torch.float64, requires_grad=True)
    return [Sample("x", globals()[name], (x,), {})]
