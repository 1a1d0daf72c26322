"""Which way keys and values travel: is the one that the library chooses the fastest?"""

import itertools
import statistics

import torch
import torch.nn.functional as F
from report import Table
from timing import compare
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardTensor

ROWS, HEADS, FEATURES = (512, 2048, 4096), (1, 3, 8), 64
LENGTHS = {"": (1, 1), ", 1/8 of the keys": (1, 8), ", 1/8 of the queries": (8, 1)}
TRANSPORTS = {"ring": "ring", "all-gather": "all_gather", "all-to-all": "all_to_all"}
ROUNDS = 5


def table(mesh):
    rows = {}
    for count, heads, name in itertools.product(ROWS, HEADS, LENGTHS):
        queries, keys = (count // part for part in LENGTHS[name])
        variants = ways(mesh, heads, queries, keys)
        chosen = way_taken(variants.pop("auto"))
        times = compare(variants, ROUNDS)
        what = f"{count} rows, {heads} heads{name}"
        rows[what] = {"chosen": times[chosen], **times}
    good = [is_good(times) for times in rows.values()]
    note = (
        f"Forward and backward on {mesh.size()} ranks, rows cut evenly. The way "
        "chosen is the fastest or within 10% of it in "
        f"{sum(good)} of {len(good)} rows."
    )
    return Table("Transports of attention", "chosen", rows, note)


def is_good(times):
    middles = {name: statistics.median(times[name]) for name in times}
    return middles["chosen"] <= 1.1 * min(middles.values())


def way_taken(run):
    """As a profile of the call names it: whole heads need no meeting."""
    with torch.profiler.profile() as profile:
        run()
    names = {event.key for event in profile.key_averages()}
    for way in ("ring", "all-gather"):
        if f"shardtensor::attention_{TRANSPORTS[way]}" in names:
            return way
    return "all-to-all"


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

    every = {"auto": "auto", **TRANSPORTS}
    return {name: by(transport) for name, transport in every.items()}


def rows(mesh, heads, count):
    piece = torch.randn(1, heads, count // mesh.size(), FEATURES)
    return ShardTensor.from_local(piece, mesh, [Shard(2)]).requires_grad_()
