"""Trains a 3-D UNet that finds grey and white matter in a brain volume, the
volume sharded over all ranks, and compares with one process. The labels of
some slices are held out: the picture and the Dice are those of these slices.

    make demo                                 # 2 ranks
    make demo RANKS=4 MESH=2x2                # a 2-D mesh: two dims are cut
    make demo LAUNCH="mpirun -n 2 .venv/bin/python"           # over MPI
    make demo ARGS="--norm batch --up transpose --down pool"
    make demo ARGS="--full --steps 3"         # all 197 x 233 x 189 voxels

or with any launcher: torchrun --nproc-per-node 2 train_unet.py. The model
(unet.py) and the loop (training.py) do not know that the volume is sharded.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import brain
import report
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from training import Run, train
from unet import dice

from shardtensor import ShardTensor, scatter_tensor
from shardtensor.distributed import DistributedManager


def main():
    args = parse()
    if args.reference:
        reference(args)
        return
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = make_mesh(manager, args.mesh)
    volume, labels = load_sharded(args, mesh)
    if manager.rank == 0:
        say_what(mesh, volume)
    run = train_showing(args, volume, labels, f"{mesh.size()} ranks", manager.rank == 0)
    prediction = run.prediction.full_tensor().cpu()
    run.prediction = None
    runs = gather(run, mesh)
    pieces = gather(train_apart(args, volume, labels), mesh)
    cuts = borders(volume)
    DistributedManager.cleanup()
    if manager.rank == 0:
        show(args, runs, pieces, prediction, cuts)


def parse():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--mesh", help="ranks per cut dim, as in 2x2; default: one dim, all ranks")
    add("--full", action="store_true", help="the whole volume at 1 mm")
    add("--steps", type=int, default=40)
    add("--channels", type=int, default=8, help="at full resolution")
    add("--levels", type=int, default=3)
    add("--norm", choices=["group", "batch"], default="group")
    add("--activation", choices=["silu", "relu"], default="silu")
    add("--down", choices=["conv", "pool"], default="conv")
    add("--up", choices=["trilinear", "transpose"], default="trilinear")
    add("--bf16", action="store_true", help="autocast to bfloat16")
    add("--checkpoint", action="store_true", help="activation checkpointing")
    add("--learning-rate", type=float, default=4e-2)
    add("--seed", type=int, default=0)
    add("--picture", default="out/brain.png")
    add("--curves", default="out/training.png", help="losses and memory")
    add("--no-compare", action="store_true", help="skip the run on one process")
    add("--reference", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the sharded run --------------------------------------------------------


def make_mesh(manager, text):
    """A mesh of 1 to 3 axes; axis i cuts spatial dim i of the volume."""
    shape = [int(n) for n in text.split("x")] if text else [-1]
    names = ("domain_x", "domain_y", "domain_z")[: len(shape)]
    return manager.initialize_mesh(shape, names)


def load_sharded(args, mesh):
    """Rank 0 reads the file; every rank receives its shard only."""
    volume = labels = None
    if dist.get_rank() == 0:
        volume, labels = brain.load(args.full)
        labels = brain.hold_out(labels)
    shape = brain.shape(args.full)
    dims = range(mesh.ndim)
    volume = scatter_tensor(
        volume, 0, mesh, [Shard(2 + d) for d in dims], (1, 1, *shape), torch.float32
    )
    labels = scatter_tensor(
        labels, 0, mesh, [Shard(1 + d) for d in dims], (1, *shape), torch.int64
    )
    return volume, labels


def train_apart(args, volume, labels):
    """The ceiling: some steps of every rank on its piece as if it were alone,
    all at the same time. No messages, and wrong numbers."""
    shape = (dist.get_world_size(), 1)
    names = ("each", "alone")
    alone = init_device_mesh(volume.device.type, shape, mesh_dim_names=names)["alone"]
    pieces = [
        ShardTensor.from_local(x.to_local(), alone, [Shard(x.dim() - 3)])
        for x in (volume, labels)
    ]
    few = argparse.Namespace(**{**vars(args), "steps": min(3, args.steps)})
    dist.barrier()
    run = train(few, *pieces, lambda step, added: None)
    run.prediction = None
    return run


def gather(run, mesh):
    """Every rank's, on every rank."""
    runs = [None] * mesh.size()
    dist.all_gather_object(runs, run)
    return runs


def train_showing(args, volume, labels, title, show_progress):
    if not show_progress:
        return train(args, volume, labels, lambda step, added: None)
    with report.StepProgress(title, args.steps) as progress:
        return train(args, volume, labels, progress)


def borders(volume):
    """Where the shards of each dim meet."""
    return {
        dim: [sum(sizes[:i]) for i in range(1, len(sizes))]
        for dim, sizes in volume._spec.sizes().items()
    }


# ---- one process ------------------------------------------------------------


def compare(ranks):
    """The same training in a fresh process, with all the threads that the
    ranks had together."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run"
        subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--reference", str(file)],
            env=without_launcher(torch.get_num_threads() * ranks),
            check=True,
        )
        return pickle.loads(file.read_bytes())


def without_launcher(threads):
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in launcher}
    # Threads that wait must not spin: on a busy machine they slow each other.
    openmp = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {**kept, **openmp}


def reference(args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    volume, labels = (x.to(device) for x in brain.load(args.full))
    labels = brain.hold_out(labels)
    run = train_showing(args, volume, labels, "one process", True)
    run.prediction = None
    Path(args.reference).write_bytes(pickle.dumps(run))


# ---- what to show -----------------------------------------------------------


def say_what(mesh, volume):
    cuts = ", ".join(f"dim {d} as {s}" for d, s in volume._spec.sizes().items())
    report.console.print(
        f"volume {tuple(volume.shape)} over {mesh.size()} ranks: {cuts}"
    )


def show(args, runs: list[Run], pieces: list[Run], prediction, borders):
    single = None if args.no_compare else compare(len(runs))
    if single is not None:
        report.show_losses(runs[0], single)
    report.show_costs(runs, pieces, single)
    volume, labels = brain.load(args.full)
    unseen = brain.held_out_slices(labels.shape[-1])
    scores = dice_of_classes(prediction[..., unseen], labels[..., unseen])
    report.show_dice(scores)
    report.draw(args.picture, volume, labels, prediction, borders, scores)
    report.draw_curves(args.curves, runs, single)


def dice_of_classes(prediction, labels):
    certain = F.one_hot(prediction, len(brain.CLASSES)).movedim(-1, 1)
    return dice(certain, labels).tolist()


if __name__ == "__main__":
    main()
