"""DistributedManager under SLURM's own srun and sbatch."""

import shlex
import sys
from pathlib import Path

import pytest
from nodes import Nodes, can_make_nodes
from slurm import Slurm, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no SLURM: {missing()}")

JOB = Path(__file__).resolve().parents[1] / "support" / "slurm_job.py"
RUN = shlex.join([sys.executable, str(JOB)])
ENVIRONMENT = {
    "PYTHONPATH": str(JOB.parents[2]),
    "OMP_NUM_THREADS": "1",
    "SHARDTENSOR_DISTRIBUTED_BACKEND": "gloo",
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def told(ranks, method="slurm"):
    """What the job prints on each rank."""
    total = ranks * (ranks + 1) // 2
    return [
        f"rank {rank} of {ranks}, {rank} here, by {method}: {total}, 45"
        for rank in range(ranks)
    ]


def lines(text):
    return sorted(line for line in text.splitlines() if line.startswith("rank"))


def test_srun_with_gpus_per_task(slurm):
    """Each task sees its own GPU alone, which then is number 0."""
    job = ["-n3", "--gpus-per-task=1", sys.executable, JOB, "device"]
    done = slurm.run("srun", *job, **ENVIRONMENT)
    assert lines(done.stdout) == told(3), done.stdout + done.stderr
    assert done.stdout.count("device cuda:0 of 1") == 3, done.stdout


def batch(slurm, script, *options):
    """What a batch script prints, and whether it ended well."""
    path, output = slurm.folder / "job.sh", slurm.folder / "job.out"
    path.write_text(f"#!/bin/sh\n{script}\n")
    options = ["--wait", f"--output={output}", *options, path]
    done = slurm.run("sbatch", *options, **ENVIRONMENT)
    assert output.exists(), done.stderr + slurm.logs()
    return done.returncode == 0, output.read_text()


def test_steps_of_a_batch_script(slurm):
    """Two at a time, which must not meet, and then a program without srun."""
    steps = [f"srun --exact -n{tasks} {RUN} &" for tasks in (2, 1)]
    well, text = batch(slurm, f"{' '.join(steps)} wait; {RUN}", "-n3")
    assert lines(text) == sorted(told(2) + told(1)), text
    assert not well
    assert "one process in the script of a job of 3 tasks; expected srun" in text, text


def test_a_batch_script_of_one_task(slurm):
    """One process, or one launcher, whose variables win over SLURM's."""
    launcher = f"{sys.executable} -m torch.distributed.run --standalone"
    script = f"{RUN} && srun {launcher} --nproc-per-node=2 {JOB}"
    well, text = batch(slurm, script, "-n1", "-c2")
    assert well and lines(text) == sorted(told(1, "None") + told(2, "env")), text


@pytest.mark.skipif(
    not can_make_nodes(), reason="network namespaces need root on Linux"
)
def test_two_nodes(tmp_path):
    """Rank 0's node is the first of the list; ranks count anew on each."""
    with Nodes() as nodes, Slurm(tmp_path, nodes) as slurm:
        job = ["srun", "-N2", "--ntasks-per-node=2", sys.executable, JOB]
        done = slurm.run(*job, **ENVIRONMENT)
    expected = [
        f"rank {rank} of 4, {rank % 2} here, by slurm: 10, 45" for rank in range(4)
    ]
    assert lines(done.stdout) == expected, done.stdout + done.stderr
