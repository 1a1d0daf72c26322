"""The same operators from C++: runs benchmarks/cpp/operators.cpp on 2 ranks."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "benchmarks" / "operators"
RANKS = 2


def report():
    """The program's table. torchrun starts any program; no MPI is needed."""
    if not PROGRAM.exists():
        sys.exit(f"cpp.py: there is no {PROGRAM}; make bench builds it")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "--no-python", str(PROGRAM)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.rstrip()
