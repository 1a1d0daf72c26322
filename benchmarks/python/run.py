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
import tempfile
from pathlib import Path

import cpp
import memory
import report

HERE = Path(__file__).resolve().parent
TIMED = ("operators", "steps", "redistribute", "unet")
STARTED = {"cpp": cpp, "memory": memory}  # they start their own ranks
PARTS = (*TIMED, *STARTED)
RANKS = 2


def main():
    if "RANK" in os.environ:
        measure(sys.argv[1], sys.argv[2:])
        return
    wanted = sys.argv[1:] or list(PARTS)
    for part in wanted:
        if part not in PARTS:
            sys.exit(f"run.py: no part {part!r}; there are {', '.join(PARTS)}")
    texts = [timed_tables([p for p in wanted if p in TIMED])]
    for part, module in STARTED.items():
        if part in wanted:
            texts.append(module.report())
            print(texts[-1], end="\n\n", flush=True)
    if set(wanted) == set(PARTS):
        report.write(HERE.parent / "README.md", texts)


def timed_tables(parts):
    if not parts:
        return ""
    with tempfile.NamedTemporaryFile() as results:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", __file__, results.name, *parts]
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(command, env={**os.environ, **threads})
        if done.returncode:
            sys.exit(done.returncode)
        return Path(results.name).read_text()


def measure(results, wanted):
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
    if DistributedManager().rank == 0:
        Path(results).write_text("\n\n".join(table.text() for table in tables))
    DistributedManager.cleanup(barrier=True)


if __name__ == "__main__":
    main()
