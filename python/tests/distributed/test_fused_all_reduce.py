"""Values for logging: many in one message."""

import math
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import assert_close, ranks, run_isolated, shard
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.distributed import (
    DistributedManager,
    UninitializedManagerError,
    fused_all_reduce,
    reduce_loss,
)

PRELOAD = ("torch._inductor.compile_fx",)
OPS = {
    dist.ReduceOp.SUM: lambda values: sum(values),
    dist.ReduceOp.AVG: lambda values: sum(values) / len(values),
    dist.ReduceOp.MAX: max,
    dist.ReduceOp.MIN: min,
}


def values(mesh):
    return [float(3 * r % 5 - 1) for r in range(mesh.size())]


@ranks(1, 2, 3)
@pytest.mark.parametrize("op", OPS)
def test_one_tensor(mesh, op):
    mine = values(mesh)[dist.get_rank()]
    x = torch.full((2, 3), mine, requires_grad=True)
    y = fused_all_reduce(x, op=op)
    assert_close(y, torch.full((2, 3), OPS[op](values(mesh))))
    assert not y.requires_grad and y.data_ptr() != x.data_ptr()


@ranks(2, 3)
@pytest.mark.parametrize("op", OPS)
def test_shard_tensors_give_their_whole_values(mesh, op):
    x = torch.randn(5, 2)
    s = shard(x, mesh, [Shard(0)])
    given = {"loss": s.square().mean(), "most": s.amax(0), "rows": s}
    whole = {"loss": x.square().mean(), "most": x.amax(0), "rows": x}
    result = fused_all_reduce(given, op=op)
    later, work = fused_all_reduce(given, op=op, async_op=True)
    work.wait()
    for name, value in whole.items():
        expected = value * mesh.size() if op == dist.ReduceOp.SUM else value
        assert_close(result[name], expected)
        assert_close(later[name], expected)
        assert type(result[name]) is type(later[name]) is torch.Tensor
    with pytest.raises(ValueError, match="of a ShardTensor"):
        fused_all_reduce(s.sum() if dist.get_rank() else x.sum(), op=op)


@ranks(1, 2, 3)
def test_containers_keep_their_shape_and_send_one_message(mesh):
    rank, size = dist.get_rank(), mesh.size()
    given = {
        "loss": torch.tensor(1.0 + rank, dtype=torch.float64),
        "parts": [torch.ones(2, dtype=torch.half), (torch.zeros(0), torch.ones(1, 3))],
        "a": {"b": torch.arange(6.0).reshape(2, 3).t()},
    }
    if rank % 2:  # ranks may insert in any order
        given = dict(reversed(given.items()))
    shardtensor.reset_comm_stats()
    result = fused_all_reduce(given)
    assert shardtensor.comm_stats().all_reduces == (1 if size > 1 else 0)
    assert list(result) == list(given) and type(result["parts"]) is list
    total = float(sum(range(1, size + 1)))
    assert_close(result["loss"], torch.tensor(total, dtype=torch.float64))
    assert_close(result["parts"][0], torch.full((2,), float(size), dtype=torch.half))
    assert_close(result["parts"][1][0], torch.zeros(0))
    assert_close(result["parts"][1][1], torch.full((1, 3), float(size)))
    assert_close(result["a"]["b"], torch.arange(6.0).reshape(2, 3).t() * size)


@ranks(2)
def test_integers_alone_are_exact(mesh):
    big = 2**53 + 1
    result = fused_all_reduce([torch.tensor(big), torch.tensor(3, dtype=torch.int32)])
    assert result[0].item() == 2 * big and result[1].item() == 6
    mean = fused_all_reduce(torch.tensor(5 + dist.get_rank()), op=dist.ReduceOp.AVG)
    assert mean.dtype == torch.int64 and mean.item() == 5


