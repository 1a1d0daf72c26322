"""Programs of the repository, run as a user runs them."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "python"


def launch(ranks, script, *arguments, timeout=300):
    """What `ranks` processes of an example print."""
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={ranks}", EXAMPLES / script, *arguments]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "python"),
            "PYTHONWARNINGS": "ignore",
            "COLUMNS": "120",
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def promised(script):
    """The last indented block of the header."""
    header = ast.get_docstring(ast.parse((EXAMPLES / script).read_text()))
    block = re.findall(r"(?:^ {4}.+\n?)+", header, re.MULTILINE)[-1]
    return [line.strip() for line in block.splitlines()]
