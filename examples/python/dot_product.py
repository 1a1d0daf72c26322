"""An operator of your own: torch.dot replaced on ShardTensors by a function.

    torchrun --nproc-per-node 2 dot_product.py

Output, on any number of ranks:

    The handler served torch.dot: True
    Result and placements: 332833500.0, (Replicate(),)
    Gradients equal the other vector: True
"""

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.distributed import DistributedManager

served = []


def sharded_dot(func, types, args, kwargs):
    """Each rank multiplies what it holds: its term of the sum that redistribute
    makes. Backward needs nothing: each term has the gradient of the sum."""
    x, y = args
    local = func(x.to_local(), y.to_local())
    served.append(func)
    terms = ShardTensor.from_local(local, x.device_mesh, (Partial(),))
    return terms.redistribute(placements=(Replicate(),))


def main():
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), ("domain",))
    ShardTensor.register_function_handler(torch.dot, sharded_dot)

    count = torch.arange(1000.0, dtype=torch.float64, device=manager.device)
    mine = count.tensor_split(manager.world_size)[manager.rank]
    x = ShardTensor.from_local(mine.clone(), mesh, (Shard(0),)).requires_grad_()
    y = ShardTensor.from_local(mine.clone(), mesh, (Shard(0),)).requires_grad_()
    result = torch.dot(x, y)
    result.backward()

    same = torch.equal(x.grad.full_tensor(), count) and torch.equal(
        y.grad.full_tensor(), count
    )
    if manager.rank == 0:
        print(f"The handler served torch.dot: {served == [torch.dot]}")
        print(f"Result and placements: {result.item()}, {result.placements}")
        print(f"Gradients equal the other vector: {same}")
    DistributedManager.cleanup(barrier=True)


if __name__ == "__main__":
    main()
