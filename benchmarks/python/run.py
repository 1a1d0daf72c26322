"""Measures what sharding costs, on this machine, with 2 ranks of one thread.

    make bench                        # everything; rewrites benchmarks/README.md
    make bench ARGS="operators"       # one part; only prints
    make bench ARGS="--list"          # the parts
    make bench RANKS=4                # timed parts on other ranks; only prints
    make bench DEVICE=cuda            # timed parts on GPUs, which ranks may share;
                                      # only prints

Every number of a table row comes from the same run: the variants take turns,
and ratios are medians over the rounds. Timed parts run twice, over gloo and
over MPI.
"""

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cpp
import device
import memory
import plans
import report

HERE = Path(__file__).resolve().parent
TIMED = (
    "operators",
    "steps",
    "redistribute",
    "overlap",
    "attention",
    "transports",
    "graphs",
    "neighborhood",
    "points",
    "files",
    "spectra",
    "unet",
    "unet3d",
    "unet_profile",
    "train",
)
# They start their own ranks.
STARTED = {"cpp": cpp, "memory": memory, "plans": plans}
PARTS = (*TIMED, *STARTED)
RANKS = int(os.environ.get("RANKS", "2"))
# Freed memory stays with the process, as most other allocators have it.
# Else a step takes longer where the variant before it gave its memory back.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def main():
    if {"RANK", "OMPI_COMM_WORLD_RANK"} & set(os.environ):
        measure(sys.argv[1], sys.argv[2:])
        return
    if sys.argv[1:] == ["--list"]:
        print(*PARTS)
        return
    wanted = sys.argv[1:] or list(PARTS)
    for part in wanted:
        if part not in PARTS:
            sys.exit(f"run.py: no part {part!r}; there are {', '.join(PARTS)}")
    if reason := device.missing():
        print(reason)
        return
    timed = [part for part in wanted if part in TIMED]
    texts = [timed_tables(launcher, timed) for launcher in launchers() if timed]
    for part, module in STARTED.items():
        if part in wanted and device.DEVICE == "cpu" and RANKS == 2:
            texts.append(module.report())
            print(texts[-1], end="\n\n", flush=True)
    if set(wanted) == set(PARTS) and device.DEVICE == "cpu" and RANKS == 2:
        report.write(HERE.parent / "README.md", texts)


def launchers():
    """torchrun's ranks talk over gloo or NCCL, mpirun's over MPI, on CPUs alone."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    yield [*torchrun, f"--nproc-per-node={RANKS}"]
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if device.DEVICE != "cpu":
        return
    if mpirun := shutil.which("mpirun", path=programs):
        bound = ["--oversubscribe", "--bind-to", "none"]
        yield [mpirun, *bound, "-n", str(RANKS), sys.executable]


def timed_tables(launcher, parts):
    with tempfile.NamedTemporaryFile() as results:
        settings = {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            **KEEP_MEMORY,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        done = subprocess.run(
            [*launcher, __file__, results.name, *parts], env=os.environ | settings
        )
        if done.returncode:
            sys.exit(done.returncode)
        return Path(results.name).read_text()


def measure(results, wanted):
    import torch
    import torch.distributed as dist
    from timing import give_back_memory

    torch.set_num_threads(1)
    mesh = device.join(RANKS)
    names = {"gloo": "gloo", "nccl": "NCCL", "shardtensor_mpi": "MPI"}
    backend = names.get(dist.get_backend(), dist.get_backend())
    tables = []
    for part in wanted:
        give_back_memory()
        tables.append(importlib.import_module(part).table(mesh))
        tables[-1].title += f", over {backend}"
        if dist.get_rank() == 0:
            report.show(tables[-1])
    if dist.get_rank() == 0:
        Path(results).write_text("\n\n".join(table.text() for table in tables))
    dist.barrier()
    device.leave()


if __name__ == "__main__":
    main()
