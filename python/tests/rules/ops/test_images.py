"""Operators that need images whole: samples stay cut, channels in unpooling."""

import pytest
import torch
import torch.nn.functional as F
from ranks import check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Shard

import shardtensor


def pooled(x, pool):
    return pool(x.detach(), 2, return_indices=True)[1]


def rest(x):
    return x[..., ::2, ::2]


IMAGES = {
    "unfold": lambda x: F.unfold(x, 3, padding=1, stride=2),
    "fold": lambda x: F.fold(x.flatten(2), (5, 5), 2, padding=1),
    "unpool": lambda x: F.max_unpool2d(rest(x), pooled(x, F.max_pool2d), 2),
    "unpool_channels": lambda x: F.max_unpool2d(
        rest(x)[:, 0], pooled(x, F.max_pool2d)[:, 0], 2
    ),
    "unpool_volume": lambda x: F.max_unpool3d(
        x[..., :3, :3].unsqueeze(-1),
        torch.arange(9).view(3, 3, 1).expand(3, 4, 3, 3, 1),
        (1, 1, 1),
    ),
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", IMAGES)
def test_samples_stay_cut(mesh, name):
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    for sizes in partitions(3, mesh.size()):
        with shardtensor.fallback_mode("error"):
            check_op(IMAGES[name], sharded(x, [Shard(0)], {0: sizes}), mesh=mesh)
    for dim in (1, 2, 3):
        native = dim == 1 and name in ("unpool", "unpool_volume") and mesh.size() < 3
        with shardtensor.fallback_mode("error" if native else "silent"):
            check_op(IMAGES[name], sharded(x, [Shard(dim)]), mesh=mesh)


@ranks(2)
def test_all_ranks_refuse_an_index_of_one(mesh):
    x = shard(torch.randn(2, 1, 2, 2), mesh, [Shard(0)])
    index = torch.tensor([0, 1, 2, 3, 0, 1, 2, 99]).view(2, 1, 2, 2)
    with pytest.raises(RuntimeError, match="index 99 is out of bounds"):
        F.max_unpool2d(x, shard(index, mesh, [Shard(0)]), 2)
