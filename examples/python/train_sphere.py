"""Trains a spherical neural operator to advance the weather of a shallow-water Earth
by some hours, the globe sharded over all ranks, and compares with one process. The
truth is integrated here, too, by a spectral solver on the same shards.

    make demo-sphere                              # 2 ranks, latitudes cut
    make demo-sphere RANKS=4 MESH=2x2             # latitudes and longitudes

    large="--grid 721x1440 --channels 8 --samples 1 --hours 0.1 --steps 5"
    make demo-sphere ARGS="$large"

The large one takes some 7 minutes on two cores, and 17 GB in all at its peak. Any
launcher does: torchrun --nproc-per-node 2 train_sphere.py. The solver and the model
(shallow_water.py) do not know that the globe is sharded.
"""

import argparse
import contextlib
import fcntl
import inspect
import math
import os
import tempfile
import time
from pathlib import Path

import torch
from shallow_water import ShallowWater, SphericalOperator, sines, weather
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch_harmonics import legendre

from shardtensor import Replicate, Shard, cut_buffers, distribute_tensor, new_tensors_on
from shardtensor.distributed import DistributedManager


def main():
    args = parse()
    DistributedManager.initialize()
    manager = DistributedManager()
    torch.set_default_device(manager.device)
    mesh = make_mesh(manager, args.mesh)
    placements = [Shard(2 + axis) for axis in range(mesh.ndim)]
    start = weather(args.samples + 1, *args.grid, seed=args.seed)
    shards = distribute_tensor(start, mesh, placements)
    losses, seconds, *fields = run(args, shards, mesh)
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
    add("--hours", type=float, default=6.0)
    add("--step", type=float, help="of the solver, in seconds; default: waves allow it")
    add("--samples", type=int, default=4)
    add("--steps", type=int, default=100)
    add("--channels", type=int, default=16)
    add("--blocks", type=int, default=2)
    add("--learning-rate", type=float, default=5e-3)
    add("--seed", type=int, default=0)
    add("--picture", default="out/globe.png")
    add("--no-compare", action="store_true", help="skip the run on one process")
    args = parser.parse_args()
    args.step = args.step or min(600.0, 600.0 * 96 / args.grid[0])
    return args


def extents(text):
    latitudes, longitudes = (int(n) for n in text.split("x"))
    return latitudes, longitudes


def make_mesh(manager, text):
    shape = [int(n) for n in text.split("x")] if text else [-1]
    return manager.initialize_mesh(shape, ("latitude", "longitude")[: len(shape)])


# ---- the same for one process and for many ----------------------------------


def run(args, start, mesh=None):
    """Losses, seconds per step, and of the last sample, which nobody learns from,
    the truth and the prediction."""
    end = forecast(args, start, mesh)
    mean, scale = statistics(end)
    given, wanted = (((x - mean) / scale).float() for x in (start, end))
    torch.manual_seed(args.seed)
    with polynomials(mesh):
        model = SphericalOperator(*args.grid, args.channels, args.blocks).float()
    with new_tensors(mesh):
        losses, seconds = train(args, model, given[:-1], wanted[:-1])
        with torch.no_grad():
            return losses, seconds, wanted[-1:], model(given[-1:])


@torch.no_grad()
def forecast(args, start, mesh):
    """By a solver whose memory is free again afterwards."""
    with polynomials(mesh):
        solver = ShallowWater(*args.grid, args.step)
    with new_tensors(mesh):
        return solver(start, round(args.hours * 3600 / args.step))


def train(args, model, given, wanted):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    weight = area(args.grid[0])
    losses, begin = [], time.perf_counter()
    for _ in range(args.steps):
        optimizer.zero_grad()
        error = model(given) - wanted
        loss = (error.square() * weight).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, (time.perf_counter() - begin) / args.steps


def new_tensors(mesh):
    return contextlib.nullcontext() if mesh is None else new_tensors_on(mesh)


@contextlib.contextmanager
def polynomials(mesh):
    """Each rank keeps a part of the Legendre polynomials, orders x degrees x latitudes,
    of the transforms that are made within. Ranks along the mesh's second axis have
    other samples and the same polynomials.

    Computing them takes several times their memory: the ranks of a machine take turns.
    """
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            lock = f"train_sphere-{os.getuid()}.lock"
            turn = Path(tempfile.gettempdir(), lock).open("w")
            fcntl.flock(stack.enter_context(turn), fcntl.LOCK_EX)
            others = [Replicate()] * (mesh.ndim - 1)
            cut = {name: [Shard(dim), *others] for name, dim in CUT.items()}
            stack.enter_context(cut_buffers(cut, mesh))
        forget = register_module_buffer_registration_hook(forget_polynomials)
        stack.callback(forget.remove)
        yield


# By order; a vector's, which each row meets in four sums, by latitude: no step sends
# more than with whole polynomials then.
CUT = {
    "RealSHT.weights": -3,
    "InverseRealSHT.pct": -3,
    "RealVectorSHT.weights": -1,
    "InverseRealVectorSHT.dpct": -3,
}


def forget_polynomials(*_):
    """torch-harmonics' caches hold them by tensors that nobody asks with again."""
    for cached in (legendre._precompute_legpoly, legendre._precompute_dlegpoly):
        inspect.getclosurevars(cached).nonlocals["cached_func"].cache_clear()


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
        torch.set_default_device("cpu")
        draw(args.picture, *(field.cpu() for field in fields))


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
