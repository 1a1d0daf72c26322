"""Benchmarks and tests say where they cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
RUN = ROOT / "benchmarks" / "python" / "run.py"


@pytest.mark.parametrize(
    "device, told",
    [
        pytest.param(
            "cuda",
            "DEVICE=cuda: this PyTorch sees no GPU; nothing was measured\n",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
        pytest.param(
            "tpu",
            "DEVICE=tpu: expected cpu or cuda; nothing was measured\n",
            marks=pytest.mark.tail,
        ),
    ],
)
def test_one_line_where_nothing_can_be_measured(device, told):
    environment = os.environ | {"DEVICE": device}
    done = subprocess.run(
        [sys.executable, RUN, "operators"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")


@pytest.mark.tail
def test_ranks_that_share_a_device_measure_on_it():
    """A dry run of DEVICE=cuda with fewer GPUs than ranks."""
    paths = (ROOT / "python", ROOT / "python" / "tests" / "support")
    environment = os.environ | {
        "DEVICE": "guarded",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, RUN, "steps"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Small steps, over cpu:gloo,guarded:guarded" in done.stdout, done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("target", ["test", "bench", "report"])
def test_one_line_where_nothing_can_run(target):
    """Nothing is built, neither ctest nor the guarded device are run."""
    command = ["make", "--old-file=setup", target, "DEVICE=cuda"]
    outside = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=ROOT, env=outside, capture_output=True, text=True
    )
    told = "DEVICE=cuda: this PyTorch sees no GPU; nothing was run\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")