@ranks(1, 2, 3)
def test_averages_of_small_integers_do_not_overflow(mesh):
    first = dist.get_rank() == 0
    values = [torch.tensor(200, dtype=torch.uint8), torch.tensor([-100, 100]).char()]
    values += [torch.tensor([True, first])]
    now = fused_all_reduce(values, op=dist.ReduceOp.AVG)
    later, work = fused_all_reduce(values, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    for averages in (now, later):
        assert averages[0].item() == 200 and averages[1].tolist() == [-100, 100]
        assert averages[2].tolist() == [True, mesh.size() == 1]
        assert [x.dtype for x in averages] == [x.dtype for x in values]


@ranks(2)
def test_halves_travel_as_fp32_unless_told_otherwise(mesh):
    x = torch.tensor(2048.0 if dist.get_rank() else 1.0, dtype=torch.half)
    y = torch.tensor(-2048.0 if dist.get_rank() else 0.0, dtype=torch.half)
    shardtensor.reset_comm_stats()
    fused_all_reduce([x, y])
    wide = shardtensor.comm_stats().bytes
    shardtensor.reset_comm_stats()
    fused_all_reduce([x, y], buffer_dtype=torch.half)
    assert wide == 2 * shardtensor.comm_stats().bytes


@ranks(1, 2, 3)
@pytest.mark.parametrize("op", OPS)
def test_asynchronous_values_arrive_in_place(mesh, op):
    mine = values(mesh)[dist.get_rank()]
    result, work = fused_all_reduce(
        {"x": torch.full((2,), mine), "y": [torch.tensor(mine)]}, op=op, async_op=True
    )
    x, y = result["x"], result["y"][0]
    assert_close(x, torch.full((2,), mine))
    assert work.wait() is True and work.wait() is True and work.is_completed()
    expected = OPS[op](values(mesh))
    assert_close(x, torch.full((2,), expected))
    assert_close(y, torch.tensor(expected))


@ranks(2, 3)
def test_asynchronous_values_are_those_that_come_at_once(mesh):
    """Also where a backend loses them, or has no such dtype."""
    mine = dist.get_rank() == mesh.size() - 1
    for x, op in (
        (torch.tensor([math.nan if mine else 1.0, 2.0]), dist.ReduceOp.MAX),
        (torch.tensor([1.0 if mine else math.nan, 2.0]), dist.ReduceOp.MIN),
        (torch.tensor([1, 2], dtype=torch.int16), dist.ReduceOp.SUM),
        (torch.tensor([mine, False]), dist.ReduceOp.SUM),
        (torch.tensor([1j, mine]), dist.ReduceOp.AVG),
    ):
        later, work = fused_all_reduce(x, op=op, async_op=True)
        work.wait()
        now = fused_all_reduce(x, op=op)
        torch.testing.assert_close(later, now, equal_nan=True, rtol=0, atol=0)


@ranks(1, 2)
def test_wrong_values_are_errors_on_any_number_of_ranks(mesh):
    for wrong in ("text", b"bytes", 3.0, [torch.ones(1), None]):
        with pytest.raises(TypeError, match="expected tensors, mappings"):
            fused_all_reduce(wrong)
    mixed = [torch.ones(1), torch.ones(1, dtype=torch.int64)]
    with pytest.raises(ValueError, match="integer or bool tensors beside"):
        fused_all_reduce(mixed)
    with pytest.raises(ValueError, match="expected SUM, AVG, MAX or MIN"):
        fused_all_reduce(torch.ones(1), op=dist.ReduceOp.PRODUCT)
    result = fused_all_reduce(mixed, buffer_dtype=torch.float64)
    assert result[1].dtype == torch.int64 and result[1].item() == mesh.size()


def test_without_a_job_there_are_clones():
    x = torch.ones(2)
    result, work = fused_all_reduce({"x": x, "none": []}, async_op=True)
    assert torch.equal(result["x"], x) and result["x"] is not x
    assert result["none"] == [] and work.is_completed()
    assert "tensordict" not in sys.modules


@ranks(2)
def test_tensordicts(mesh):
    tensordict = pytest.importorskip("tensordict")
    inner = tensordict.TensorDict({"b": torch.ones(2, 3)}, batch_size=[2])
    given = tensordict.TensorDict({"z": torch.ones(2), "a": inner}, batch_size=[2])
    result = fused_all_reduce(given)
    assert isinstance(result, tensordict.TensorDict)
    assert result.batch_size == given.batch_size
    assert_close(result["a", "b"], torch.full((2, 3), 2.0))


@ranks(2)
def test_it_traces_whole(mesh):
    def fn(x):
        return fused_all_reduce({"a": x.sum(), "b": x * 2}, op=dist.ReduceOp.AVG)

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    x = torch.full((3,), 1.0 + dist.get_rank())
    actual, expected = compiled(x), fn(x)
    assert_close(actual["a"], expected["a"])
    assert_close(actual["b"], expected["b"])


# ---- losses -----------------------------------------------------------------


@ranks(1, 2, 3)
def test_reduce_loss_gives_the_mean_on_one_rank(mesh):
    DistributedManager.initialize()
    rank, size = dist.get_rank(), mesh.size()
    for dst in range(size):
        mean = reduce_loss(torch.tensor(1.0 + rank), dst)
        total = reduce_loss(1.0 + rank, dst, mean=False)
        if rank == dst:
            assert type(mean) is float
            assert mean == pytest.approx((size + 1) / 2)
            assert total == size * (size + 1) / 2
        else:
            assert mean is None and total is None


def lonely():
    with pytest.raises(UninitializedManagerError):
        reduce_loss(1.0)


def test_reduce_loss_needs_the_manager():
    assert [o.kind for o in run_isolated(1, lonely)] == ["ok"]
