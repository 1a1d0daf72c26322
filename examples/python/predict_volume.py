"""Predicts a volume that no device holds: read, predicted and written by piece.

    torchrun --nproc-per-node 2 predict_volume.py --depth 1024

Ranks share each slab of planes and exchange the rows at their cuts; slabs overlap in
the file by what the model looks beyond its voxel. The last lines say how much memory
a rank needed, and compare some planes with one device's prediction of the same file.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from memory import PeakMemory
from torch import nn
from torch.distributed.tensor import Shard

from shardtensor import io
from shardtensor.distributed import DistributedManager

REACH = 3  # voxels that the model looks at on each side: one for each convolution


def make_model():
    torch.manual_seed(0)
    layers = [nn.Conv3d(1, 4, 3, padding=1), nn.GELU()]
    layers += [nn.Conv3d(4, 4, 3, padding=1), nn.GELU(), nn.Conv3d(4, 1, 3, padding=1)]
    return nn.Sequential(*layers).eval()


def slabs(extent, planes):
    """(what is predicted, what is read for it), each (begin, end), of all planes."""
    for begin in range(0, extent, planes):
        end = min(begin + planes, extent)
        yield (begin, end), (max(0, begin - REACH), min(extent, end + REACH))


@torch.inference_mode()
def predict(model, source, target, mesh, planes):
    scan = io.open(source, "density", mesh=mesh)
    io.create(target, "prediction", scan.shape, scan.dtype, mesh, chunks=scan.chunks)
    for (begin, end), (first, last) in slabs(scan.shape[0], planes):
        x = scan.read(slice(first, last), mesh, [Shard(1)])
        y = model(x[None, None])[0, 0, begin - first : end - first]
        io.write(target, y, "prediction", index=slice(begin, end))


def write_scan(path, depth, extent, mesh):
    """A volume to start from, also plane by plane."""
    shape = (depth, extent, extent)
    io.create(path, "density", shape, torch.float32, mesh, chunks=(4, 64, 64))
    axis, depths = torch.linspace(-3, 3, extent), torch.linspace(-3, 3, depth)
    for begin in range(0, depth, 4):
        z = depths[begin : begin + 4, None, None]
        rows = io.open(path, "density", mesh=mesh).read(
            slice(begin, begin + 4), mesh, [Shard(1)]
        )
        y = axis[rows.offsets()[0] :][: rows.to_local().shape[1], None]
        rows.to_local().copy_(torch.sin(z * y) * torch.cos(axis * z) + y)
        io.write(path, rows, "density", index=slice(begin, begin + 4))


@torch.inference_mode()
def largest_error(model, source, target):
    """In the middle, where slabs meet."""
    scan, written = io.open(source, "density"), io.open(target, "prediction")
    middle = scan.shape[0] // 2
    x = scan[middle - 2 - REACH : middle + 2 + REACH]
    x = x.to(torch.get_default_device())
    expected = model(x[None, None])[0, 0, REACH:-REACH].cpu()
    return float((written[middle - 2 : middle + 2] - expected).abs().max())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--extent", type=int, default=128, help="of a plane's sides")
    parser.add_argument("--planes", type=int, default=8, help="predicted at once")
    args = parser.parse_args()
    DistributedManager.initialize()
    manager = DistributedManager()
    torch.set_default_device(manager.device)
    mesh = manager.initialize_mesh((-1,), ("domain",))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    source, target = (Path(folder[0]) / name for name in ("scan.zarr", "model.zarr"))
    model = make_model()
    write_scan(source, args.depth, args.extent, mesh)
    predict(model, source, target, mesh, args.planes)  # loads what takes memory once
    memory = PeakMemory(manager.device)
    predict(model, source, target, mesh, args.planes)
    peak = torch.tensor(float(memory.peak()))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if manager.rank == 0:
        volume = 4 * args.depth * args.extent**2
        print(f"volume: {volume / 2**20:.1f} MiB")
        print(f"a rank's peak: {peak / 2**20:.1f} MiB, {peak / volume:.2f} of it")
        print(f"differs from one device by {largest_error(model, source, target):.1e}")
    DistributedManager.cleanup(barrier=True)


if __name__ == "__main__":
    main()
