"""Changing the layout, beside one hand-written collective."""

import torch
import torch.distributed as dist
from report import Table
from timing import compare
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardtensor import ShardTensor


def table(mesh):
    rows = {
        f"{extent} x {extent}, Shard(0) to {target}": compare(
            variants(mesh, extent, target)
        )
        for extent in (128, 1024, 4096)  # 64 KiB to 64 MiB
        for target in (Shard(1), Replicate())
    }
    return Table("Redistribution", "by hand", rows)


def variants(mesh, extent, target):
    piece = torch.randn(extent // mesh.size(), extent)
    shard = ShardTensor.from_local(piece, mesh, (Shard(0),))
    dtensor = DTensor.from_local(piece, mesh, (Shard(0),))
    by_hand = rows_to_columns if target == Shard(1) else gather_rows
    result = shard.redistribute(placements=(target,)).to_local()
    assert torch.equal(result, by_hand(piece))
    return {
        "by hand": lambda: by_hand(piece),
        "ShardTensor": lambda: shard.redistribute(placements=(target,)),
        "DTensor": lambda: wait(dtensor.redistribute(placements=(target,))),
    }


def wait(dtensor):
    """A DTensor waits for its collective at the first use."""
    return dtensor.to_local().view(-1)[0]


def rows_to_columns(piece):
    columns = torch.cat(piece.chunk(dist.get_world_size(), 1))
    received = torch.empty_like(columns)
    dist.all_to_all_single(received, columns)
    return received


def gather_rows(piece):
    whole = piece.new_empty(piece.shape[0] * dist.get_world_size(), piece.shape[1])
    dist.all_gather_into_tensor(whole, piece)
    return whole
