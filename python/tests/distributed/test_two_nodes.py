"""The launch lines of docs/jobs.md on two nodes: a step, then the second node vanishes,
which is an error for the first."""

import queue
import re
import shlex
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from jobs import ON_THE_HOST
from nodes import Nodes, can_make_nodes

pytestmark = pytest.mark.skipif(
    not can_make_nodes(), reason="network namespaces need root on Linux"
)

JOB = Path(__file__).resolve().parents[1] / "support" / "nodes_job.py"
PACKAGE = str(JOB.parents[2])
LIMIT = 6  # seconds of every collective
ENDING = 30  # seconds that processes and launchers take to end on a busy machine


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
            **ON_THE_HOST,
        )
        for node in range(2)
    ]


def mpirun(nodes, what, folder):
    """Its remote shell is a script that enters the other node."""
    shell = folder / "remote_shell"
    inside = shlex.join(nodes.prefix(1))
    shell.write_text(f'#!/bin/sh\nshift\nexec {inside} sh -c "$*"\n')
    shell.chmod(0o755)
    (folder / "hosts").write_text("".join(f"{a} slots=2\n" for a in nodes.addresses))
    program = shutil.which("mpirun", path=f"{Path(sys.executable).parent}") or "mpirun"
    passed = ("PYTHONPATH", "MASTER_ADDR", "SHARDTENSOR_DISTRIBUTED_TIMEOUT")
    return nodes.start(
        0,
        [program, "--hostfile", folder / "hosts", "-n", 4, "--bind-to", "none"]
        + ["--prtemca", "plm_ssh_agent", shell]
        + [word for name in passed for word in ("-x", name)]
        + [sys.executable, JOB, what, folder],
        MASTER_ADDR=nodes.addresses[0],
        SHARDTENSOR_DISTRIBUTED_TIMEOUT=str(LIMIT),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        PRTE_ALLOW_RUN_AS_ROOT="1",
        PRTE_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMP_NUM_THREADS="1",
        PYTHONPATH=PACKAGE,
    )


@pytest.mark.parametrize(
    "what",
    [
        "forward",
        "collective",
        pytest.param("backward", marks=pytest.mark.tail),
        pytest.param("agreement", marks=pytest.mark.tail),
        pytest.param("saving", marks=pytest.mark.tail),
    ],
)
def test_torchrun(nodes, tmp_path, what):
    first, _ = torchrun(nodes, what, tmp_path)
    wait_until_ready(tmp_path)
    assert_every_rank_has_stepped(tmp_path)
    nodes.vanish(1)
    gone = time.monotonic()
    text = first.communicate(timeout=300)[0]
    assert time.monotonic() - gone < LIMIT + ENDING
    assert first.returncode != 0
    # Of either rank: the launcher ends the other when one fails.
    lost = "in group '0': waiting for rank [23]: "
    nobody = ".*; heard nothing from rank 2, rank 3"  # of a collective of gloo
    told = {
        "forward": f"in aten::conv2d failed on rank [01] of 4 {lost}",
        "backward": f"in gradients of parameters failed on rank [01] of 4 {lost}",
        "collective": f"all_reduce.* failed on rank [01] of 4 {nobody}",
        "agreement": f"RuntimeError: {nobody}",
        "saving": f"checkpoint: rank [01] does not reach the others: {nobody}",
    }
    assert re.search(told[what], text), text


@pytest.mark.tail
def test_mpirun(nodes, tmp_path):
    """The error is its ranks': mpirun itself waits for the other node's launcher."""
    job = mpirun(nodes, "forward", tmp_path)
    text = text_of_ranks((0, 1), job, nodes, tmp_path)
    assert "in aten::conv2d failed" in text and "waiting for rank 2, rank 3" in text


@pytest.mark.tail
def test_the_node_of_the_store(nodes, tmp_path):
    """Its ranks can't be told then; torchrun itself waits for it."""
    _, second = torchrun(nodes, "collective", tmp_path)
    text = text_of_ranks((2, 3), second, nodes, tmp_path)
    assert text.count("the store of the group does not answer, either") == 2


def text_of_ranks(ranks, job, nodes, folder):
    """What the job says until all of these have failed, for the other node vanishes."""
    lines = queue.Queue()
    threading.Thread(
        target=lambda: [lines.put(line) for line in job.stdout], daemon=True
    ).start()
    wait_until_ready(folder)
    assert_every_rank_has_stepped(folder)
    nodes.vanish(0 if 2 in ranks else 1)
    gone = time.monotonic()
    text = ""
    while not all(f"failed on rank {r} of 4 in group '0'" in text for r in ranks):
        text += lines.get(timeout=LIMIT + ENDING)
    assert time.monotonic() - gone < LIMIT + ENDING
    return text


def wait_until_ready(folder):
    begin = time.monotonic()
    while not (folder / "ready").exists():
        assert time.monotonic() - begin < 200
        time.sleep(0.05)


def assert_every_rank_has_stepped(folder):
    stepped = {path.name for path in folder.glob("*of*")}
    assert stepped == {f"{rank} of 4" for rank in range(4)}
