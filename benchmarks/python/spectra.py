"""Fourier and spherical transforms of domains whose rows are cut, and an FNO.

spectra.py FOLDER    writes the spherical transforms into it
"""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from report import Table
from timing import compare, give_back_memory

import shardtensor
from shardtensor import Shard, ShardTensor

SAMPLES, HEIGHT, WIDTH = 8, 2048, 4096
LATITUDES, LONGITUDES, LEVELS = 721, 1440, 16
PIXELS, CHANNELS, MODES = 512, 32, 16
ROUNDS = 3


def table(mesh):
    rows = {
        f"rfft2 + irfft2 of ({SAMPLES}, {HEIGHT}, {WIDTH}), forward and backward": (
            planes
        ),
        "rfft + irfft along its uncut dim": lines,
        f"SHT round trip, {LATITUDES} x {LONGITUDES}, {LEVELS} channels": sphere,
        f"FNO step, {PIXELS} x {PIXELS}, {CHANNELS} channels, {MODES} modes": fno,
    }
    note = (
        "Ceiling: each rank's share of the transforms without communication. By hand: "
        "with one all-to-all each way, packed and unpacked by torch."
    )
    # One after the other: they need a few GB each.
    rows = {name: compare(make(mesh), ROUNDS, calls=1) for name, make in rows.items()}
    return Table("Spectra, rows cut evenly, float32", "ceiling", rows, note)


def forward_and_backward(transform, x):
    grad = torch.ones_like(transform(x))

    def run():
        x.grad = None
        transform(x).backward(grad)

    return run


def cut(mesh, local, dim):
    return ShardTensor.from_local(local, mesh, [Shard(dim)]).requires_grad_()


def planes(mesh):
    ranks = mesh.size()
    x = torch.randn(SAMPLES, HEIGHT // ranks, WIDTH)
    columns = WIDTH // 2 // ranks

    def alone(x):
        half = torch.fft.rfft(x)[..., :-1].reshape(SAMPLES, HEIGHT, columns)
        half = torch.fft.ifft(torch.fft.fft(half, dim=1), dim=1)
        return torch.fft.irfft(half.reshape(SAMPLES, HEIGHT // ranks, -1), n=WIDTH)

    def by_hand(x):
        half = Transpose.apply(torch.fft.rfft(x)[..., :-1], 1, 2)
        half = torch.fft.ifft(torch.fft.fft(half, dim=1), dim=1)
        return torch.fft.irfft(Transpose.apply(half, 2, 1), n=WIDTH)

    def sharded(x):
        return torch.fft.irfft2(torch.fft.rfft2(x))

    return {
        "ceiling": forward_and_backward(alone, x.clone().requires_grad_()),
        "all-to-all by hand": forward_and_backward(by_hand, x.clone().requires_grad_()),
        "ShardTensor": forward_and_backward(sharded, cut(mesh, x, 1)),
    }


class Transpose(torch.autograd.Function):
    """Pieces of dim `there` become pieces of dim `here`, all alike."""

    @staticmethod
    def forward(ctx, x, here, there):
        ctx.dims = here, there
        parts = [p.contiguous() for p in x.chunk(dist.get_world_size(), there)]
        sent = torch.view_as_real(torch.stack(parts))
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        return torch.cat(torch.view_as_complex(came).unbind(), here)

    @staticmethod
    def backward(ctx, grad):
        here, there = ctx.dims
        return Transpose.apply(grad, there, here), None, None


def lines(mesh):
    x = torch.randn(SAMPLES, HEIGHT // mesh.size(), WIDTH)

    def round_trip(x):
        return torch.fft.irfft(torch.fft.rfft(x))

    return {
        "ceiling": forward_and_backward(round_trip, x.clone().requires_grad_()),
        "ShardTensor": forward_and_backward(round_trip, cut(mesh, x, 1)),
    }


def sphere(mesh):
    there, back = transforms()
    share = torch.randn(1, LEVELS // mesh.size(), LATITUDES, LONGITUDES)
    whole = torch.randn(1, LEVELS, LATITUDES, LONGITUDES)
    local = whole.chunk(mesh.size(), 2)[mesh.get_local_rank()].contiguous()
    x = cut(mesh, local, 2)

    def sharded(x):
        with shardtensor.new_tensors_on(mesh):
            return back(there(x))

    return {
        "ceiling": forward_and_backward(
            lambda x: back(there(x)), share.requires_grad_()
        ),
        "ShardTensor": forward_and_backward(sharded, x),
    }


def transforms():
    """torch-harmonics' there and back in float32, whose polynomials, 1.5 GB each, the
    ranks share. Computing them takes 13 GB, in a process that gives these back."""
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        give_back_memory()
        dist.broadcast_object_list(names)
        if dist.get_rank() == 0:
            subprocess.run([sys.executable, __file__, folder], check=True)
        dist.barrier()
        load = partial(torch.load, weights_only=False, mmap=True)
        found = [load(Path(names[0], name)) for name in ("there", "back")]
        if torch.get_default_device().type != "cpu":  # of which mmap keeps one copy
            found = [transform.to(torch.get_default_device()) for transform in found]
        dist.barrier()
    return found


def save_transforms(folder):
    from torch_harmonics import InverseRealSHT, RealSHT

    for name, transform in (("there", RealSHT), ("back", InverseRealSHT)):
        torch.save(transform(LATITUDES, LONGITUDES).float(), Path(folder, name))


def fno(mesh):
    from neuralop.models import FNO

    model = FNO((MODES, MODES), 3, 1, hidden_channels=CHANNELS, n_layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(x):
        def run():
            optimizer.zero_grad()
            with shardtensor.new_tensors_on(mesh):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()

        return run

    def alone(x):
        def run():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return run

    local = torch.randn(1, 3, PIXELS // mesh.size(), PIXELS)
    x = ShardTensor.from_local(local, mesh, [Shard(2)])
    return {"ceiling": alone(local), "ShardTensor": step(x)}


if __name__ == "__main__":
    save_transforms(sys.argv[1])
