"""Peak memory of a UNet training step, on 1, 2 and 4 ranks.

Each count of ranks is a job of its own. A rank measures by how much its resident
memory grows from before the step to the step's peak, parameters and their
gradients included.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

EXTENT = 1536
RANKS = (1, 2, 4)


def report():
    """The lines of the table, from jobs that this process starts."""
    grown = {ranks: measure_with(ranks) for ranks in RANKS}
    lines = [f"### Peak memory of a UNet training step, {EXTENT} x {EXTENT}", ""]
    lines += ["| ranks | growth per rank | of one process | 1/N |", "|---|---|---|---|"]
    for ranks, size in grown.items():
        share = size / grown[1]
        lines.append(
            f"| {ranks} | {size / 2**20:.0f} MiB | {share:.3f} | {1 / ranks:.3f} |"
        )
    return "\n".join(lines)


def measure_with(ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__]
    # Freed tensors go back to the system at once, small ones of many ranks, too.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def main():
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard
    from unet import make

    import shardtensor
    from shardtensor.distributed import DistributedManager

    torch.set_num_threads(1)
    DistributedManager.initialize()
    ranks = DistributedManager().world_size
    mesh = DistributedManager().initialize_mesh((-1,), ("domain",))

    def step(extent):
        piece = torch.randn(1, 3, extent // ranks, extent)
        image = shardtensor.ShardTensor.from_local(piece, mesh, (Shard(2),))
        make()(image).square().mean().backward()

    step(64)  # code and threads that come with the first call
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    step(EXTENT)
    grown = torch.tensor(status("VmHWM") - before)
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(grown.item())
    DistributedManager.cleanup(barrier=True)


if __name__ == "__main__":
    main()
