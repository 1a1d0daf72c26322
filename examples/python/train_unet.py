"""Trains a 3-D UNet that finds grey and white matter in a brain volume, the
volume sharded over all ranks, and compares with one process. The labels of
some slices are held out: the picture and the Dice are those of these slices.

    make demo                                 # 2 ranks
    make demo RANKS=4 MESH=2x2                # a 2-D mesh: two dims are cut
    make demo LAUNCH="mpirun -n 2 .venv/bin/python"           # over MPI
    make demo ARGS="--norm batch --up transpose --down pool"
    make demo ARGS="--mm 1 --steps 3"         # all 197 x 233 x 189 voxels

or with any launcher: torchrun --nproc-per-node 2 train_unet.py. The model
(unet.py) and the training (segmentation.py) do not know that the volume is sharded.
"""

import argparse

import brain
import brain_report
import report
import torch
import torch.distributed as dist
from compare import (
    borders,
    cuts,
    device_of_one_process,
    gather,
    in_one_process,
    make_mesh,
    reference,
    train_apart,
    train_showing,
)
from segmentation import Segmentation
from torch.distributed.tensor import Shard

from shardtensor import scatter_tensor
from shardtensor.distributed import DistributedManager


def main():
    args = parse()
    if args.reference:
        reference(args, Segmentation(args, *load_whole(args)))
        return
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = make_mesh(manager, args.mesh)
    volume, labels = load_sharded(args, mesh)
    first = manager.rank == 0
    if first:
        size = f"volume {tuple(volume.shape)} over {mesh.size()} ranks"
        report.console.print(f"{size}: {cuts(volume)}")
    job = Segmentation(args, volume, labels)
    run = train_showing(args, job, f"{mesh.size()} ranks", first)
    prediction = run.prediction.full_tensor().cpu()
    run.prediction = job = None
    runs = gather(run, mesh)
    pieces = gather(train_apart(args, Segmentation, volume, labels), mesh)
    meet = borders(volume)
    DistributedManager.cleanup()
    if first:
        show(args, runs, pieces, prediction, meet)


def parse():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--mesh", help="ranks per cut dim, as in 2x2; default: one dim, all ranks")
    add("--mm", type=int, default=2, help="size of a voxel; 1: the whole volume")
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


def load_whole(args):
    volume, labels = (x.to(device_of_one_process()) for x in brain.load(args.mm))
    return volume, brain.hold_out(labels)


def load_sharded(args, mesh):
    """Rank 0 reads the file; every rank receives its shard only."""
    volume = labels = None
    if dist.get_rank() == 0:
        volume, labels = brain.load(args.mm)
        labels = brain.hold_out(labels)
    shape = brain.shape(args.mm)
    dims = range(mesh.ndim)
    volume = scatter_tensor(
        volume, 0, mesh, [Shard(2 + d) for d in dims], (1, 1, *shape), torch.float32
    )
    labels = scatter_tensor(
        labels, 0, mesh, [Shard(1 + d) for d in dims], (1, *shape), torch.int64
    )
    return volume, labels


def show(args, runs, pieces, prediction, borders):
    single = None if args.no_compare else in_one_process(len(runs))
    if single is not None:
        report.show_losses(runs[0], single)
    report.show_costs(runs, pieces, single)
    volume, labels = brain.load(args.mm)
    scores = brain_report.dice_of_classes(prediction, labels)
    brain_report.show_scores(scores)
    brain_report.draw(args.picture, volume, labels, prediction, borders, scores)
    report.draw_curves(args.curves, runs, single)


if __name__ == "__main__":
    main()
