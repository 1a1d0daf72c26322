"""What one of 16,384 ranks plans is as much as its own peers, whatever the others
do. PyTorch's fake process group stands for the others; nothing is timed."""

import json
import os
import subprocess
import sys

import pytest
from programs import ROOT

FOLDER = ROOT / "benchmarks" / "python"
MOST_BYTES = 50 * 2**20
# With each rank of 16,384 these exchange by nature.
WITH_ALL = {
    "Shard to Replicate",
    "Shard(i) to Shard(j)",
    "Partial to Shard",
    "scatter_tensor",
    "mask of rows",
    "index by a cut index",
    "rfft2 + irfft2",
}
# Merged by few ranks at a time, in four steps.
MERGED = {"group_norm", "batch_norm", "layer_norm", "var", "amax", "logsumexp", "norm"}
MERGED |= {"softmax", "log_softmax"}


ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "python"),
    "OMP_NUM_THREADS": "1",
    # Freed memory goes back to the system at once, or it would count for what
    # comes after it.
    "MALLOC_MMAP_THRESHOLD_": str(2**20),
}


def run(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=FOLDER,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["16384", "128x128"])
def planned(request):
    return run("plans.py", request.param)


def test_nothing_takes_memory_for_all_pairs_of_ranks(planned):
    for name, result in planned.items():
        assert "error" not in result, (name, result)
        assert result["bytes"] < MOST_BYTES, (name, result)


def test_only_gathers_and_scatters_send_to_all(planned):
    for name, result in planned.items():
        if name in MERGED:
            assert 0 < result["messages"] <= 64, (name, result)
        elif name not in WITH_ALL:
            assert result["messages"] < 1000, (name, result)


CALLS = """
import json, sys, torch
from torch.distributed.tensor import Replicate, Shard
from plans import job
import shardtensor

mesh, _ = job((16384,))
x = shardtensor.ones(1, 1, 4 * 16384, 4, device_mesh=mesh, placements=(Shard(2),))
w = torch.ones(1, 1, 3, 3)

def calls(function):
    with torch.profiler.profile() as profiler:
        function()
    # profiler.events() takes half a minute to nest this many.
    names = [event.name() for event in profiler.profiler.kineto_results.events()]
    kinds = ("send", "recv_", "alltoall_base_")
    return {kind: names.count(f"c10d::{kind}") for kind in kinds}

print(json.dumps({
    "neighbours": calls(lambda: torch.conv2d(x, w, padding=1)),
    "all": calls(lambda: x.redistribute(placements=(Replicate(),))),
}))
"""


def test_a_backend_is_told_of_neighbours_alone():
    calls = run("-c", CALLS)
    assert calls["neighbours"] == {"send": 2, "recv_": 2, "alltoall_base_": 0}
    assert calls["all"] == {"send": 0, "recv_": 0, "alltoall_base_": 1}
