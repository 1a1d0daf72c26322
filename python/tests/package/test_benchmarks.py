"""Benchmarks say where they cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = Path(__file__).resolve().parents[3] / "benchmarks" / "python" / "run.py"


@pytest.mark.parametrize(
    "device, told",
    [
        pytest.param(
            "cuda",
            "DEVICE=cuda: this PyTorch sees no GPU; nothing was measured\n",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
        ("tpu", "DEVICE=tpu: expected cpu or cuda; nothing was measured\n"),
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
