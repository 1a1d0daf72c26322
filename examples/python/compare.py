"""What the demos share: a run on all ranks, the same run on the pieces alone and
in one process."""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import report
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from training import train

from shardtensor import ShardTensor


def make_mesh(manager, text):
    """A mesh of 1 to 3 axes; axis i cuts spatial dim i."""
    shape = [int(n) for n in text.split("x")] if text else [-1]
    names = ("domain_x", "domain_y", "domain_z")[: len(shape)]
    return manager.initialize_mesh(shape, names)


def train_showing(args, job, title, show_progress):
    if not show_progress:
        return train(args, job, lambda step, added: None)
    with report.StepProgress(title, args.steps) as progress:
        return train(args, job, progress)


def train_apart(args, make_job, *tensors):
    """The ceiling: some steps of every rank on its pieces as if it were alone,
    all at the same time. No messages, and wrong numbers."""
    shape = (dist.get_world_size(), 1)
    device = tensors[0].device.type
    alone = init_device_mesh(device, shape, mesh_dim_names=("each", "alone"))["alone"]
    pieces = [
        ShardTensor.from_local(x.to_local(), alone, [x.placements[0]]) for x in tensors
    ]
    few = argparse.Namespace(**{**vars(args), "steps": min(3, args.steps)})
    dist.barrier()
    run = train(few, make_job(few, *pieces), lambda step, added: None)
    run.prediction = None
    return run


def gather(run, mesh):
    """Every rank's, on every rank."""
    runs = [None] * mesh.size()
    dist.all_gather_object(runs, run)
    return runs


def borders(tensor):
    """Where the shards of each dim meet."""
    return {
        dim: [sum(sizes[:i]) for i in range(1, len(sizes))]
        for dim, sizes in tensor.spec.sizes().items()
    }


def cuts(tensor):
    return ", ".join(f"dim {d} as {s}" for d, s in tensor.spec.sizes().items())


# ---- one process ------------------------------------------------------------


def in_one_process(ranks):
    """This script's training in a fresh process, --reference FILE, with all the
    threads that the ranks had together."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run"
        subprocess.run(
            [sys.executable, *sys.argv, "--reference", str(file)],
            env=without_launcher(torch.get_num_threads() * ranks),
            check=True,
        )
        return pickle.loads(file.read_bytes())


def reference(args, job):
    """What that process does."""
    run = train_showing(args, job, "one process", True)
    run.prediction = None
    Path(args.reference).write_bytes(pickle.dumps(run))


def without_launcher(threads):
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in launcher}
    # Threads that wait must not spin: on a busy machine they slow each other.
    openmp = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {**kept, **openmp}


def device_of_one_process():
    return "cuda" if torch.cuda.is_available() else "cpu"
