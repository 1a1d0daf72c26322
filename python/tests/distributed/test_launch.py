"""What launchers say in the environment."""

import pytest

from shardtensor._C import address_of_rank_0, first_host
from shardtensor.distributed import Launch, LaunchError, detect_launch

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "100042",
    "SLURM_STEP_NODELIST": "gpu[07-08],cpu1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
METHOD = "SHARDTENSOR_DISTRIBUTED_INITIALIZATION_METHOD"
# What sbatch --nodelist=n[7-8] sets in the script itself.
BATCH = {
    "ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "9", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "n[7-8]",
}  # fmt: skip


def test_each_launcher_is_understood():
    assert detect_launch(TORCHRUN) == Launch(5, 8, 1, "node0", 1234, "env")
    assert detect_launch(SLURM) == Launch(3, 4, 1, "gpu07", 24042, "slurm")
    assert detect_launch(OPENMPI) == Launch(1, 2, 1, "localhost", 29500, "openmpi")
    assert detect_launch({}) == Launch(0, 1, 0, "localhost", 0, "single")


def test_torchrun_wins_unless_another_method_is_chosen():
    everything = {**TORCHRUN, **SLURM, **OPENMPI}
    assert detect_launch(everything).method == "env"
    assert detect_launch({**SLURM, **OPENMPI}).method == "slurm"
    assert detect_launch({**everything, METHOD: "OPENMPI"}).method == "openmpi"
    chosen = {**everything, "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD": "slurm"}
    assert detect_launch(chosen).method == "slurm"
    assert detect_launch({**chosen, METHOD: "ENV"}).method == "env"


def test_the_address_of_rank_0_under_slurm():
    assert detect_launch({**SLURM, "MASTER_ADDR": "here"}).address == "here"
    assert detect_launch({**SLURM, "MASTER_PORT": "77"}).port == 77
    rest = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}
    assert detect_launch({**rest, "SLURM_JOB_NODELIST": "a1,a2"}).address == "a1"
    with_ip = {**rest, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}
    assert detect_launch(with_ip).address == "10.0.0.1"
    with pytest.raises(LaunchError, match="no address of rank 0"):
        detect_launch(rest)


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("gpu[9,11]", "gpu9"),
        ("rack[1-2]-node[4-7]", "rack1-node4"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "environment, message",
    [
        ({METHOD: "PBS"}, "'PBS': expected one of ENV, SLURM, OPENMPI"),
        ({METHOD: "ENV"}, "env: RANK is not set"),
        ({METHOD: "SLURM"}, "slurm: SLURM_PROCID is not set"),
        ({"RANK": "0"}, "env: RANK is set, WORLD_SIZE is not; expected both"),
        ({"WORLD_SIZE": "2"}, "env: WORLD_SIZE is set, RANK is not; expected both"),
        ({**BATCH, "SLURM_NTASKS": "4"}, "a job of 4 tasks; expected srun before"),
        ({"SLURM_PROCID": "0"}, "slurm: SLURM_NTASKS or SLURM_NPROCS is not set"),
        ({**TORCHRUN, "RANK": "x"}, "RANK='x' is not an integer"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 is outside a job of 8 processes"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "local rank -1 < 0"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "port 70000, expected 0 to 65535"),
    ],
)
def test_wrong_environments_say_what_is_missing(environment, message):
    with pytest.raises(LaunchError, match=message):
        detect_launch(environment)


def test_steps_and_jobs_that_share_a_node_have_ports_of_their_own():
    steps = [{**SLURM, "SLURM_STEP_ID": str(step)} for step in range(3)]
    jobs = [{**SLURM, "SLURM_JOB_ID": str(job)} for job in range(100042, 100100)]
    ports = {detect_launch(each).port for each in steps + jobs}
    assert len(ports) == 2 + len(jobs)
    assert all(20000 <= port < 32000 for port in ports)


def test_the_script_of_a_batch_job_is_one_process():
    assert detect_launch(BATCH) == Launch()
    assert detect_launch({**BATCH, "SLURM_NTASKS": "1"}) == Launch()
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    task = detect_launch({**BATCH, **step, "SLURM_PROCID": "3"})
    assert (task.rank, task.world_size, task.local_rank) == (3, 4, 1)
    assert task.method == "slurm" and task.address == "n7"


def test_mpirun_on_several_nodes_must_say_where_rank_0_is():
    assert address_of_rank_0(detect_launch(OPENMPI)) == "localhost"
    several = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(LaunchError, match="2 processes on several nodes need MASTER"):
        address_of_rank_0(detect_launch(several))
    named = detect_launch({**several, "MASTER_ADDR": "n1"})
    assert address_of_rank_0(named) == "n1"


def test_a_launch_is_a_value_and_checks_itself(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert detect_launch() == detect_launch(TORCHRUN) != Launch()
    assert repr(detect_launch()) == (
        "Launch(rank=5, world_size=8, local_rank=1, address='node0', port=1234, "
        "method='env')"
    )
    with pytest.raises(LaunchError, match="rank 2 is outside a job of 2 processes"):
        Launch(2, 2)
    assert issubclass(LaunchError, ValueError)
