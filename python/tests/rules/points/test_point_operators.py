"""torch.ops.shardtensor's functions of points, as other bindings call them."""

import torch
from layouts import placements_of
from ranks import assert_close, ranks, shard

import shardtensor
import shardtensor.nn.functional as F

ops = torch.ops.shardtensor
BOX = ([0.0] * 3, [1.0] * 3)
FACES = torch.tensor([[0, 1, 2], [0, 3, 1], [2, 1, 3]])

# By the operator's own names of arguments, those with a default left out.
CALLS = {
    "knn": lambda f, p, v, q: f(points=p, queries=q, k=3),
    "radius_search": lambda f, p, v, q: f(points=p, queries=q, radius=0.6),
    "ball_query": lambda f, p, v, q: f(points=p, queries=q, radius=0.6, max_points=4),
    "farthest_point_sampling": lambda f, p, v, q: f(points=p, count=6),
    "interpolate_neighbors": lambda f, p, v, q: f(points=p, values=v, queries=q),
    "grid_subsample": lambda f, p, v, q: f(points=p, size=0.4, values=v)[:4],
    "voxelize": lambda f, p, v, q: f(
        points=p, values=v, low=BOX[0], high=BOX[1], shape=[3, 2, 4]
    ),
    "devoxelize": lambda f, p, v, q: f(
        voxels=F.voxelize(p, v, *BOX, [3, 2, 4]), points=q, low=BOX[0], high=BOX[1]
    ),
    "signed_distance_field": lambda f, p, v, q: f(
        mesh_vertices=p[:4], mesh_indices=FACES, input_points=q
    ),
}


def results(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)


@ranks(3, "2x2")
def test_operators_are_the_functions(mesh):
    """On plain tensors and on cut ones."""
    plain = [torch.rand(n, c) for n, c in ((13, 3), (13, 2), (5, 3))]
    cut = [shard(x, mesh, placements_of(mesh, 0)) for x in plain]
    for name, call in CALLS.items():
        expected = results(call(getattr(F, name), *plain))
        with shardtensor.fallback_mode("error"):
            for given in (plain, cut):
                found = results(call(getattr(ops, name), *given))
                assert len(found) == len(expected), name
                for a, b in zip(found, expected):
                    assert_close(a, b)
