"""What test_slurm.py starts by srun and sbatch."""

import os
import sys

import torch
import torch.distributed as dist

from shardtensor import _C, Shard, scatter_tensor
from shardtensor.distributed import DistributedManager, detect_launch


def main(what="reduce"):
    if what == "device":
        say_device()
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), ("domain",))
    number = torch.tensor(float(manager.rank + 1))
    if manager.distributed:
        dist.all_reduce(number)
    x = scatter_tensor(torch.arange(10.0), 0, mesh, [Shard(0)])
    said = (
        f"rank {manager.rank} of {manager.world_size}, {manager.local_rank} here, by "
        f"{manager._initialization_method}: {number.item():g}, "
        f"{x.sum().full_tensor().item():g}\n"
    )
    # At once: print writes the end of a line apart where output is not buffered.
    sys.stdout.write(said)
    sys.stdout.flush()
    DistributedManager.cleanup(barrier=True)


def say_device():
    """Which device a rank would take of those that SLURM shows it."""
    gpus = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    device = _C.choose_device(detect_launch(), gpus, "nccl")
    print(f"device {device} of {gpus}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
