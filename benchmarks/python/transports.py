"""Which way keys and values travel: is the one that the library chooses the fastest?"""

import itertools
import statistics

import torch
import torch.nn.functional as F
from report import Table
from timing import compare
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardTensor, comm_stats, reset_comm_stats

ROWS, HEADS, FEATURES = (512, 2048, 4096), (1, 3, 8), 64
LENGTHS = {"": (1, 1), ", 1/8 of the keys": (1, 8), ", 1/8 of the queries": (8, 1)}
TRANSPORTS = {"ring": "ring", "all-gather": "all_gather", "all-to-all": "all_to_all"}
GRID = {"grid": "grid"}  # on a mesh of two axes
ROUNDS = 5


def table(mesh):
    rows = {}
    for shape, count, heads, name in itertools.product(
        meshes(mesh), ROWS, HEADS, LENGTHS
    ):
        queries, keys = (count // part for part in LENGTHS[name])
        variants = ways(shape, heads, queries, keys)
        chosen = way_taken(variants)
        times = compare({k: variants[k] for k in variants if k != "auto"}, ROUNDS)
        what = f"{count} rows, {heads} heads{name}{name_of(shape)}"
        rows[what] = {"chosen": times[chosen], **times}
    good = [is_good(times) for times in rows.values()]
    note = (
        f"Forward and backward on {mesh.size()} ranks, rows cut evenly. The way "
        "chosen is the fastest or within 10% of it in "
        f"{sum(good)} of {len(good)} rows."
    )
    return Table("Transports of attention", "chosen", rows, note)


def meshes(mesh):
    """The ranks in a row, and in two where both have several."""
    yield mesh
    if mesh.size() > 2 and mesh.size() % 2 == 0:
        yield init_device_mesh(mesh.device_type, (2, mesh.size() // 2))


def name_of(mesh):
    return ", {} x {}".format(*mesh.shape) if mesh.ndim == 2 else ""


def is_good(times):
    middles = {name: statistics.median(times[name]) for name in times}
    return middles["chosen"] <= 1.1 * min(middles.values())


def way_taken(variants):
    """The first that looks like what is chosen."""
    chosen = look_of(variants["auto"])
    others = (way for way in variants if way != "auto")
    return next(way for way in others if look_of(variants[way]) == chosen)


def look_of(run):
    """What a profile names, and messages: whole heads need no meeting."""
    reset_comm_stats()
    with torch.profiler.profile() as profile:
        run()
    names = {event.key for event in profile.key_averages()}
    return sorted(x for x in names if "::attention_" in x), comm_stats().exchanges


def ways(mesh, heads, queries, keys):
    q, k, v = (rows(mesh, heads, count) for count in (queries, keys, keys))
    grad = torch.ones_like(F.scaled_dot_product_attention(q, k, v))

    def by(transport):
        def run():
            for x in (q, k, v):
                x.grad = None
            with shardtensor.attention_transport(transport):
                F.scaled_dot_product_attention(q, k, v).backward(grad)

        return run

    every = {"auto": "auto", **TRANSPORTS, **(GRID if mesh.ndim == 2 else {})}
    return {name: by(transport) for name, transport in every.items()}


def rows(mesh, heads, count):
    piece = torch.randn(1, heads, count // mesh.size(), FEATURES)
    cuts = [Shard(2)] * mesh.ndim
    return ShardTensor.from_local(piece, mesh, cuts).requires_grad_()
