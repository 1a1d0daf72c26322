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
    " The even cut goes through a row of chunks, which both ranks decode, whoever "
    "reads: five rows of chunks together where the cut at chunks has four, three on "
    'the slower rank where that has two. With sizes="chunks" each is decoded once. A '
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
        " Ceiling: both ranks read the same rows of the store with zarr, or write and "
        "read half of the bytes with NumPy, as safely as a checkpoint: beside, "
        "flushed, renamed."
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
    rows, shares = {}, []
    for name, sizes in (("cut evenly", None), ("cut at chunks", "chunks")):
        variants = readers(mesh, array, folder / "a.zarr", sizes)
        bytes_read = {how: bytes_of(fn) / 1e6 for how, fn in variants.items()}
        shares.append(
            f"{name} {bytes_read['read']:.0f} MB (ceiling {bytes_read['ceiling']:.0f})"
        )
        rows[f"read a store, {name}"] = compare(variants, ROUNDS, calls=1)
    note = f"Bytes that a rank reads, the larger of both: {', '.join(shares)}."
    return rows, note + (TWICE if mesh.size() == 2 else "")


def readers(mesh, array, path, sizes):
    """Of this rank's rows, by a library that knows one reader, and by ours."""
    own = slice(*array.read(0, mesh, [Shard(0)], sizes=sizes)._spec.interval(0))
    return {
        "ceiling": lambda: zarr.open(path, mode="r")[:, own],
        "read": lambda: array.read(..., mesh, [Shard(1)], sizes=sizes),
    }


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
    own = folder / f"{dist.get_rank()}.npy"

    def numpy_save():
        begun = own.with_suffix(".writing")
        with open(begun, "wb") as file:
            np.save(file, piece.cpu().numpy())
            os.fsync(file.fileno())
        begun.replace(own)

    saved = {
        "ceiling": numpy_save,
        "checkpoint": lambda: checkpoint.save(state, folder, 1),
    }
    loaded = {
        "ceiling": lambda: piece.copy_(torch.from_numpy(np.load(own))),
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
