"""Python programs that mpirun starts: their messages travel over MPI."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from programs import EXAMPLES, ROOT, promised

from shardtensor import _C

MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
pytestmark = pytest.mark.skipif(
    not _C.has_mpi(), reason="the library was built without MPI"
)


def mpirun(ranks, *program, **environment):
    command = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    return subprocess.run(
        [*command, sys.executable, *map(str, program)],
        env={
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "python"),
            "PYTHONWARNINGS": "ignore",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize(
    "device, shape",
    [
        ("cpu", "2"),
        pytest.param("cpu", "3", marks=pytest.mark.tail),
        pytest.param("cpu", "2x2", marks=pytest.mark.tail),
        ("guarded", "2"),
    ],
)
def test_a_job_over_mpi(device, shape):
    """A guarded tensor is not where MPI could read it."""
    ranks = {"2": 2, "3": 3, "2x2": 4}[shape]
    job = ROOT / "python" / "tests" / "support" / "mpi_job.py"
    done = mpirun(ranks, job, shape, DEVICE=device)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == 8, done.stdout


def test_an_example_under_mpirun():
    done = mpirun(4, EXAMPLES / "sharded_conv.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == promised("sharded_conv.py")


INITIALIZE = """
from shardtensor.distributed import DistributedManager
import torch.distributed as dist
DistributedManager.initialize()
print(dist.get_backend())
DistributedManager.cleanup(barrier=True)
"""


def test_gloo_under_mpirun_when_asked_for():
    done = mpirun(2, "-c", INITIALIZE, SHARDTENSOR_DISTRIBUTED_BACKEND="gloo")
    assert done.stdout.split() == ["gloo", "gloo"], done.stdout + done.stderr


FAILS = """
import os, sys, torch
import torch.distributed as dist
from shardtensor.distributed import DistributedManager
DistributedManager.initialize()
if dist.get_rank() == 0:
    {way}
dist.all_reduce(torch.ones(3))
"""


@pytest.mark.parametrize(
    "way",
    ["raise RuntimeError('rank 0 gives up')", "sys.exit(3)", "os.kill(os.getpid(), 9)"],
    ids=["raises", "exits", "dies"],
)
def test_a_rank_that_fails_ends_the_job(way):
    """It must not wait in MPI_Finalize for ranks that wait for it."""
    done = mpirun(2, "-c", FAILS.format(way=way))
    assert done.returncode != 0
    assert "rank 0 gives up" not in way or "rank 0 gives up" in done.stderr


def test_processes_that_this_mpi_did_not_start():
    """Another MPI's mpirun sets its variables, but this one knows nothing."""
    job = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    job |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT / "python")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", INITIALIZE],
            env={
                **os.environ,
                **job,
                "OMPI_COMM_WORLD_RANK": rank,
                "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    for rank, process in enumerate(processes):
        text = process.communicate(timeout=120)[1]
        said = f"MPI says rank 0 of 1, the environment (openmpi) rank {rank} of 2"
        assert process.returncode == 1 and said in text, text
        assert "SHARDTENSOR_DISTRIBUTED_BACKEND=gloo" in text
