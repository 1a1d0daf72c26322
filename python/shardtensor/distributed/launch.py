"""Which rank this process is, as its launcher says in the environment."""

import dataclasses
import os
import re
from collections.abc import Mapping

METHOD_VARIABLES = (
    "SHARDTENSOR_DISTRIBUTED_INITIALIZATION_METHOD",
    "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD",
)
DEFAULT_PORT = 29500


class LaunchError(RuntimeError):
    """The environment does not say enough, or contradicts itself."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One process of a job. `method` is env, slurm, openmpi or single."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    method: str

    def __post_init__(self):
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"{self.method}: rank {self.rank} is outside a job of "
                f"{self.world_size} processes"
            )
        if self.local_rank < 0:
            raise LaunchError(f"{self.method}: local rank {self.local_rank} < 0")


def detect_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch that `environment` describes: torchrun's variables first, then
    SLURM's, then Open MPI's, else a single process. ENV, SLURM or OPENMPI in
    SHARDTENSOR_DISTRIBUTED_INITIALIZATION_METHOD chooses one instead; it is
    then an error if its variables are missing."""
    chosen = next(filter(None, map(environment.get, METHOD_VARIABLES)), None)
    if chosen is not None:
        return _method(chosen)(environment)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _env(environment)
    if "SLURM_PROCID" in environment:
        return _slurm(environment)
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _openmpi(environment)
    return Launch(0, 1, 0, "localhost", 0, "single")


def _method(name):
    methods = {"ENV": _env, "SLURM": _slurm, "OPENMPI": _openmpi}
    if name.upper() not in methods:
        raise LaunchError(
            f"{METHOD_VARIABLES[0]}={name!r}: expected one of {', '.join(methods)}"
        )
    return methods[name.upper()]


def _env(environment):
    rank = _integer(environment, "env", "RANK")
    return Launch(
        rank,
        _integer(environment, "env", "WORLD_SIZE"),
        _integer(environment, "env", "LOCAL_RANK", default=rank),
        environment.get("MASTER_ADDR", "localhost"),
        _integer(environment, "env", "MASTER_PORT", default=DEFAULT_PORT),
        "env",
    )


def _slurm(environment):
    ranks = _integer(environment, "slurm", "SLURM_NTASKS", "SLURM_NPROCS")
    return Launch(
        _integer(environment, "slurm", "SLURM_PROCID"),
        ranks,
        _integer(environment, "slurm", "SLURM_LOCALID"),
        _slurm_address(environment, ranks),
        _slurm_port(environment),
        "slurm",
    )


def _slurm_address(environment, ranks):
    """The node of rank 0: the first one of the job step."""
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environment.get(variable):
            return first_host(environment[variable])
    if "SLURM_LAUNCH_NODE_IPADDR" in environment:
        return environment["SLURM_LAUNCH_NODE_IPADDR"]
    if ranks == 1:
        return "localhost"
    raise LaunchError(
        "slurm: no address of rank 0; expected MASTER_ADDR or SLURM_JOB_NODELIST"
    )


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: first_host("gpu[03-05,9],cpu1") is
    "gpu03"."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _slurm_port(environment):
    """Jobs that share a node get ports of their own."""
    job = _integer(environment, "slurm", "SLURM_JOB_ID", default=0)
    step = 20000 + job % 20000 if job else DEFAULT_PORT
    return _integer(environment, "slurm", "MASTER_PORT", default=step)


def _openmpi(environment):
    ranks = _integer(environment, "openmpi", "OMPI_COMM_WORLD_SIZE")
    here = _integer(environment, "openmpi", "OMPI_COMM_WORLD_LOCAL_SIZE", default=ranks)
    if here < ranks and "MASTER_ADDR" not in environment:
        raise LaunchError(
            f"openmpi: {ranks} processes on several nodes ({here} here) need "
            "MASTER_ADDR, the address of rank 0: mpirun -x MASTER_ADDR=..."
        )
    return Launch(
        _integer(environment, "openmpi", "OMPI_COMM_WORLD_RANK"),
        ranks,
        _integer(environment, "openmpi", "OMPI_COMM_WORLD_LOCAL_RANK"),
        environment.get("MASTER_ADDR", "localhost"),
        _integer(environment, "openmpi", "MASTER_PORT", default=DEFAULT_PORT),
        "openmpi",
    )


def _integer(environment, method, *names, default=None):
    """The first of these variables that is set."""
    for name in names:
        if name in environment:
            try:
                return int(environment[name])
            except ValueError:
                raise LaunchError(
                    f"{method}: {name}={environment[name]!r} is not an integer"
                ) from None
    if default is None:
        raise LaunchError(
            f"{method}: {' or '.join(names)} is not set; was the program "
            "started by this launcher?"
        )
    return default
