"""softmax and its relatives, along sharded and unsharded dims."""

import math

import pytest
import torch
import torch.nn.functional as F
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

FUNCTIONS = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "softmin": F.softmin,
    "logsumexp": torch.logsumexp,
}


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_along_every_dim_of_every_cut(mesh, name, cut, dim):
    x = torch.randn(5, 6, 7, dtype=torch.float64, requires_grad=True)
    for sizes in partitions(x.shape[cut], mesh.size()):
        part = sharded(x, [Shard(cut)], {cut: sizes})
        check_op(FUNCTIONS[name], part, dim, mesh=mesh, second_order=True)


@ranks("2x2")
@pytest.mark.parametrize("dims", [(0, 1), (1, 1), (None, 0), (2, None)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_a_grid_of_ranks(mesh, name, dims):
    x = torch.randn(5, 6, 7, dtype=torch.float64, requires_grad=True)
    placements = [Replicate() if d is None else Shard(d) for d in dims]
    for dim in range(3):
        check_op(
            FUNCTIONS[name], sharded(x, placements), dim, mesh=mesh, second_order=True
        )


def log_sum_exp(x):
    return (
        torch.logsumexp(x, (0, 2)),
        torch.logsumexp(x, (-1, 0), keepdim=True),
        torch.logsumexp(x, (0, 1, 2)),
    )


@ranks(2, 3, "2x2")
def test_logsumexp_over_several_dims(mesh):
    x = torch.randn(5, 6, 7, dtype=torch.float64, requires_grad=True)
    placements = [Shard(0), Shard(2)][: mesh.ndim]
    check_op(log_sum_exp, sharded(x, placements), mesh=mesh, second_order=True)
    whole = torch.randint(-3, 3, (5, 6, 7))
    check_op(log_sum_exp, sharded(whole, placements), mesh=mesh)


@ranks(2, 3)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_values_and_narrow_types(mesh, name, dtype):
    x = (torch.randn(4, 11) * 100).to(dtype)
    part = sharded(x.requires_grad_(), [Shard(1)])
    check_op(FUNCTIONS[name], part, 1, mesh=mesh)


@ranks(2)
def test_a_dtype_is_applied_before(mesh):
    x = torch.randn(4, 11).bfloat16()
    part = sharded(x.requires_grad_(), [Shard(1)], {1: [9, 2]})
    for dtype in (torch.float32, torch.float64):
        check_op(lambda x, d=dtype: torch.softmax(x, 1, dtype=d), part, mesh=mesh)
        check_op(lambda x, d=dtype: torch.log_softmax(x, 1, dtype=d), part, mesh=mesh)


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_with_infinities_and_nan(mesh, name):
    inf = math.inf
    x = torch.tensor(
        [
            [1.0, -inf, 2.0, -inf, -inf, -inf],
            [-inf, -inf, -inf, -inf, -inf, -inf],
            [0.0, 1.0, inf, 2.0, 3.0, 4.0],
            [0.0, math.nan, 1.0, 2.0, 3.0, 4.0],
            [1e4, 1e4, 1e4, -1e4, -1e4, -1e4],
        ]
    )
    part = shard(x, mesh, [Shard(1)])
    assert_close(FUNCTIONS[name](part, 1), FUNCTIONS[name](x, 1))


@ranks(2)
def test_a_sharded_softmax_costs_one_message_each_way(mesh):
    import shardtensor

    x = torch.randn(4, 6, requires_grad=True)
    part = shard(x, mesh, [Shard(1)])
    shardtensor.reset_comm_stats()
    shardtensor.reset_fallback_counts()
    y = torch.softmax(part, 1)
    forward = shardtensor.comm_stats()
    y.backward(torch.ones_like(y))
    both = shardtensor.comm_stats()
    assert (forward.exchanges, forward.all_reduces) == (1, 0)
    assert (both.exchanges, both.all_reduces) == (1, 1)
    assert shardtensor.fallback_counts() == {}
