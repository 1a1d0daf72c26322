"""Samples on some axes of a mesh, each cut over the others."""

import rig
import torch.distributed as dist
from oracle import shard, uneven
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardtensor

MESHES = {  # of four ranks
    "1x4": ((1, 4), ("data", "domain")),
    "2x2": ((2, 2), ("data", "domain")),
    "4x1": ((4, 1), ("data", "domain")),
    "2x1x2": ((2, 1, 2), ("data", "h", "w")),
    "1x2x2": ((1, 2, 2), ("data", "h", "w")),
}
FEWER = {
    "1x2": ((1, 2), ("data", "domain")),
    "2x1": ((2, 1), ("data", "domain")),
    "1x3": ((1, 3), ("data", "domain")),
}


def make(name):
    shape, names = (MESHES | FEWER)[name]
    mesh = init_device_mesh(rig.DEVICE, shape, mesh_dim_names=names)
    return mesh, names[1:], mesh[names[1:]]


def part(samples, mesh, domain):
    """This data rank's samples, cut along rows over the last axis of the domain."""
    mine = samples.chunk(mesh.size(0))[mesh.get_local_rank(0)]
    if domain.ndim == 1:
        return shard(mine, domain, [Shard(2)], {2: uneven(9, domain.size())})
    return shard(mine, domain, [Shard(3), Shard(2)], {2: uneven(9, 2)})


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def over_data(loss, mesh):
    if not shardtensor.is_shard_tensor(loss):
        return loss
    value = loss.detach().full_tensor()
    dist.all_reduce(value, group=mesh.get_group(0))
    return value / mesh.size(0)
