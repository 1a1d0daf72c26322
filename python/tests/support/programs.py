"""Programs of the repository, run as a user runs them."""

import ast
import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import torch
from jobs import ON_THE_HOST
from ranks import run_isolated

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "python"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT / "python"),
    "PYTHONWARNINGS": "ignore",
    "COLUMNS": "120",
    **ON_THE_HOST,
}


def printed(ranks, script, *arguments):
    """What an example prints on `ranks` ranks, which start at once: they are
    forked, in the environment that torchrun would give them."""
    outcomes = run_isolated(ranks, _run_program, script, arguments, world=False)
    assert all(o.kind == "ok" for o in outcomes), [o.text for o in outcomes]
    return "".join(o.value for o in outcomes)


def _run_program(script, arguments):
    os.environ.update(ENVIRONMENT)  # what the program starts has it, too
    torch.set_default_device("cpu")  # until the program chooses another
    program = str(EXAMPLES / script)
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(program, run_name="__main__")
    torch.set_default_device(None)
    return text.getvalue()


def launch(ranks, script, *arguments, timeout=300):
    """What `ranks` processes of an example print that torchrun starts."""
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={ranks}", EXAMPLES / script, *arguments]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def blocks(path, language):
    """The programs that a document shows."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.S | re.M)


def promised(script):
    """The last indented block of the header."""
    header = ast.get_docstring(ast.parse((EXAMPLES / script).read_text()))
    block = re.findall(r"(?:^ {4}.+\n?)+", header, re.MULTILINE)[-1]
    return [line.strip() for line in block.splitlines()]
