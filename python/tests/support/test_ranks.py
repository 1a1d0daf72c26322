"""The test harness itself: pools, failures, time limits, isolation."""

import os
import signal
import sys
import time

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import RankError, partitions, ranks, run, run_isolated, uneven


def rank_and_size(mesh, offset):
    return dist.get_rank() + offset, mesh.size()


def test_run_returns_what_each_rank_returned():
    assert run(3, rank_and_size, 10) == [(10, 3), (11, 3), (12, 3)]


@ranks(1, 2, 3, 4, "2x2", "1x2", "2x1")
def test_the_world_is_the_mesh(mesh):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [mesh.size()] * 3
    assert dist.get_world_size() == mesh.size()


@ranks(2)
@pytest.mark.parametrize("value", [5, 7])
def test_parameters_and_fixtures_reach_the_body(mesh, value, tmp_path):
    assert value in (5, 7)
    assert tmp_path.is_dir()


def fail_on_one_rank(mesh):
    total = dist.get_rank()
    assert total == 0


def test_a_failed_assertion_shows_the_rank_and_the_values():
    with pytest.raises(RankError) as caught:
        run(3, fail_on_one_rank)
    text = str(caught.value)
    assert "rank 0: finished" in text
    assert "assert 1 == 0" in text
    assert "assert 2 == 0" in text
    assert "fail_on_one_rank" in text


def fail_and_leave_the_others_waiting(mesh):
    if dist.get_rank() == 1:
        raise ValueError("rank 1 gives up")
    dist.barrier()


def test_a_rank_that_waits_for_a_failed_one_does_not_hang():
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(2, fail_and_leave_the_others_waiting)
    assert time.monotonic() - start < 10
    assert "rank 0: timeout" in str(caught.value)
    assert "barrier" in str(caught.value)
    assert "ValueError: rank 1 gives up" in str(caught.value)
    assert run(2, rank_and_size, 0) == [(0, 2), (1, 2)]


def die(mesh):
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_rank_that_crashes_is_reported():
    with pytest.raises(RankError) as caught:
        run(2, die)
    assert "rank 0: died\nkilled by SIGSEGV" in str(caught.value)
    assert "in die" in str(caught.value)
    assert run(2, rank_and_size, 0) == [(0, 2), (1, 2)]


def same_error_everywhere(mesh):
    raise KeyError("all")


def pid(mesh):
    return os.getpid()


def test_a_pool_survives_an_error_that_all_ranks_raise():
    before = run(2, pid)
    with pytest.raises(RankError, match="rank 0, 1: error"):
        run(2, same_error_everywhere)
    assert run(2, pid) == before


def skip(mesh):
    pytest.skip("not here")


def test_a_skip_is_reported_as_one():
    with pytest.raises(RankError, match="rank 0, 1: skip\nnot here"):
        run(2, skip)


def different_layouts(mesh):
    oracle.layouts.append(f"layout {dist.get_rank()}")


def test_layouts_that_differ_between_ranks_fail_the_test():
    test = ranks(2)(different_layouts)
    with pytest.raises(pytest.fail.Exception, match="layouts differ between ranks"):
        test("2")


def test_a_call_costs_little():
    run(2, pid)
    start = time.perf_counter()
    for _ in range(100):
        run(2, pid)
    assert (time.perf_counter() - start) / 100 < 0.02


def test_partitions_tile_the_extent():
    for extent in (0, 1, 2, 7, 10):
        for count in (1, 2, 3, 4):
            for sizes in partitions(extent, count):
                assert len(sizes) == count and min(sizes) >= 0
                assert sum(sizes) * getattr(sizes, "repeat", 1) == extent
    assert uneven(10, 3) == [5, 3, 2]
    assert partitions(10, 3)[0] == [4, 4, 2]
    assert [0, 6, 3] in partitions(9, 3)
    assert [6, 4, 0] in partitions(10, 3)
    assert [0, 0, 8] in partitions(8, 3)
    assert [1, 1, 3] in partitions(10, 3)


def exit_on_rank_1():
    if dist.get_rank() == 1:
        sys.stdout.flush()
        os._exit(3)
    return dist.get_world_size()


def test_isolated_ranks_report_each_outcome():
    pool = run(2, pid)
    first, second = run_isolated(2, exit_on_rank_1)
    assert (first.kind, first.value) == ("ok", 2)
    assert (second.kind, second.value) == ("died", 3)
    assert run(2, pid) == pool
