"""The README's launch lines on two nodes, and a node that is gone."""

import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest
from nodes import Nodes, can_make_nodes

pytestmark = pytest.mark.skipif(
    not can_make_nodes(), reason="network namespaces need root on Linux"
)

JOB = Path(__file__).resolve().parents[1] / "support" / "nodes_job.py"
PACKAGE = str(JOB.parents[2])
LIMIT = 6  # seconds of every collective


@pytest.fixture
def nodes():
    with Nodes() as made:
        yield made


def torchrun(nodes, what, folder):
    """One launcher on each node; two ranks each."""
    common = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    place = [f"--rdzv-endpoint={nodes.addresses[0]}:29500", "--rdzv-id=job"]
    run = [sys.executable, "-m", "torch.distributed.run", *common, *place]
    return [
        nodes.start(
            node,
            # The name of this machine leads to none of the two.
            [*run, f"--local-addr={nodes.addresses[node]}"]
            + [f"--rdzv-conf=is_host={1 - node}", JOB, what, folder],
            SHARDTENSOR_DISTRIBUTED_TIMEOUT=str(LIMIT),
            OMP_NUM_THREADS="1",
            PYTHONPATH=PACKAGE,
        )
        for node in range(2)
    ]


def test_torchrun(nodes, tmp_path):
    texts = [p.communicate(timeout=300)[0] for p in torchrun(nodes, "step", tmp_path)]
    for node, text in enumerate(texts):
        for rank in (2 * node, 2 * node + 1):
            assert f"rank {rank} of 4: done" in text, text


def test_mpirun(nodes, tmp_path):
    """Its remote shell is a script that enters the other node."""
    shell = tmp_path / "remote_shell"
    inside = shlex.join(nodes.prefix(1))
    shell.write_text(f'#!/bin/sh\nshift\nexec {inside} sh -c "$*"\n')
    shell.chmod(0o755)
    (tmp_path / "hosts").write_text("".join(f"{a} slots=2\n" for a in nodes.addresses))
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}") or "mpirun"
    job = nodes.start(
        0,
        [mpirun, "--hostfile", tmp_path / "hosts", "-n", 4, "--bind-to", "none"]
        + ["--prtemca", "plm_ssh_agent", shell, "-x", "PYTHONPATH", "-x", "MASTER_ADDR"]
        + [sys.executable, JOB, "step", tmp_path],
        MASTER_ADDR=nodes.addresses[0],
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        PRTE_ALLOW_RUN_AS_ROOT="1",
        PRTE_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMP_NUM_THREADS="1",
        PYTHONPATH=PACKAGE,
    )
    text = job.communicate(timeout=300)[0]
    for rank in range(4):
        assert f"rank {rank} of 4: done" in text, text


@pytest.mark.parametrize(
    "what",
    [
        "forward",
        pytest.param("backward", marks=pytest.mark.tail),
        pytest.param("saving", marks=pytest.mark.tail),
    ],
)
def test_a_node_that_vanishes_is_an_error_for_the_other(nodes, tmp_path, what):
    first, _ = torchrun(nodes, what, tmp_path)
    waited = time.monotonic()
    while not (tmp_path / "ready").exists():
        assert time.monotonic() - waited < 200
        time.sleep(0.05)
    nodes.vanish(1)
    gone = time.monotonic()
    text = first.communicate(timeout=300)[0]
    assert time.monotonic() - gone < 5 * LIMIT
    assert first.returncode != 0
    assert "Error" in text and "rank 0" in text, text
    names = {"forward": "conv", "backward": "backward", "saving": "checkpoint: rank"}
    assert names[what] in text, text
