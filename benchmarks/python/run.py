"""Measures what sharding costs, on this machine, with 2 ranks of one thread.

    make bench                        # everything; rewrites benchmarks/README.md
    make bench ARGS="operators"       # one part; only prints

Every number of a table row comes from the same run: the variants take turns,
and ratios are medians over the rounds.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("operators", "steps", "redistribute", "unet")
RANKS = 2


def main():
    if "RANK" in os.environ:
        measure(sys.argv[1:])
        return
    wanted = sys.argv[1:] or list(PARTS)
    for part in wanted:
        if part not in PARTS:
            sys.exit(f"run.py: no part {part!r}; there are {', '.join(PARTS)}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", __file__, *wanted]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    sys.exit(subprocess.run(command, env=environment).returncode)


def measure(wanted):
    import report
    import torch

    from shardtensor.distributed import DistributedManager

    torch.set_num_threads(1)
    DistributedManager.initialize()
    mesh = DistributedManager().initialize_mesh((-1,), ("domain",))
    tables = []
    for part in wanted:
        tables.append(importlib.import_module(part).table(mesh))
        if DistributedManager().rank == 0:
            report.show(tables[-1])
    if DistributedManager().rank == 0 and set(wanted) == set(PARTS):
        report.write(HERE.parent / "README.md", tables)
    DistributedManager.cleanup(barrier=True)


if __name__ == "__main__":
    main()
