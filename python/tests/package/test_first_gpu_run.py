"""tools/first_gpu_run.sh says where it cannot run; its measurements run anywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


def run(*command, **environment):
    environment = {**os.environ, "PYTHON": sys.executable, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_one_line_without_a_gpu():
    told = run(ROOT / "tools" / "first_gpu_run.sh", DEVICE="cuda")
    assert told == (
        f"first_gpu_run: {sys.executable} has no PyTorch that sees a GPU; "
        "nothing was run\n"
    )


def test_a_dry_run_on_the_cpu(tmp_path):
    command = sys.executable, ROOT / "benchmarks" / "python" / "first_gpu.py"
    results = tmp_path / "measured.json"
    run(*command, results, "--only", "values at the edges", "two streams", DEVICE="cpu")
    lines = run(*command, results, "--show", DEVICE="cpu").splitlines()
    assert "| values at the edges | right | right |" in lines
    assert "| two streams | needs a GPU | 0 |" in lines
    assert "| UNet step | not measured | 1.0 to 1.15 |" in lines
