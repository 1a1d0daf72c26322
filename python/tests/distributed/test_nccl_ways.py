"""What NCCL asks of a program, on stand-ins: its way out waits for all ranks, and
a part of its communicator is made by all ranks."""

import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist
from jobs import ON_THE_HOST
from programs import ROOT
from ranks import ranks
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.device_mesh import whole_group

PROGRAM = """
    import time
    import torch.distributed as dist
    from shardtensor.distributed import DistributedManager

    DistributedManager.initialize()
    dist.get_backend_config = lambda group=None: "cpu:gloo,cuda:nccl"
    leave = dist.destroy_process_group
    dist.destroy_process_group = lambda: print("waited for others") or leave()
"""
NOBODY_COMES = "dist.destroy_process_group = lambda: time.sleep(60)"
LEFT_ALONE = "the other ranks have not left the job within 2000 ms"


def run_to_its_end(tmp_path, last_line):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM) + last_line + "\n")
    environment = {
        **os.environ,
        **ON_THE_HOST,
        **dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"),
        **dict(MASTER_ADDR="localhost", MASTER_PORT="0"),
        "PYTHONPATH": str(ROOT / "python"),
        "GLOO_SOCKET_IFNAME": "lo",
        "SHARDTENSOR_DISTRIBUTED_TIMEOUT": "2",
    }
    return subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True
    )


def test_an_uncaught_error_does_not_wait_for_the_other_ranks(tmp_path):
    ended = run_to_its_end(tmp_path, "raise ArithmeticError('lost')")
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.rstrip().endswith("ArithmeticError: lost")
    assert "waited" not in ended.stdout


def test_a_program_that_ends_leaves_with_the_others(tmp_path):
    ended = run_to_its_end(tmp_path, "print('done')")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "done\nwaited for others\n"


@pytest.mark.parametrize(
    "end",
    ["raise SystemExit(3)", "print('done')", "DistributedManager.cleanup()"],
)
def test_the_way_out_waits_no_longer_than_the_time_limit(tmp_path, end):
    start = time.monotonic()
    ended = run_to_its_end(tmp_path, f"print('kept', end='')\n{NOBODY_COMES}\n{end}")
    assert time.monotonic() - start < 40
    assert ended.returncode == 1
    assert LEFT_ALONE in ended.stderr, ended.stderr
    assert ended.stdout.startswith("kept")


@ranks(3)
def test_a_mesh_of_some_ranks_makes_its_group_alone(mesh):
    some = DeviceMesh("cpu", [[0, 2]])

    def split(_group):
        raise AssertionError("a communicator was split, by some ranks alone")

    world = dist.group.WORLD
    original = distributed_c10d._get_split_source
    world.bound_device_id = torch.device("cuda", 0)
    distributed_c10d._get_split_source = split
    try:
        if dist.get_rank() in (0, 2):
            group = whole_group(some)
            x = torch.ones(1, device="cpu")
            dist.all_reduce(x, group=group)
            assert x.item() == 2
            assert world.bound_device_id == torch.device("cuda", 0)
    finally:
        distributed_c10d._get_split_source = original
        world.bound_device_id = None


@ranks(3, timeout=60)
def test_a_mesh_of_ranks_that_are_in_other_groups(mesh):
    dist.new_group([0, 1])
    for others in ([[0, 2]], [[1, 2]], [[2], [0]]):
        some = DeviceMesh("cpu", others)
        if dist.get_rank() in some.mesh:
            x = torch.ones(1)
            dist.all_reduce(x, group=whole_group(some))
            assert x.item() == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_rank_of_nccl(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import torch
            from shardtensor import Shard, scatter_tensor
            from shardtensor.distributed import DistributedManager

            DistributedManager.initialize()
            manager = DistributedManager()
            mesh = manager.initialize_mesh((-1,), ("domain",))
            model = torch.nn.Conv2d(3, 4, 3, padding=1).to(manager.device)
            x = scatter_tensor(torch.rand(1, 3, 8, 8), 0, mesh, [Shard(2)])
            model(x).square().mean().backward()
            print(manager.device, model.weight.grad.isfinite().all().item())
        """)
    )
    environment = {
        **os.environ,
        **dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"),
        **dict(MASTER_ADDR="localhost", MASTER_PORT="0"),
        "PYTHONPATH": str(ROOT / "python"),
    }
    ended = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True
    )
    assert ended.stdout == "cuda:0 True\n", ended.stderr
