"""What nobody knows of a device until it has run there: one table.

    python benchmarks/python/first_gpu.py out/first_gpu.json       # the current GPU
    DEVICE=cpu python benchmarks/python/first_gpu.py out/first_gpu.json  # a dry run

Each stage has ranks of its own: one (NCCL), two that share a GPU (gloo, through the
host), two of NCCL where it allows that, and one rank of 2, 8 and 64 whose peers are
not there, which counts what it queues. What a row raises is its cell; its ranks end
then, and the rows that are left go on on fresh ones. Rows are written as they come;
`--show` prints the table. tools/first_gpu_run.sh calls it.
"""

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("DEVICE", "cuda")

import device
import first_gpu_alone
import first_gpu_pieces
import first_gpu_ranks
import torch
import torch.distributed as dist
from first_gpu_tools import CannotRun
from torch.distributed.device_mesh import init_device_mesh

import shardtensor
from shardtensor.distributed import DistributedManager

MESSAGES = 60  # seconds that a message may take
UNDER_WAY = "did not end"


@dataclasses.dataclass
class Stage:
    ranks: int
    backend: str
    measurements: dict  # name -> (function of a mesh, what is expected)

    def missing(self):
        """Why it cannot run here, in one line; None where it can."""
        if self.backend != "nccl" or self.ranks == 1:
            return None
        return first_gpu_ranks.missing_nccl(self.ranks)


STAGES = {
    "one rank": Stage(1, "nccl", first_gpu_alone.MEASUREMENTS),
    "two ranks": Stage(2, "gloo", first_gpu_ranks.MEASUREMENTS),
    "two ranks of NCCL": Stage(2, "nccl", first_gpu_ranks.OVER_NCCL),
}
for pieces in (2, 8, 64):
    STAGES[f"a rank of {pieces}"] = Stage(
        pieces, "fake", first_gpu_pieces.measurements(pieces)
    )


def main():
    options = parse()
    if options.show:
        return show(options.results)
    if reason := device.missing():
        return print(reason)
    if options.rows:
        return measure(options.results, options.stages[0], options.rows)
    ends = time.monotonic() + options.limit
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for name in options.stages:
        run_stage(options.results, name, options.only, ends)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("results", type=Path)
    add("--show", action="store_true", help="only print the table")
    add("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE")
    add("--only", nargs="+", metavar="NAME", help="these measurements of the stages")
    add("--limit", type=float, default=3600, help="seconds for all of it")
    add("--rows", nargs="+", help=argparse.SUPPRESS)  # in a rank of a stage
    options = parser.parse_args()
    for row in options.only or ():
        if not any(row in STAGES[name].measurements for name in options.stages):
            parser.error(f"no measurement {row!r} in {', '.join(options.stages)}")
    return options


# ---- stages -----------------------------------------------------------------


def run_stage(results, name, only, ends):
    stage = STAGES[name]
    rows = [row for row in only or stage.measurements if row in stage.measurements]
    if reason := stage.missing():
        print(f"{name}: {reason}", flush=True)
        for row in rows:
            record(results, name, row, reason)
        return
    for row in rows:
        forget(results, name, row)
    while rows and time.monotonic() < ends:
        start_ranks(results, name, rows, ends)
        known = read(results).get(name, {})
        left = [row for row in rows if row not in known]
        if len(left) == len(rows):
            record(results, name, left.pop(0), "its ranks did not start")
        rows = left


def start_ranks(results, name, rows, ends):
    stage = STAGES[name]
    launcher = [sys.executable]
    if stage.ranks > 1 and stage.backend != "fake":
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={stage.ranks}"]
    settings = {
        "SHARDTENSOR_DISTRIBUTED_TIMEOUT": str(MESSAGES),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }
    command = [*launcher, __file__, results, "--stages", name, "--rows", *rows]
    process = subprocess.Popen(command, env=os.environ | settings)
    try:
        process.wait(max(1, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its ranks along
        process.wait()


def measure(results, name, rows):
    """In each rank of a stage."""
    mesh = join(STAGES[name])
    for row in rows:
        if is_first():
            record(results, name, row, UNDER_WAY)
        shardtensor.reset_comm_stats()
        torch.manual_seed(0)
        try:
            cell = STAGES[name].measurements[row][0](mesh)
            device.finish()
        except CannotRun as reason:
            cell = str(reason)
        except Exception as error:  # the row says it, the others are still measured
            fail(results, name, row, error)
        if is_first():
            record(results, name, row, cell, shardtensor.comm_stats().exchanges)
            print(f"{name}, {row}: {cell}", flush=True)
    device.leave()


def fail(results, name, row, error):
    """Ends this rank. What the first rank to fail says counts: others fail of that."""
    told = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(f"{name}, {row}: {told}", flush=True)
    if not read(results).get(name, {}).get(row, {}).get("failed"):
        record(results, name, row, told, failed=True)
    os._exit(1)


def join(stage):
    """The stage's mesh, whose tensors are on the device."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if stage.backend == "nccl":
        DistributedManager.initialize()
        mesh = DistributedManager().initialize_mesh((-1,), ("domain",))
        device.enter(rank)
        return mesh
    if stage.backend == "fake":
        first_gpu_pieces.join(stage.ranks)
    else:  # DistributedManager would take host tensors, too
        limit = datetime.timedelta(seconds=MESSAGES)
        dist.init_process_group(stage.backend, timeout=limit)
    device.enter(rank)
    return init_device_mesh(device.DEVICE, (stage.ranks,), mesh_dim_names=("domain",))


def is_first():
    return int(os.environ.get("RANK", 0)) == 0


# ---- the table --------------------------------------------------------------


def read(results):
    return json.loads(results.read_text()) if results.exists() else {}


def write(results, stages):
    """At once: another rank may read it."""
    new = results.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(stages, indent=1))
    new.replace(results)


def record(results, stage, row, cell, exchanges=0, failed=False):
    stages = read(results)
    found = {"here": cell, "exchanges": exchanges, "failed": failed}
    stages.setdefault(stage, {})[row] = found
    write(results, stages)


def forget(results, stage, row):
    stages = read(results)
    stages.get(stage, {}).pop(row, None)
    write(results, stages)


def show(results):
    stages = read(results)
    print("| ranks | what | here | exchanges | expected |\n|---|---|---|---|---|")
    for name, stage in STAGES.items():
        for row, (_, expected) in stage.measurements.items():
            found = {"here": "not measured", "exchanges": 0}
            found |= stages.get(name, {}).get(row, {})
            cells = name, row, found["here"], found["exchanges"], expected
            print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
