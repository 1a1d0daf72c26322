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


@pytest.mark.tail
def test_a_dry_run_on_the_cpu(tmp_path):
    """A row that fails ends its ranks; the next one has fresh ones."""
    command = sys.executable, ROOT / "benchmarks" / "python" / "first_gpu.py"
    results = tmp_path / "measured.json"
    rows = ["values at the edges", "two streams", "GroupNorm, fp32", "label 255"]
    rows += ["conv 64, 16 rows, fp32", "convolution", "neighbours"]
    rows += ["record_stream"]
    told = run(*command, results, "--only", *rows, DEVICE="cpu")
    assert "two ranks of NCCL: needs a GPU\n" in told
    found = {}
    for line in run(*command, results, "--show", DEVICE="cpu").splitlines()[2:]:
        ranks, what, here, exchanges, _ = line.strip("| ").split(" | ")
        found[ranks, what] = here, int(exchanges)
    assert found["one rank", "values at the edges"] == ("right", 0)
    assert found["one rank", "two streams"] == ("needs a GPU", 0)
    assert found["one rank", "UNet step"] == ("not measured", 0)
    assert found["two ranks of NCCL", "neighbours"] == ("needs a GPU", 0)
    assert found["two ranks", "record_stream"] == ("needs a GPU", 0)
    assert "out of bounds" in found["two ranks", "label 255"][0]
    here, exchanges = found["two ranks", "values at the edges"]
    assert here == "right" and exchanges > 0
    here, exchanges = found["two ranks", "GroupNorm, fp32"]
    assert "ms plain" in here and "launches" in here and exchanges > 0
    here, exchanges = found["two ranks", "conv 64, 16 rows, fp32"]
    assert "joined" in here and "apart" in here and exchanges > 0
    for ranks in ("a rank of 2", "a rank of 8", "a rank of 64"):
        here, exchanges = found[ranks, "convolution"]
        assert "launches" in here and exchanges > 0
