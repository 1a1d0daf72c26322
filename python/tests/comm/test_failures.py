"""Nothing hangs: what goes wrong on one rank is an error on all, soon."""

import os
import time

import pytest
import rig
import torch
import torch.distributed as dist
from ranks import ranks, run_isolated, shard
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor import _C, ShardTensor
from shardtensor.agree import agree_on_call

ops = torch.ops.shardtensor


def mesh_of_all():
    return shardtensor.init_device_mesh(
        rig.DEVICE, (dist.get_world_size(),), mesh_dim_names=("domain",)
    )


def one_rank_dies():
    x = shard(torch.randn(8, 4), mesh_of_all(), [Shard(0)])
    x.redistribute(placements=[Shard(1)])
    if dist.get_rank() == 1:
        os._exit(7)
    start = time.monotonic()
    try:
        x.redistribute(placements=[Shard(1)])
    except RuntimeError as error:
        return time.monotonic() - start, str(error)
    return None


def test_a_dead_rank_is_an_error_for_the_others():
    outcomes = run_isolated(3, one_rank_dies, timeout=30, group_timeout=5)
    assert [o.kind for o in outcomes] == ["ok", "died", "ok"], outcomes
    assert outcomes[1].value == 7
    for rank in (0, 2):
        seconds, text = outcomes[rank].value
        assert seconds < 10
        assert "shardtensor::exchange" in text and f"rank {rank}" in text


def one_rank_stays_away():
    x = shard(torch.randn(8, 4), mesh_of_all(), [Shard(0)])
    shardtensor.set_communication_timeout(1.0)
    if dist.get_rank() == 1:
        time.sleep(4)
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="shardtensor::all_reduce"):
        (x.sum() * 1).full_tensor()
    return time.monotonic() - start


def test_a_rank_that_stays_away_is_an_error_after_the_time_limit():
    outcomes = run_isolated(2, one_rank_stays_away, timeout=30, group_timeout=20)
    assert [o.kind for o in outcomes] == ["ok", "ok"], outcomes
    assert outcomes[0].value < 4


def ranks_disagree_about_an_operator():
    x = shard(torch.randn(8, 4), mesh_of_all(), [Shard(0)])
    shardtensor.set_check_mode(True)
    to = [Replicate(), Shard(1)][dist.get_rank()]
    x.redistribute(placements=[to])


def test_check_mode_describes_both_sides_of_a_disagreement():
    outcomes = run_isolated(2, ranks_disagree_about_an_operator, timeout=30)
    for outcome in outcomes:
        assert outcome.kind == "error"
        assert "rank 0" in outcome.text and "rank 1" in outcome.text
    assert outcomes[0].text.splitlines()[-1] == outcomes[1].text.splitlines()[-1]


@ranks(2)
def test_shapes_that_do_not_fit_are_pytorchs_own_error_on_every_rank(mesh):
    a = shard(torch.randn(4, 3), mesh, [Shard(0)])
    b = shard(torch.randn(5, 4), mesh, [Shard(0)])
    for call in (lambda: torch.cat([a, b]), lambda: a + b, lambda: a @ b):
        with pytest.raises(RuntimeError, match="[34]"):
            call()


@ranks("2x2")
def test_tensors_on_different_meshes_do_not_mix(mesh):
    a = shard(torch.randn(4, 4), mesh, [Shard(0), Replicate()])
    rows = shardtensor.init_device_mesh(rig.DEVICE, (4,))
    b = shard(torch.randn(4, 4), rows, [Shard(0)])
    with pytest.raises(ValueError, match="on one mesh"):
        a + b


@ranks(2)
def test_local_pieces_must_have_the_promised_shape(mesh):
    spec = shardtensor.make_spec(mesh, (4, 3), [Shard(0)], [1, 3])
    with pytest.raises(ValueError, match=r"sizes \[9, 3\] but"):
        ShardTensor.from_spec(torch.zeros(9, 3), spec)


# ---- what is recorded -------------------------------------------------------


def recorded(x, sizes, name):
    """Collectives that have a derivative, of a row on each rank."""
    ones, every = [1] * len(sizes), x.expand(len(sizes), -1)
    index = [torch.tensor([0])] * len(sizes)
    yield ops.all_gather_v, (x, 0, ones, name)
    yield ops.reduce_scatter_v, (every, 0, ones, name)
    yield ops.all_to_all_v, (every, 0, ones, ones, name)
    yield ops.gather_v, (x, 0, ones, 0, name)
    yield ops.scatter_v, (every, 0, ones, 0, name)
    yield ops.indexed_all_to_all_v, (x, 0, index, ones, name)
    yield ops.broadcast, (x, 0, name)
    yield ops.ring_step, (x, 1, [1, 2], name)
    yield ops.halo_padding, (x, 0, 1, 0, name)
    yield ops.copy_to_parallel_region, (x, name)
    yield ops.reduce_from_parallel_region, (x, name)
    yield ops.scatter_to_parallel_region, (every, 0, ones, name)
    yield ops.gather_from_parallel_region, (x, 0, ones, name)


@ranks(2, 3)
def test_ranks_record_a_collective_together(mesh):
    name, sizes = dist.group.WORLD.group_name, [1] * mesh.size()
    for bad in (0, 1):
        x = torch.ones(1, 2, requires_grad=dist.get_rank() == bad)
        for call, arguments in recorded(x, sizes, name):
            with pytest.raises(ValueError) as caught:
                call(*arguments)
            lines = str(caught.value).splitlines()[1:]
            found = [", which requires grad" in line for line in lines]
            assert found == [rank == bad for rank in range(mesh.size())], lines
    with torch.no_grad():
        for call, arguments in recorded(x, sizes, name):
            call(*arguments)


# ---- what is said -----------------------------------------------------------


@ranks(2)
def test_a_long_error_ends_with_a_whole_character(mesh):
    for before in range(3):
        text = "x" * before + "\u20ac" * 300
        error = ValueError(text) if dist.get_rank() == 0 else None
        with pytest.raises(ValueError, match="^x*\u20ac{169,170} "):
            agree_on_call(dist.group.WORLD, "", error)


@ranks(2)
def test_nobody_is_missing_in_a_group_that_there_is_not(mesh):
    assert _C.who_is_missing("gone") == ""
