"""Files: a chunked store read by piece, a checkpoint of 1 GB, beside NumPy."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import zarr
from report import Table
from timing import compare, slowest_rank

import shardtensor
from shardtensor import Shard, ShardTensor, checkpoint

ROUNDS = 3
STORE = (64, 721, 1440)  # 266 MB of float32
CHUNKS = (1, 181, 1440)
SAVED = (16, 4096, 4096)  # 1 GB
# 721 rows cut in two at 361, where chunks end at 362.
TWICE = (
    " The even cut of a read goes through a row of chunks, which both ranks decode: "
    "five rows of chunks together where the ceiling has four, three on the slower rank "
    "where it has two. So it takes 1.25 of the ceiling where the ranks share the cores "
    "and up to 1.5 where each has its own; both together spend 1.24 of the CPU time of "
    'a read at chunks. With sizes="chunks" each chunk is decoded once. A '
    "redistribution to even pieces after that costs what it saves: a piece is copied "
    "to take the row that comes."
)


def table(mesh):
    told = [tempfile.mkdtemp(dir=os.environ.get("BENCH_FOLDER"))]
    dist.broadcast_object_list(told, 0)
    folder = Path(told[0])
    try:
        rows, note = reading(mesh, folder)
        rows |= saving(mesh, folder)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    note += (
        " Ceiling: both ranks read half of the store with zarr, or write and read half "
        "of the bytes with NumPy, as safely as a checkpoint: beside, flushed, renamed."
    )
    return Table("Files: 266 MB of Zarr, a checkpoint of 1 GB", "ceiling", rows, note)


def reading(mesh, folder):
    if dist.get_rank() == 0:
        made = zarr.create_array(
            folder / "a.zarr", shape=STORE, chunks=CHUNKS, dtype="f4"
        )
        made[:] = np.random.default_rng(0).random(STORE, dtype="f4")
    dist.barrier()
    array = shardtensor.io.open(folder / "a.zarr", mesh=mesh)
    half = slice(0, 362) if mesh.get_local_rank() == 0 else slice(362, 724)
    variants = {
        "ceiling": lambda: zarr.open(folder / "a.zarr", mode="r")[:, half],
        "read": lambda: array.read(..., mesh, [Shard(1)]),
        "at chunks": lambda: array.read(..., mesh, [Shard(1)], sizes="chunks"),
    }
    shares = [f"{name} {bytes_of(fn) / 1e6:.0f} MB" for name, fn in variants.items()]
    note = f"Bytes that a rank reads, the larger of both: {', '.join(shares)}."
    note += TWICE if mesh.size() == 2 else ""
    return {"read a store": compare(variants, ROUNDS, calls=1)}, note


def bytes_of(fn):
    """What the system has given to the process that got most."""
    before = given()
    fn()
    return int(slowest_rank([given() - before])[0])


def given():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def saving(mesh, folder):
    piece = torch.rand(SAVED[0] // mesh.size(), *SAVED[1:])
    state = {"x": ShardTensor.from_local(piece, mesh, [Shard(0)])}
    own, numbers = folder / f"{dist.get_rank()}.npy", piece.numpy()

    def numpy_save():
        begun = own.with_suffix(".writing")
        with open(begun, "wb") as file:
            np.save(file, numbers)
            os.fsync(file.fileno())
        begun.replace(own)

    saved = {
        "ceiling": numpy_save,
        "checkpoint": lambda: checkpoint.save(state, folder, 1),
    }
    loaded = {
        "ceiling": lambda: numbers.__setitem__(..., np.load(own)),
        "checkpoint": lambda: checkpoint.load(state, folder),
    }
    cold = {name: from_disk(fn, folder) for name, fn in loaded.items()}
    return {
        "save": compare(saved, ROUNDS, calls=1),
        "load": compare(cold, ROUNDS, calls=1),
        "load what the system has in memory": compare(loaded, ROUNDS, calls=1),
    }


def from_disk(fn, folder):
    """fn where the system has forgotten what is in the files."""

    def run():
        for path in (*folder.rglob("*.distcp"), *folder.glob("*.npy")):
            forget(path)
        dist.barrier()
        fn()

    return run


def forget(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
