"""ShardTensors that a program hands to torch.distributed's collectives."""

import pytest
import torch
import torch.distributed as dist
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor, new_tensors_on


@ranks(2, 3)
def test_constants_get_memory_to_receive_in(mesh):
    count, group, rank = mesh.size(), mesh.get_group(), mesh.get_local_rank()
    first = dist.get_global_rank(group, 0)
    with new_tensors_on(mesh):
        texts = ["told" * 500 if rank == 0 else None]
        dist.broadcast_object_list(texts, first, group=group)
        told = [None] * count
        dist.all_gather_object(told, "a" * (100 + rank), group=group)
        summed, part = torch.ones(1000), torch.ones(500)[100:400]
        dist.all_reduce(summed, group=group)
        dist.all_reduce(part, group=group)
        sent = torch.full((300,), 2.0)
        dist.broadcast(sent, first, group=group)
        joined = torch.zeros(count * 300)
        dist.all_gather_into_tensor(joined, sent, group=group)
        listed = [torch.zeros(300) for _ in range(count)]
        dist.all_gather(listed, sent, group=group)
    assert texts == ["told" * 500]
    assert told == ["a" * (100 + rank) for rank in range(count)]
    for found, expected in [(summed, count), (part, count), (joined, 2.0)]:
        assert isinstance(found, ShardTensor)
        assert_close(found, torch.full(found.shape, float(expected)))
    for each in listed:
        assert_close(each, torch.full((300,), 2.0))


@ranks(2)
def test_replicate_is_reduced_in_place_and_pieces_are_refused(mesh):
    group = mesh.get_group()
    x = torch.arange(6.0)
    whole = shard(x, mesh, [Replicate()])
    dist.all_reduce(whole, group=group)
    assert_close(whole, 2 * x)
    told = "c10d::allreduce_: expected plain tensors or Replicate ShardTensors, got"
    for placement in (Shard(0), Partial()):
        with pytest.raises(NotImplementedError, match=told):
            dist.all_reduce(shard(x, mesh, [placement]), group=group)
    told = "c10d::allgather_: expected plain tensors or Replicate"
    with pytest.raises(NotImplementedError, match=told):
        cut = shard(x, mesh, [Shard(0)])
        dist.all_gather([torch.empty(3)] * 2, cut, group=group)


@ranks(2)
def test_a_view_that_is_a_copy_is_read_and_not_written(mesh):
    group = mesh.get_group()
    x = shard(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)])
    row = x[1]  # a copy, on each rank
    with pytest.raises(NotImplementedError, match="cannot write into a view"):
        dist.all_reduce(row, group=group)
    rows = torch.zeros(6)
    dist.all_gather_into_tensor(rows, row, group=group)  # reads it
    assert_close(rows, torch.tensor([3.0, 4.0, 5.0] * 2))
