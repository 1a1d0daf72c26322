"""Two machines on one: network namespaces with addresses of their own and a slow
link between them. For root on Linux only."""

import contextlib
import os
import shutil
import signal
import subprocess

LINK = "delay 1ms rate 200mbit"  # tc netem


class Nodes:
    """with Nodes() as nodes: nodes.start(0, [program, ...]), nodes.vanish(1)."""

    def __init__(self):
        self.names = [f"shardtensor-{os.getpid()}-{node}" for node in range(2)]
        self.addresses = [f"10.213.{os.getpid() % 250}.{node + 1}" for node in range(2)]
        self.started = []

    def __enter__(self):
        self.cleanup = contextlib.ExitStack()
        with self.cleanup:
            for name in self.names:
                call("ip", "netns", "add", name)
                self.cleanup.callback(call, "ip", "netns", "del", name)
            ends = [
                ("link0", "netns", self.names[0]),
                ("link0", "netns", self.names[1]),
            ]
            first, second = ends
            call("ip", "link", "add", *first, "type", "veth", "peer", "name", *second)
            for node, address in enumerate(self.addresses):
                self.inside(
                    node, "ip", "address", "add", f"{address}/24", "dev", "link0"
                )
                self.inside(node, "ip", "link", "set", "link0", "up")
                self.inside(node, "ip", "link", "set", "lo", "up")
                netem = ["tc", "qdisc", "add", "dev", "link0", "root", "netem"]
                # Not every kernel can slow a link down.
                subprocess.run(
                    [*self.prefix(node), *netem, *LINK.split()], capture_output=True
                )
            self.cleanup = self.cleanup.pop_all()
        return self

    def __exit__(self, *_):
        with self.cleanup:
            for process in self.started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for process in self.processes():  # what launchers left
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def start(self, node, command, **env):
        """A program on a node; its output is text in process.stdout."""
        self.started.append(
            subprocess.Popen(
                [*self.prefix(node), *map(str, command)],
                env=os.environ | {"GLOO_SOCKET_IFNAME": "link0", **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return self.started[-1]

    def vanish(self, node):
        """Nothing that it sends arrives, and nothing says so."""
        self.inside(node, "ip", "link", "set", "link0", "down")

    def processes(self):
        listed = [
            subprocess.run(["ip", "netns", "pids", name], capture_output=True)
            for name in self.names
        ]
        return [int(pid) for done in listed for pid in done.stdout.split()]

    def inside(self, node, *command):
        call(*self.prefix(node), *command)

    def prefix(self, node):
        """A name of its own, too: MPI shares memory with what has the same name."""
        named = f'hostname node{node} && exec "$@"'
        alone = ["unshare", "--uts", "sh", "-c", named, "sh"]
        return ["ip", "netns", "exec", self.names[node], *alone]


def call(*command):
    subprocess.run(command, check=True)


def can_make_nodes():
    """Root, and a kernel that lets it."""
    programs = map(shutil.which, ("ip", "tc", "unshare"))
    if not all(programs) or os.geteuid() != 0:
        return False
    name = f"shardtensor-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    if made.returncode == 0:
        call("ip", "netns", "del", name)
    return made.returncode == 0
