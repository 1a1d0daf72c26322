"""Nearest neighbours as PhysicsNeMo's page teaches them: a function of the user's
own, and a handler for it that passes the points around a ring."""

import pytest
import torch
from ranks import ranks
from torch.distributed.tensor.placement_types import Shard
from torch.overrides import handle_torch_function, has_torch_function

from shardtensor import ShardTensor, scatter_tensor
from shardtensor.distributed import DistributedManager
from shardtensor.ring import RingPassingConfig, perform_ring_iteration


def knn(x, y, k):
    """The k points of y nearest to each point of x, and how far they are. A
    function of the user's own, which handlers may serve."""
    if has_torch_function((x, y)):
        return handle_torch_function(knn, (x, y), x, y, k)
    distances = torch.cdist(x, y)
    nearest, indices = torch.topk(distances, k, dim=1, largest=False)
    return y[indices], nearest


def knn_ring(func, types, args, kwargs):
    """Queries stay; the points come by, one rank's after another's."""

    def extract_args(x, y, k, *args, **kwargs):
        return x, y, k

    x, y, k = extract_args(*args, **kwargs)
    mesh = x._spec.mesh
    ranks_of_mesh = mesh.size(0)
    config = RingPassingConfig(
        mesh_dim=0,
        mesh_size=ranks_of_mesh,
        ring_direction="forward",
        communication_method="p2p",
    )
    local_x, local_y = x.to_local(), y.to_local()
    mesh_rank = mesh.get_local_rank()
    points, distances = None, None
    for i in range(ranks_of_mesh):
        source = (mesh_rank - i) % ranks_of_mesh
        if i < ranks_of_mesh - 1:
            recv_shape = y._spec.sharding_shapes()[0][(source - 1) % ranks_of_mesh]
            next_y = perform_ring_iteration(
                local_y, mesh, config, recv_shape=recv_shape
            )
        here, near = func(local_x, local_y, k)
        if points is None:
            points, distances = here, near
        else:
            both = torch.cat([distances, near], dim=1)
            distances, order = torch.topk(both, k, dim=1, largest=False)
            candidates = torch.cat([points, here], dim=1)
            rows = torch.arange(order.shape[0], device=order.device)[:, None]
            points = candidates[rows, order]
        if i < ranks_of_mesh - 1:
            local_y = next_y
    shapes = x._spec.sharding_shapes()
    # The shapes of the queries, which have fewer dims, say how dim 0 is cut.
    result = ShardTensor.from_local(
        points,
        device_mesh=mesh,
        placements=x._spec.placements,
        sharding_shapes=shapes,
    )
    far = ShardTensor.from_local(distances, mesh, x._spec.placements, shapes)
    return result, far


@ranks(1, 2, 3)
@pytest.mark.parametrize("even", [True, False])
def test_nearest_neighbours_by_a_function_handler_with_a_ring(mesh, even):
    ShardTensor.register_function_handler(knn, knn_ring)
    try:
        DistributedManager.initialize()
        dm = DistributedManager()
        mesh = dm.initialize_mesh(mesh_shape=[-1], mesh_dim_names=["points"])
        torch.manual_seed(2)
        queries = torch.randn(12, 3, device=dm.device)
        points = torch.randn(31, 3, device=dm.device)
        expected = knn(queries, points, 4)

        x = scatter_tensor(queries, 0, mesh, (Shard(0),))
        y = scatter_tensor(points, 0, mesh, (Shard(0),))
        if not even:
            sizes = [31 - 5 * (dm.world_size - 1)] + [5] * (dm.world_size - 1)
            y = ShardTensor.from_local(points.split(sizes)[dm.rank], mesh, (Shard(0),))
        nearest, distances = knn(x, y, 4)
        assert torch.allclose(nearest.full_tensor(), expected[0])
        assert torch.allclose(distances.full_tensor(), expected[1])
    finally:
        ShardTensor.unregister_function_handler(knn)
