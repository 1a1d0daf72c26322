"""The 16 nearest of a million points on the ranks, for each of them."""

import time

import torch
from report import Table
from timing import compare, on_rank_0

import shardtensor
from shardtensor import Shard, ShardTensor
from shardtensor.nn.functional import knn, partition_points

POINTS, NEIGHBOURS = 1_000_000, 16
ROUNDS = 3
ORDERED_ROUNDS = 9  # a few percent are looked for


def table(mesh):
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    cloud = torch.rand(POINTS, 3, generator=generator)
    rows = {
        "any order": compare(variants(mesh, cloud, "ring"), ROUNDS, calls=1),
        "partitioned": compare(
            variants(mesh, partitioned(mesh, cloud), "boxes"),
            ORDERED_ROUNDS,
            calls=1,
        ),
    }
    for threads, how in ((1, "one thread"), (mesh.size(), "all threads")):
        row = {n: on_rank_0(fn, threads) for n, fn in alone(cloud, threads).items()}
        rows[f"one rank, {how}"] = compare(row, ROUNDS, calls=1)
    waits = share_of_waiting(variants(mesh, cloud, "ring")["ring"])
    note = (
        "Ceiling: the same searches on each rank without communication: of its queries "
        "in all points, partitioned in its own piece alone, or on one rank knn of "
        f"plain tensors. Of a ring's time a rank waits {waits:.0%} for messages. "
        "cKDTree is SciPy's, with its tree and as many workers, where SciPy is "
        "installed."
    )
    title = f"{NEIGHBOURS} nearest of {POINTS} points, 3-D, float32"
    return Table(title, "ceiling", rows, note)


def partitioned(mesh, cloud):
    return partition_points(cloud, mesh)[0].full_tensor()


def variants(mesh, cloud, transport):
    own = cloud.chunk(mesh.size())[mesh.get_local_rank()]
    part = ShardTensor.from_local(own, mesh, [Shard(0)])
    searched = cloud if transport == "ring" else own

    def by(transport):
        def run():
            with shardtensor.point_transport(transport):
                knn(part, part, NEIGHBOURS)

        return run

    def ceiling():
        knn(searched, own, NEIGHBOURS)

    return {"ceiling": ceiling, **{name: by(name) for name in ("auto", transport)}}


def share_of_waiting(run):
    shardtensor.reset_comm_stats()
    begun = time.perf_counter()
    run()
    return shardtensor.comm_stats().seconds / (time.perf_counter() - begun)


def alone(cloud, threads):
    found = {"ceiling": lambda: knn(cloud, cloud, NEIGHBOURS)}
    try:
        from scipy.spatial import cKDTree
    except ImportError:
        return found
    x = cloud.cpu().numpy()

    def other():
        return cKDTree(x).query(x, NEIGHBOURS, workers=threads)

    return {**found, "cKDTree": other}
