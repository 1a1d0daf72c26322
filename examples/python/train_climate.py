"""Trains on a climate model's years, samples x domain: what a long job needs.

    make demo-climate

A network predicts the next year's surface temperature over North America from this
year's. The fields are converted to Zarr once and read by piece; the mesh is data x
domain. Two runs: one is left alone; in the other a node with two of four ranks is
killed, torchrun starts again with the two that are left, and training goes on from the
last checkpoint. Both curves of the loss are in out/climate.png.

Alone: torchrun --nproc-per-node 4 train_climate.py run
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardtensor
from shardtensor import Shard, checkpoint, io, parallelize
from shardtensor.distributed import DistributedManager

SAMPLES = 8  # in a step, of all ranks together
FIELD = "air_temperature"


class Net(nn.Sequential):
    """The change from one year to the next, seen from seven cells around."""

    def __init__(self, width=24):
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=2, dilation=2),
            nn.GELU(),
            nn.GroupNorm(4, width),
            nn.Conv2d(width, 1, 3, padding=1),
        )

    def forward(self, x):
        return x + super().forward(x)


# ---- one rank ---------------------------------------------------------------


def run(args):
    DistributedManager.initialize()
    manager = DistributedManager()
    torch.set_default_device(manager.device)
    domain = 2 if manager.world_size % 2 == 0 else 1
    mesh = manager.initialize_mesh((-1, domain), ("data", "domain"))
    loader, scale = data(args, mesh)
    torch.manual_seed(0)
    model = parallelize(Net(), mesh, "ddp")
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    state.update(step=0, losses=[])
    checkpoint.load(state, args.folder, missing_ok=True)
    say(f"{mesh.mesh.shape[0]} x {domain} ranks, from step {state['step']}")
    resumed = state["step"] > 0
    while state["step"] < args.steps:
        for batch in loader:
            loss = step(model, optimizer, batch, scale)
            state["losses"].append(mean_over_data(loss, mesh))
            state["step"] += 1
            if state["step"] % args.every == 0:
                checkpoint.save(state, args.folder, state["step"], keep=2)
            if state["step"] == args.die_at and not resumed:
                die(args)
            if state["step"] >= args.steps:
                break
    shardtensor.check_replicas(model, mesh)
    say(f"loss {state['losses'][0]:.4f} -> {state['losses'][-1]:.4f}")
    if manager.rank == 0:
        (args.folder / "losses.json").write_text(json.dumps(state["losses"]))
    DistributedManager.cleanup()


def data(args, mesh):
    """Pairs of a year and the next one, each rank its rows."""
    years = io.open(args.data, FIELD, mesh=mesh)
    scale = io.statistics(years, mesh)
    pairs = io.Dataset({"now": years, "next": (years, 1)}, mesh["domain"], [Shard(1)])
    size = SAMPLES // mesh.size(0)
    return io.DataLoader(pairs, size, mesh["data"], shuffle=True), scale


def step(model, optimizer, batch, scale):
    now, later = (
        ((batch[name] - scale.mean) / scale.std).float().unsqueeze(1)
        for name in ("now", "next")
    )
    loss = nn.functional.mse_loss(model(now), later)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def mean_over_data(loss, mesh):
    mean = loss.detach().full_tensor()
    dist.all_reduce(mean, group=mesh.get_group("data"))
    return float(mean) / mesh.size(0)


def die(args):
    """The launcher of the second node and a rank, which the other does not outlive."""
    if os.environ.get("GROUP_RANK") == "1" and os.environ["LOCAL_RANK"] == "0":
        print("a node dies", flush=True)
        for process in (os.getppid(), os.getpid()):
            os.kill(process, signal.SIGKILL)


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


# ---- the two runs -----------------------------------------------------------


def convert(target):
    """Once, by one process: NetCDF with a time's field in a chunk to Zarr."""
    import iris_sample_data
    import zarr

    folder = Path(iris_sample_data.__file__).parent / "sample_data"
    years = io.open(folder / "A1B_north_america.nc", FIELD)
    if not target.exists():
        made = zarr.open_group(target, mode="w").create_array(
            FIELD, shape=tuple(years.shape), dtype="f4", chunks=(1, 16, 49)
        )
        made[:] = years[...].numpy()


def launch(args, name, nodes, *more):
    """torchrun on `nodes` of two ranks each, here processes of this machine."""
    folder = args.out / name
    # Where the nodes meet outlives each of them.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    elastic = f"1:{nodes}" if more else str(nodes)
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", elastic, "--nproc-per-node", "2", "--max-restarts", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{store.port}"]
    command += ["--rdzv-id", name, "--local-addr", "localhost"]
    command += ["--rdzv-conf", "is_host=0,last_call_timeout=5,keep_alive_interval=1"]
    command += [__file__, "run", "--folder", str(folder), "--data", str(args.data)]
    command += ["--steps", str(args.steps), "--every", str(args.every), *more]
    environment = {**os.environ, "SHARDTENSOR_DISTRIBUTED_TIMEOUT": "20"}
    quiet = None if args.verbose else subprocess.DEVNULL
    started = [
        subprocess.Popen(command, env=environment, stderr=quiet) for _ in range(nodes)
    ]
    if started[0].wait() != 0:
        sys.exit(f"train_climate.py: the run {name!r} failed; --verbose shows why")
    for process in started[1:]:
        process.wait()
    return json.loads((folder / "losses.json").read_text())


def show(args, alone, killed):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.semilogy(alone, color="tab:gray", linewidth=4, label="left alone, 2 x 2 ranks")
    label = f"a node killed at step {args.die_at}, then 1 x 2 ranks"
    axes.semilogy(killed, color="tab:red", linewidth=1, label=label)
    axes.axvline(args.die_at, color="tab:red", linestyle=":")
    axes.set(xlabel="step", ylabel="mean square error", title="next year's temperature")
    axes.legend()
    figure.savefig(args.out / "climate.png", dpi=120, bbox_inches="tight")
    apart = max(abs(a - b) / a for a, b in zip(alone, killed, strict=True))
    print(f"{len(alone)} steps, the curves differ by at most {apart:.1e}")
    print(args.out / "climate.png")
    if apart > 1e-3:
        sys.exit("train_climate.py: the curves should be one")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["demo", "run"], nargs="?", default="demo")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=10, help="steps to a checkpoint")
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    args.data = args.data or args.out / "climate.zarr"
    if args.what == "run":
        args.folder = args.folder or args.out / "climate"
        run(args)
        return
    for name in ("alone", "killed"):
        shutil.rmtree(args.out / name, ignore_errors=True)
    args.out.mkdir(exist_ok=True)
    convert(args.data)
    args.die_at = args.die_at or args.steps // 2 + 5
    alone = launch(args, "alone", 2)
    show(args, alone, launch(args, "killed", 2, "--die-at", str(args.die_at)))


if __name__ == "__main__":
    main()
