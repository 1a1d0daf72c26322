"""Rank 0 holds a tensor; it is scattered unevenly, then cut another way.

    torchrun --nproc-per-node 2 scatter_redistribute.py

Output on 2 ranks:

    rank 0 received (64, 64), rank 1 received (36, 64)
    Shard(0) to Shard(1): rank 0 holds (100, 32), rank 1 holds (100, 32)
    and back, cut as before: rank 0 holds (64, 64), rank 1 holds (36, 64)
    Every element arrived: True
"""

import torch
from torch.distributed.tensor import Shard

from shardtensor import scatter_tensor
from shardtensor.distributed import DistributedManager


def main():
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), ("domain",))

    whole = torch.arange(6400.0).reshape(100, 64).to(manager.device)
    rows = uneven(100, manager.world_size)
    x = scatter_tensor(
        whole if manager.rank == 0 else None, 0, mesh, (Shard(0),), sizes={0: rows}
    )
    columns = x.redistribute(placements=(Shard(1),))
    back = columns.redistribute(placements=(Shard(0),), sizes={0: rows})

    same = all(torch.equal(t.full_tensor(), whole) for t in (x, columns, back))
    if manager.rank == 0:
        print(pieces(x, "received"))
        print(f"Shard(0) to Shard(1): {pieces(columns, 'holds')}")
        print(f"and back, cut as before: {pieces(back, 'holds')}")
        print(f"Every element arrived: {same}")
    DistributedManager.cleanup(barrier=True)


def uneven(extent, ranks):
    """Each rank takes 64 % of what is left, the last one the rest."""
    sizes = []
    for _ in range(ranks - 1):
        sizes.append((extent - sum(sizes)) * 64 // 100)
    return [*sizes, extent - sum(sizes)]


def pieces(x, verb):
    shapes = x.spec.sharding_shapes()[0]
    return ", ".join(f"rank {r} {verb} {tuple(s)}" for r, s in enumerate(shapes))


if __name__ == "__main__":
    main()
