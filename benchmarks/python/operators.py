"""One operator on a few numbers: the cost of a call, not of the work."""

import torch
import torch.nn.functional as F
from halo import exchange_rows
from report import Table
from timing import compare
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardtensor import ShardTensor


def table(mesh):
    rows = {name: compare(variants(mesh, *case)) for name, case in cases().items()}
    rows["conv2d 3x3, halo"] = compare(convolutions(mesh))
    return Table("One operator on 64 numbers per rank", "plain", rows)


def cases():
    """name: (function, shapes of sharded inputs, shapes of weights, grad)."""
    small = (8, 8)
    return {
        "add": (torch.add, [small, small], [], False),
        "mul, recording grad": (torch.mul, [small, small], [], True),
        "view": (lambda x: x.view(x.shape[0], 2, 4), [small], [], False),
        "sum": (torch.sum, [small], [], False),
        "relu": (torch.relu, [small], [], False),
        "linear": (F.linear, [small], [small, (8,)], False),
        "cat": (lambda x, y: torch.cat([x, y], 1), [small, small], [], False),
    }


def variants(mesh, fn, shapes, weights, grad):
    """The same call on plain pieces, on ShardTensors and on DTensors."""
    pieces = [torch.randn(shape) for shape in shapes]
    weights = [torch.randn(shape) for shape in weights]
    plain = [p.clone().requires_grad_(grad) for p in pieces]
    shards = [leaf(ShardTensor.from_local(p, mesh, (Shard(0),)), grad) for p in pieces]
    dtensors = [leaf(DTensor.from_local(p, mesh, (Shard(0),)), grad) for p in pieces]
    replicas = [DTensor.from_local(w, mesh, (Replicate(),)) for w in weights]
    return {
        "plain": lambda: fn(*plain, *weights),
        "ShardTensor": lambda: fn(*shards, *weights),
        "DTensor": lambda: fn(*dtensors, *replicas),
    }


def leaf(x, grad):
    return x.detach().requires_grad_(grad)


def convolutions(mesh):
    """4 channels of 8 x 16 per rank. Plain computes without neighbours; by
    hand exchanges one row with each. DTensor's convolution takes no halo in
    this layout."""
    piece, weight = torch.randn(1, 4, 8, 16), torch.randn(4, 4, 3, 3)
    shards = ShardTensor.from_local(piece, mesh, (Shard(2),))
    return {
        "plain": no_grad(lambda: F.conv2d(piece, weight, padding=1)),
        "ShardTensor": no_grad(lambda: F.conv2d(shards, weight, padding=1)),
        "by hand": no_grad(
            lambda: F.conv2d(exchange_rows(piece, 1, 1), weight, padding=(0, 1))
        ),
    }


def no_grad(fn):
    return torch.no_grad()(fn)
