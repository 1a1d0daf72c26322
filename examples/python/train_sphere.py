"""Trains a spherical neural operator to advance the weather of a shallow-water Earth
by some hours, the globe sharded over all ranks, and compares with one process. The
truth is integrated here, too, by a spectral solver on the same shards.

    make demo-sphere                              # 2 ranks, latitudes cut
    make demo-sphere RANKS=4 MESH=2x2             # latitudes and longitudes
    make demo-sphere ARGS="--grid 721x1440 --channels 8"

or with any launcher: torchrun --nproc-per-node 2 train_sphere.py. The solver and the
model (shallow_water.py) do not know that the globe is sharded.
"""

import argparse
import contextlib
import math
import time
from pathlib import Path

import torch
from shallow_water import ShallowWater, SphericalOperator, sines, weather

import shardtensor
from shardtensor import Shard, distribute_tensor
from shardtensor.distributed import DistributedManager


def main():
    args = parse()
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = make_mesh(manager, args.mesh)
    placements = [Shard(2 + axis) for axis in range(mesh.ndim)]
    start = weather(args.samples + 1, *args.grid, seed=args.seed)
    shards = distribute_tensor(start, mesh, placements)
    with shardtensor.new_tensors_on(mesh):
        losses, seconds, *fields = run(args, shards)
    fields = [field.full_tensor() for field in fields]
    ranks = mesh.size()
    if manager.rank == 0:
        print(f"{ranks} ranks, {placements}: {seconds:.2f} s per step")
    DistributedManager.cleanup()
    if manager.rank == 0:
        show(args, start, losses, fields)


def parse():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--mesh", help="ranks per cut dim, as in 2x2; default: latitudes, all ranks")
    add("--grid", type=extents, default=(48, 96), help="latitudes x longitudes")
    add("--hours", type=int, default=6)
    add("--step", type=float, default=600.0, help="of the solver, in seconds")
    add("--samples", type=int, default=4)
    add("--steps", type=int, default=100)
    add("--channels", type=int, default=16)
    add("--blocks", type=int, default=2)
    add("--learning-rate", type=float, default=5e-3)
    add("--seed", type=int, default=0)
    add("--picture", default="out/globe.png")
    add("--no-compare", action="store_true", help="skip the run on one process")
    return parser.parse_args()


def extents(text):
    latitudes, longitudes = (int(n) for n in text.split("x"))
    return latitudes, longitudes


def make_mesh(manager, text):
    shape = [int(n) for n in text.split("x")] if text else [-1]
    return manager.initialize_mesh(shape, ("latitude", "longitude")[: len(shape)])


# ---- the same for one process and for many ----------------------------------


def run(args, start):
    """Losses, seconds per step, and of the last sample, which nobody learns from,
    the truth and the prediction."""
    solver = ShallowWater(*args.grid, args.step)
    with torch.no_grad():
        end = solver(start, round(args.hours * 3600 / args.step))
    mean, scale = statistics(end)
    given, wanted = (((x - mean) / scale).float() for x in (start, end))
    torch.manual_seed(args.seed)
    model = SphericalOperator(*args.grid, args.channels, args.blocks)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    weight = area(args.grid[0])
    losses, begin = [], time.perf_counter()
    for _ in range(args.steps):
        optimizer.zero_grad()
        error = model(given[:-1]) - wanted[:-1]
        loss = (error.square() * weight).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = (time.perf_counter() - begin) / args.steps
    with torch.no_grad():
        return losses, seconds, wanted[-1:], model(given[-1:])


def statistics(fields):
    dims = (0, 2, 3)
    return fields.mean(dims, keepdim=True), fields.std(dims, keepdim=True)


def area(latitudes):
    """Of a cell, compared with the mean."""
    cosines = (1 - sines(latitudes).square()).sqrt()[:, None]
    return (cosines / cosines.mean()).float()


# ---- what to show -----------------------------------------------------------


def show(args, start, losses, fields):
    print("step       loss")
    for step, loss in enumerate(losses):
        print(f"{step:4d}   {loss:.6f}")
    if not args.no_compare:
        single, seconds, *_ = run(args, start)
        apart = max(abs(a - b) / b for a, b in zip(losses, single, strict=True))
        print(f"one process: {seconds:.2f} s per step")
        print(f"largest difference of the losses: {apart:.1e}")
    # Without matplotlib there is no picture.
    with contextlib.suppress(ImportError):
        draw(args.picture, *fields)


def draw(path, truth, prediction):
    """The vorticity of both, and what lies between, seen from space."""
    from matplotlib import pyplot

    views = {"truth": truth, "prediction": prediction, "error": prediction - truth}
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4.4))
    limit = truth[0, 1].abs().max().item()
    for axis, (title, field) in zip(axes, views.items(), strict=True):
        globe = seen_from_space(field[0, 1])
        axis.imshow(globe, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.set_title(title)
        axis.axis("off")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def seen_from_space(field, pixels=400, tilt=math.pi / 6):
    """An orthographic view of (latitudes, longitudes); NaN beside the globe."""
    y, x = torch.meshgrid(
        torch.linspace(1, -1, pixels), torch.linspace(-1, 1, pixels), indexing="ij"
    )
    z = (1 - x.square() - y.square()).sqrt()  # towards the eye
    north = y * math.cos(tilt) + z * math.sin(tilt)
    near = z * math.cos(tilt) - y * math.sin(tilt)
    rows, columns = field.shape
    colatitude = torch.acos(north.clamp(-1, 1)) / math.pi
    longitude = torch.atan2(x, near) / (2 * math.pi) % 1
    i = (colatitude.nan_to_num() * rows).long().clamp(max=rows - 1)
    j = (longitude.nan_to_num() * columns).long().clamp(max=columns - 1)
    return torch.where(z.isnan(), torch.nan, field[i, j])


if __name__ == "__main__":
    main()
