"""Leaving a job, and joining another: nothing of the first one is left."""

import atexit
import contextlib
import gc
import importlib
import inspect
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import rig
import torch
import torch.distributed as dist
from jobs import free_port, values
from ranks import run_isolated
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor, distribute_tensor
from shardtensor.distributed import DistributedManager


def outlive_the_job(port):
    rank = dist.get_rank()
    dist.destroy_process_group()
    DistributedManager.setup(rank=rank, world_size=2, addr="localhost", port=port)
    mesh = DistributedManager().initialize_mesh((-1,), ("domain",))
    x = ShardTensor.from_local(torch.ones(2), mesh, (Partial(),))
    assert x.full_tensor().tolist() == [2.0, 2.0]
    assert gloo_threads()
    DistributedManager.cleanup()
    assert_threads_end()
    with pytest.raises(ValueError, match="there is no process group named"):
        x.full_tensor()


def gloo_threads():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread ended since it was listed
            names.append((task / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


def assert_threads_end(left=0):
    """The kernel lists a thread for a moment after it was joined."""
    waited = time.monotonic() + 5
    while len(gloo_threads()) > left:
        assert time.monotonic() < waited, gloo_threads()
        time.sleep(0.001)


def test_cleanup_ends_the_threads_of_a_job_whose_meshes_and_tensors_live_on():
    values(run_isolated(2, outlive_the_job, free_port()))


def end_a_forked_process(port):
    rank = dist.get_rank()
    dist.destroy_process_group()
    DistributedManager.setup(rank=rank, world_size=2, addr="localhost", port=port)
    total = torch.ones(1)
    dist.all_reduce(total)
    process = os.fork()
    if process == 0:
        atexit._run_exitfuncs()
        os._exit(5)
    waited = time.monotonic() + 20
    while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
        if time.monotonic() > waited:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise TimeoutError("the forked process waits for threads it has not")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 5
    dist.all_reduce(total)
    assert total.item() == 4.0
    DistributedManager.cleanup()


def test_a_forked_process_leaves_the_job_to_the_one_that_joined():
    values(run_isolated(2, end_a_forked_process, free_port()))


def save_and_leave(port, folder):
    rank = dist.get_rank()
    dist.destroy_process_group()
    DistributedManager.setup(rank=rank, world_size=2, addr="localhost", port=port)
    shardtensor.checkpoint.async_save({"x": torch.ones(2)}, folder, 1).result()
    assert gloo_threads()
    DistributedManager.cleanup()
    gc.collect()  # DCP's futures are in cycles
    assert_threads_end()


def test_cleanup_ends_the_threads_of_the_group_of_checkpoints(tmp_path):
    values(run_isolated(2, save_and_leave, free_port(), tmp_path))


def leave_and_join_again(folder):
    """Without DistributedManager; each job counts its groups otherwise."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for job in range(3):
        for _ in range(job):
            dist.new_group([0, 1])
        mesh = init_device_mesh(rig.DEVICE, (2, 2), mesh_dim_names=("a", "b"))
        for part in (mesh["a"], mesh, mesh["b"]):
            x = distribute_tensor(torch.arange(4.0), part, [Shard(0)] * part.ndim)
            found.append(x.sum().item())
        dist.destroy_process_group()
        store = dist.FileStore(str(folder / str(job)), ranks)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=20),
        )
    return found


def test_a_job_that_is_joined_again_has_groups_of_its_own(tmp_path):
    outcomes = run_isolated(4, leave_and_join_again, tmp_path, timeout=60)
    assert values(outcomes) == [[6.0] * 9] * 4


def make_groups_again(shape):
    """Equal meshes, each of groups of its own."""
    names = ("a", "b")[: len(shape)]
    everyone = list(range(dist.get_world_size()))
    left, old = None, []
    for turn in range(4):
        groups = [dist.new_group(everyone)]
        if len(shape) == 1:
            mesh = DeviceMesh.from_group(groups[0], rig.DEVICE, mesh_dim_names=names)
        else:
            mesh = init_device_mesh(rig.DEVICE, shape, mesh_dim_names=names)
            groups += [mesh.get_group(name) for name in names]
        x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)] * mesh.ndim)
        weight = torch.ones(5, requires_grad=True)
        (x * weight).sum().backward()
        assert weight.grad.tolist() == [0, 1, 2, 3, 4]
        assert x.sum().item() == 10 and x.device_mesh is mesh
        for group in groups:
            dist.destroy_process_group(group)
        old.append(x)
        if turn < 2:
            left = len(gloo_threads())
        else:
            assert_threads_end(left)
        del group, groups, mesh
    if len(shape) == 1:  # of two axes all ranks have the default group
        with pytest.raises(ValueError, match="there is no process group named"):
            old[0].redistribute(placements=[Replicate()])
    assert "Shard" in repr(old[0]) and "Shard" in repr(old[-1])


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_groups_that_take_the_place_of_destroyed_ones(shape):
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    values(run_isolated(count, make_groups_again, shape, timeout=60))


def import_what_keeps_groups(port):
    rank = dist.get_rank()
    dist.destroy_process_group()
    DistributedManager.setup(rank=rank, world_size=2, addr="localhost", port=port)
    sys.modules.pop("torch.distributed.nn.functional", None)
    functional = importlib.import_module("torch.distributed.nn.functional")
    assert isinstance(
        inspect.signature(functional.reduce).parameters["group"].default,
        dist.ProcessGroup,
    )
    DistributedManager.cleanup()
    assert_threads_end()


def test_cleanup_ends_the_threads_of_a_group_that_is_a_default_argument():
    values(run_isolated(2, import_what_keeps_groups, free_port()))


def outlive_plain_groups(port):
    rank = dist.get_rank()
    dist.destroy_process_group()
    DistributedManager.setup(rank=rank, world_size=2, addr="localhost", port=port)
    manager = DistributedManager()
    meshes = [manager.initialize_mesh((-1,), (name,)) for name in ("first", "last")]
    manager.create_process_subgroup("pair", 2)
    assert gloo_threads()
    DistributedManager.cleanup()
    assert_threads_end()
    return len(meshes), manager.rank


def test_cleanup_ends_the_threads_of_groups_that_no_tensor_used():
    values(run_isolated(2, outlive_plain_groups, free_port()))
