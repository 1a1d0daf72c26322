"""SLURM of our own: a controller and a daemon for each node, in a folder of the test
and gone with it. For root on Linux, with Debian's slurmctld, slurmd, slurm-client."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo")
TASKS = 4  # that a node takes
LIMIT = 30  # seconds until nodes take jobs

# Without munge, cgroups and accounting: nobody else speaks to these daemons.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
"""
NODE = (
    "NodeName={name} NodeAddr={address} NodeHostname={host} CPUs={tasks} "
    "Gres=gpu:{tasks}\n"
)
PARTITION = "PartitionName=test Nodes=ALL Default=YES State=UP\n"
# Devices that are there on every machine stand for GPUs.
GPUS = "".join(
    f"Name=gpu File=/dev/{name}\n" for name in ("full", "null", "tty", "zero")
)


def missing():
    """Why there can be no SLURM here; empty where there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)}: not installed"
    return "" if os.geteuid() == 0 else "its daemons need root"


class Slurm:
    """with Slurm(folder) as slurm: slurm.run("srun", "-n", 2, program). One node, this
    machine, or those of a Nodes."""

    def __init__(self, folder, nodes=None):
        self.folder = Path(folder)
        self.nodes = nodes
        self.names = ["localhost"] if nodes is None else ["node0", "node1"]
        self.daemons = []

    def __enter__(self):
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(self.configuration())
        (self.folder / "gres.conf").write_text(GPUS)
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        try:
            self.start(0, "slurmctld", "-D")
            for node, name in enumerate(self.names):
                (self.folder / f"spool-{name}").mkdir()
                self.start(node, "slurmd", "-D")
            self.wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for daemon in reversed(self.daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()

    def configuration(self):
        host = socket.gethostname().partition(".")[0]
        hosts, addresses = [host], ["127.0.0.1"]
        if self.nodes is not None:
            hosts, addresses = self.names, self.nodes.addresses
            lines = [f"{a} {name}\n" for a, name in zip(addresses, hosts, strict=True)]
            self.hosts = self.folder / "hosts"
            self.hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))
        nodes = [
            NODE.format(name=name, address=address, host=host, tasks=TASKS)
            for name, address, host in zip(self.names, addresses, hosts, strict=True)
        ]
        head = CONFIGURATION.format(
            folder=self.folder,
            ports=free_ports(2),
            controller=f"{hosts[0]}({addresses[0]})",
        )
        return "".join([head, *nodes, PARTITION])

    def on(self, node, command):
        """The command line that runs there; the nodes know each other's names."""
        if self.nodes is None:
            return command
        # Not by `ip netns exec`: it hides cgroups, for which slurmd looks.
        network = f"--net=/run/netns/{self.nodes.names[node]}"
        named = f"hostname {self.names[node]} && mount --bind {self.hosts} /etc/hosts"
        apart = ["unshare", "--uts", "--mount", "sh", "-c", f'{named} && exec "$@"']
        return ["nsenter", network, *apart, "sh", *command]

    def start(self, node, *command):
        self.daemons.append(
            subprocess.Popen(
                self.on(node, command),
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=(self.folder / f"{command[0]}-{node}.log").open("w"),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        )

    def wait_for_nodes(self):
        """Until all are idle."""
        began = time.monotonic()
        while set(self.run("sinfo", "-h", "-N", "-o", "%T").stdout.split()) != {"idle"}:
            assert time.monotonic() - began < LIMIT, self.logs()
            time.sleep(0.1)

    def run(self, *command, timeout=120, **environment):
        """A finished command on the first node; its output is text."""
        return subprocess.run(
            self.on(0, [*map(str, command)]),
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=self.folder,
        )

    def logs(self):
        return "\n".join(log.read_text()[-4000:] for log in self.folder.glob("*.log"))


def _die_with_parent():
    """Also of a test that is killed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]
