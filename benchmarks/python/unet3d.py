"""A training step of the demo's 3-D UNet."""

import runpy
from pathlib import Path

import torch
from report import Table
from steps import mesh_of_one
from timing import compare, median_ratio, on_rank_0
from torch.distributed.tensor import Shard
from unet import check_gradients, count, piece_of

from shardtensor import ShardTensor

DEMO = Path(__file__).resolve().parents[2] / "examples" / "python"
UNet = runpy.run_path(str(DEMO / "unet.py"))["UNet"]
EXTENTS = (78, 96, 80)
ROUNDS = 5
ONE_PROCESS = "one process, all threads"


def table(mesh):
    torch.manual_seed(0)
    volume = torch.randn(1, 1, *EXTENTS)
    steps = variants(volume, mesh)
    check_gradients(steps, steps[ONE_PROCESS]())
    times = compare(steps, ROUNDS)
    title = f"3-D UNet training step, {' x '.join(map(str, EXTENTS))}"
    note = f"{count(steps['ShardTensor'])} {of_one_process(times)}"
    return Table(title, "no communication", {"step": times}, note)


def variants(volume, mesh):
    """Functions that run one step and return the model."""
    piece = piece_of(volume, mesh)
    return {
        "ShardTensor": step(ShardTensor.from_local(piece, mesh, (Shard(2),))),
        # With the library's kernels: PyTorch's own take three times as long.
        "no communication": step(
            ShardTensor.from_local(piece, mesh_of_one(), (Shard(2),))
        ),
        ONE_PROCESS: on_rank_0(step(volume), mesh.size()),
    }


def step(x):
    torch.manual_seed(0)
    model = UNet()

    def run():
        model.zero_grad()
        model(x).square().mean().backward()
        return model

    return run


def of_one_process(times):
    share = median_ratio(times, "ShardTensor", ONE_PROCESS)
    return f"A step takes {share:.0%} of one process with the same cores."
