"""PyTorch's functional collectives on ShardTensors, beside the domain."""

import pytest
import torch
import torch.distributed._functional_collectives as functional
from layouts import sweep
from ranks import assert_close, ranks, shard, uneven
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor

# Older PyTorchs have other names for them.
gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)


def change_dim(x, group, gathered, cut):
    """What DTensor calls on a device, from Shard(gathered) to Shard(cut)."""
    mesh, axis = group if isinstance(group, tuple) else (group, 0)
    name = mesh.get_group(axis).group_name
    return torch.ops._dtensor.shard_dim_alltoall(x, gathered, cut, name)


COLLECTIVES = {
    "all_reduce": lambda x, group: functional.all_reduce(x, "sum", group),
    "maximum": lambda x, group: functional.all_reduce(x, "max", group),
    "broadcast": lambda x, group: functional.broadcast(x, 1, group),
    "gather": lambda x, group: gather(x, 0, group),
    "gather_columns": lambda x, group: gather(x, 1, group),
    "scatter": lambda x, group: scatter(x, "sum", 0, group),
    "scatter_columns": lambda x, group: scatter(x, "sum", 1, group),
    "rows_to_columns": lambda x, group: change_dim(x, group, 0, 1),
    "columns_to_rows": lambda x, group: change_dim(x, group, 1, 0),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@ranks("2x2")
def test_each_piece_by_itself(mesh, name):
    """Ranks beside each other hold terms of one piece."""
    domain, other = mesh["domain_h"], mesh["domain_w"]
    torch.manual_seed(other.get_local_rank())
    x, call = torch.randn(8, 6, dtype=torch.float64), COLLECTIVES[name]
    expected = torch.as_tensor(call(x, other))
    with shardtensor.fallback_mode("error"):
        for placements, sizes in sweep(domain, x.shape):
            part = shard(x, domain, placements, sizes)
            assert_close(call(part, other), expected)
            twice = torch.cat([part, part])
            assert_close(call(twice, other), call(torch.cat([x, x]), other))


@ranks(2, "2x2")
def test_ranks_of_other_pieces_are_refused(mesh):
    """All groups that a mesh tells of, on all ranks; what is whole has no pieces."""
    x = torch.ones(4, 6)
    part = shard(x, mesh, [Shard(0)] * mesh.ndim, {0: uneven(4, mesh.size())})
    groups = [(mesh, axis) for axis in range(mesh.ndim)]
    for group in groups:
        for call in COLLECTIVES.values():
            with pytest.raises(ValueError, match="ranks that hold the same piece, got"):
                call(part, group)
    numbers = torch.ops._c10d_functional.all_gather_into_tensor
    name = mesh.get_group(0).group_name
    with pytest.raises(ValueError, match="expected a tensor with dims, got none"):
        numbers(shard(torch.ones(()), mesh, [Replicate()] * mesh.ndim), 2, name)
    with pytest.raises(ValueError, match="expected a dim 0 that 3 divides, got 4"):
        torch.ops._c10d_functional.reduce_scatter_tensor(
            shard(x, mesh, [Replicate()] * mesh.ndim), "sum", 3, name
        )
    term = shard(x, mesh, [Partial()] * mesh.ndim)
    assert_close(functional.all_reduce(term, "sum", groups[0]), x * 2)
