"""Trains a vision transformer that predicts next month's sea-surface temperature,
the oceans sharded over all ranks, and compares with one process. The last twelve
months are held out: errors and the picture are theirs.

    make demo-attention                        # 2 ranks: latitude is cut
    make demo-attention RANKS=4 MESH=2x2       # latitude and longitude
    make demo-attention ARGS="--window 5 13"   # neighbourhood attention
    make demo-attention LAUNCH="mpirun -n 2 .venv/bin/python"     # over MPI

or with any launcher: torchrun --nproc-per-node 2 train_ocean_vit.py. The model
(ocean_vit.py) does not know that its fields are sharded.
"""

import argparse

import ocean
import ocean_report
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
from ocean_vit import OceanViT
from torch.distributed.tensor import Shard

from shardtensor import scatter_tensor
from shardtensor.distributed import DistributedManager


def main():
    args = parse()
    if args.reference:
        reference(args, NextMonth(args, ocean.load().to(device_of_one_process())))
        return
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = make_mesh(manager, args.mesh)
    fields = load_sharded(args, mesh)
    first = manager.rank == 0
    if first:
        size = f"fields {tuple(fields.shape)} over {mesh.size()} ranks"
        report.console.print(f"{size}: {cuts(fields)}")
    run = train_showing(args, NextMonth(args, fields), f"{mesh.size()} ranks", first)
    prediction = run.prediction.full_tensor().cpu()
    run.prediction = None
    runs = gather(run, mesh)
    # Alone, a piece would attend to itself: less work, but for windows.
    pieces = gather(train_apart(args, NextMonth, fields), mesh) if args.window else []
    meet = borders(fields)
    DistributedManager.cleanup()
    if first:
        show(args, runs, pieces, prediction, meet)


def parse():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--mesh", help="ranks per cut dim, as in 2x2; default: latitude, all ranks")
    add("--steps", type=int, default=80)
    add("--batch", type=int, default=4, help="months per step")
    add("--width", type=int, default=96)
    add("--depth", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--patch", type=int, nargs=2, default=[2, 4], help="grid points per token")
    add("--window", type=int, nargs=2, help="tokens that a token attends to")
    add("--learning-rate", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--picture", default="out/ocean.png")
    add("--curves", default="out/ocean_training.png", help="losses and memory")
    add("--no-compare", action="store_true", help="skip the run on one process")
    add("--reference", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args()


def load_sharded(args, mesh):
    """Rank 0 reads the file; every rank receives its shard only. No patch is cut:
    any cut is right, but would send its part of every field to its patch."""
    fields = ocean.load() if dist.get_rank() == 0 else None
    dims = [2 + axis for axis in range(mesh.ndim)]
    sizes = {
        dim: whole_patches(ocean.SHAPE[dim], args.patch[dim - 2], mesh.size(axis))
        for axis, dim in enumerate(dims)
    }
    placements = [Shard(dim) for dim in dims]
    shape, dtype = ocean.SHAPE, torch.float32
    return scatter_tensor(fields, 0, mesh, placements, shape, dtype, sizes=sizes)


def whole_patches(extent, patch, ranks):
    counts = torch.arange(extent // patch).tensor_split(ranks)
    return [len(count) * patch for count in counts]


class NextMonth:
    """A job of training.py. Nothing here knows whether the fields are sharded."""

    def __init__(self, args, fields):
        self.args, self.fields, self.device = args, fields, fields.device
        self.months = ocean.MONTHS - ocean.UNSEEN

    def warm_up(self):
        """One step of a model of its own: what a process loads and opens with its
        first step is no part of training."""
        few = argparse.Namespace(**{**vars(self.args), "batch": 1, "depth": 1})
        first = NextMonth(few, self.fields)
        first.start()
        first.step(0)

    def start(self):
        torch.manual_seed(self.args.seed)
        a = self.args
        self.model = OceanViT(
            ocean.SHAPE[1], a.width, a.depth, a.heads, tuple(a.patch), self.window()
        ).to(self.device)
        self.order = torch.Generator().manual_seed(self.args.seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.05
        )
        return self.optimizer

    def window(self):
        """No wider than the grid, of which a piece alone has a part."""
        if self.args.window is None:
            return None
        grid = [n // p for n, p in zip(self.fields.shape[2:], self.args.patch)]
        return [min(w, n) for w, n in zip(self.args.window, grid)]

    def step(self, number):
        months = torch.randint(
            self.months - 1, (self.args.batch,), generator=self.order
        ).tolist()
        now = torch.cat([self.fields[m : m + 1] for m in months])
        then = torch.cat([self.fields[m + 1 : m + 2] for m in months])
        self.optimizer.zero_grad()
        loss = ocean.error(self.model(now), then)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def predict(self):
        """Each unseen month from the true month before."""
        before = range(self.months - 1, ocean.MONTHS - 1)
        return torch.cat([self.model(self.fields[m : m + 1]) for m in before])


def show(args, runs, pieces, prediction, borders):
    single = None if args.no_compare else in_one_process(len(runs))
    if single is not None:
        report.show_losses(runs[0], single)
    report.show_costs(runs, pieces, single)
    fields = ocean.load()
    ocean_report.show_errors(fields, prediction)
    ocean_report.draw(args.picture, fields, prediction, borders)
    report.draw_curves(args.curves, runs, single)


if __name__ == "__main__":
    main()
