"""Layouts to sweep, and an operator checked in all of them."""

import itertools

import torch
from ranks import check_op, partitions, sharded
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor

ALL = (1, 2, 3, 4, "2x2")
LAYOUTS_1D = [(Shard(0),), (Shard(1),), (Replicate(),), (Partial(),)]
LAYOUTS_2D = list(
    itertools.product([Shard(0), Shard(1), Replicate(), Partial()], repeat=2)
)


def numbered(*shape):
    """Every element is its own global index."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).reshape(shape)


def image(*shape, dtype=torch.float64):
    """Values with a mean, so that forgetting it shows."""
    return (torch.randn(shape, dtype=dtype) + 3).requires_grad_()


def placements_of(mesh, *dims):
    """Shard(dims[a]) on axis a; the last one for all further axes."""
    return [Shard(dims[min(a, len(dims) - 1)]) for a in range(mesh.ndim)]


def sweep(mesh, shape, dims=None):
    """(placements, sizes) of a tensor: every dim cut, evenly, unevenly and with
    empty pieces; two dims cut on a 2-D mesh; nothing cut."""
    for dim in range(len(shape)) if dims is None else dims:
        for sizes in partitions(shape[dim], mesh.size()):
            yield placements_of(mesh, dim), {dim: sizes}
    if mesh.ndim == 2:
        for a in range(len(shape)):
            for b in range(len(shape)):
                if a != b:
                    yield placements_of(mesh, a, b), None
    yield [Replicate()] * mesh.ndim, None


def check(mesh, shape, fn, *others, dims=None, x=None, **options):
    """fn(x, *others) in every layout of x, a random tensor of `shape`."""
    if x is None:
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for placements, sizes in sweep(mesh, x.shape, dims):
        check_op(fn, sharded(x, placements, sizes), *others, mesh=mesh, **options)


def check_native(mesh, shape, fn, *others, **options):
    """check(), and nothing may be gathered for want of a rule."""
    with shardtensor.fallback_mode("error"):
        check(mesh, shape, fn, *others, **options)
