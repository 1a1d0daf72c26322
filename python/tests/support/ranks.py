"""Run test bodies on several ranks, quickly.

A test reads as one function; its body runs on every rank at once:

    from ranks import ranks, partitions, shard, sharded, assert_close, check_op

    @ranks(1, 2, 3, 4, "2x2")                 # one pytest case per mesh
    @pytest.mark.parametrize("stride", [1, 2])
    def test_conv(mesh, stride):              # mesh: a DeviceMesh, see rig.py
        x = torch.arange(24.0).reshape(1, 1, 24)
        for sizes in partitions(24, mesh.size()):
            s = shard(x, mesh, [Shard(2)], {2: sizes})
            assert_close(s * 2, x * 2)        # shape, dtype, this rank's piece
            check_op(                         # values, gradients, 2nd order
                lambda x, w: F.conv1d(x, w, stride=stride),
                sharded(x.requires_grad_(), [Shard(2)], {2: sizes}),
                torch.randn(1, 1, 3, requires_grad=True),  # stays plain
                mesh=mesh, second_order=True)

What there is:
  ranks(1, 2, "2x2", ..., timeout=300)   the decorator
  run(mesh, fn, *args)                  fn(device_mesh, *args) on all ranks;
                                        a list with what each rank returned
  run_isolated(n, fn, *args)            fresh processes, for tests that kill a
                                        rank or break a group; fn(*args), one
                                        Outcome per rank, never raises.
                                        world=False: nobody has joined yet
  uneven, partitions                    piece sizes to sweep
  shard, sharded, assert_close, check_op, from_spec, piece
                                        the oracle, see oracle.py

`fn` and arguments travel by pickle; functions must be module level. A body
may use pytest.raises, pytest.skip and picklable fixtures (tmp_path). Each body
starts with the same seed on every rank, default dtype float32 and the
package's default settings (modes, policies, no DistributedManager). The world
(torch.distributed's default group) is exactly the ranks of the mesh.

How: one process (the *seed*) imports torch once and never computes; workers
are forked from it, a pool per number of ranks, and live from test to test.
Where ranks disagree about the outcome, or have made many process groups, whose
threads look for messages for ever, the pool is replaced, which costs 0.1 s. A
body runs 1 ms after it is called. A test file that needs more modules which take
seconds to import names them, PRELOAD = ("h5py",): its workers come from a seed that
has imported them, too, once for all; others' workers end then. () is none at all.
"""

import ast
import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import oracle
import pytest
import rig
from oracle import (  # noqa: F401  for tests: one import line
    assert_close,
    check_op,
    from_spec,
    partitions,
    piece,
    shard,
    sharded,
    uneven,
)

HERE = Path(__file__).resolve().parent  # on the path, as is the package's folder
# How long the other ranks may still take once one has failed, in seconds.
GRACE = 3.0
# Of a body, and of a message in it: compiling takes a minute on a busy machine.
LIMIT = 300.0
GROUP_LIMIT = 240.0
MANY_THREADS = 64  # of a worker that waits for its next body
AXIS_NAMES = {1: ("domain",), 2: ("domain_h", "domain_w")}
PRELOAD = ("torch._dynamo",)  # much of PyTorch imports it, torch.manual_seed for one


class RankError(Exception):
    """What went wrong, rank by rank."""


@dataclasses.dataclass
class Outcome:
    """What one rank's body came to. kind: ok, error, skip, died or timeout."""

    kind: str
    value: object = None
    text: str = ""
    layouts: tuple = ()  # the layouts that assert_close met, in order


# ---- the decorator ----------------------------------------------------------


def ranks(*meshes, timeout=LIMIT):
    """Makes a test body run on every rank of each mesh: 3 or "2x2"."""

    def decorate(body):
        parameters = list(inspect.signature(body).parameters.values())
        assert parameters[0].name == "mesh", "the body's first argument is mesh"

        @functools.wraps(body)
        def test(ranks, **arguments):
            __tracebackhide__ = True
            outcomes = _pool(ranks, body).call(ranks, body, (), arguments, timeout)
            _report(outcomes)

        test.body = body
        parameter = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature(
            [p.replace(kind=p.KEYWORD_ONLY) for p in parameters[1:]] + [parameter]
        )
        del test.__wrapped__  # pytest would ask it for a fixture named mesh
        return pytest.mark.parametrize("ranks", [str(m) for m in meshes])(test)

    return decorate


def run(mesh, fn, *args, timeout=LIMIT):
    """fn(device_mesh, *args) on each rank of mesh (3, or "2x2"): the results."""
    outcomes = _pool(str(mesh), fn).call(str(mesh), fn, args, {}, timeout)
    bad = [o for o in outcomes if o.kind != "ok"]
    if bad:
        raise RankError(_describe(outcomes))
    return [o.value for o in outcomes]


def run_isolated(
    count, fn, *args, timeout=LIMIT, group_timeout=GROUP_LIMIT, world=True
):
    """fn(*args) on `count` fresh ranks with a world of their own: Outcomes."""
    pool = Pool(count, _seed_of(fn), group_timeout, world)
    try:
        # One rank's failure is the point of such a test: wait for the others.
        return pool.call(None, fn, args, {}, timeout, grace=timeout)
    finally:
        pool.stop()


def _report(outcomes):
    __tracebackhide__ = True
    if all(o.kind == "skip" for o in outcomes):
        pytest.skip(outcomes[0].text)
    if any(o.kind != "ok" for o in outcomes):
        pytest.fail(_describe(outcomes), pytrace=False)
    if any(o.layouts != outcomes[0].layouts for o in outcomes):
        lines = [f"rank {r}: {'; '.join(o.layouts)}" for r, o in enumerate(outcomes)]
        pytest.fail("layouts differ between ranks\n" + "\n".join(lines), pytrace=False)


def _describe(outcomes):
    by_text = {}
    for rank, outcome in enumerate(outcomes):
        text = "finished" if outcome.kind == "ok" else f"{outcome.kind}\n{outcome.text}"
        by_text.setdefault(text, []).append(rank)
    parts = []
    for text, who in by_text.items():
        parts.append(f"---- rank {', '.join(map(str, who))}: {text}")
    return "\n".join(parts)


# ---- pools of workers -------------------------------------------------------

_pools = {}  # (number of ranks, preloaded modules) -> Pool
_seeds = {}  # preloaded modules -> Seed
_foreseen = []  # what seeds of later tests preload, in their order


def _shape(mesh):
    return tuple(int(n) for n in str(mesh).split("x"))


def _pool(mesh, fn):
    count = math.prod(_shape(mesh))
    seed = _seed_of(fn)
    key = count, seed.preload
    for other in [k for k in _pools if k[1] != seed.preload]:
        _pools.pop(other).stop()
    if key not in _pools or _pools[key].broken:
        if key in _pools:
            _pools[key].stop()
        _pools[key] = Pool(count, seed)
    return _pools[key]


def foresee(modules):
    """The modules whose functions ranks will run, in this order: the seed of the
    next ones imports what it preloads while tests of the former run."""
    _foreseen[:] = dict.fromkeys(map(_preload_of, modules))


def _preload_of(module):
    own = tuple(getattr(module, "PRELOAD", PRELOAD))
    return tuple(dict.fromkeys(PRELOAD + own)) if own else ()


def _seed_of(fn):
    preload = _preload_of(sys.modules[fn.__module__])
    if preload in _foreseen:
        del _foreseen[: _foreseen.index(preload) + 1]
    for needed in (preload, *_foreseen[:1]):
        if needed not in _seeds:
            _seeds[needed] = Seed(needed)
    return _seeds[preload]


class Seed:
    """A process that workers are forked from. It has imported torch and
    started no thread."""

    def __init__(self, preload):
        self.preload = preload
        self.socket, theirs = socket.socketpair()
        code = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parents[1])]}; "
        code += f"import ranks; ranks._serve_seed({theirs.fileno()}, {preload})"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()

    def request(self, message, descriptors=()):
        socket.send_fds(self.socket, [json.dumps(message).encode()], descriptors)
        reply = self.socket.recv(65536)
        if not reply:
            raise RankError("the process that forks test workers died; see its stderr")
        return json.loads(reply)

    def stop(self):
        self.socket.close()
        self.process.wait()


def _stop_all():
    for pool in _pools.values():
        pool.stop()
    _pools.clear()
    for seed in _seeds.values():
        seed.stop()
    _seeds.clear()


atexit.register(_stop_all)


class Pool:
    """`count` ranks with a world of their own."""

    def __init__(self, count, seed, group_timeout=GROUP_LIMIT, world=True):
        self.count = count
        self.seed = seed
        self.broken = False
        self.folder = tempfile.mkdtemp(prefix="shardtensor-ranks-")
        pairs = [socket.socketpair() for _ in range(count)]
        message = {"fork": count, "folder": self.folder, "timeout": group_timeout}
        message["port"] = None if world else _free_port()
        theirs = [pair[1] for pair in pairs]
        self.pids = seed.request(message, [s.fileno() for s in theirs])
        for end in theirs:
            end.close()
        self.pipes = [connection.Connection(pair[0].detach()) for pair in pairs]

    def call(self, mesh, fn, args, kwargs, timeout, grace=GRACE):
        path = inspect.getsourcefile(fn)
        # Apart, for arguments may be of classes of the test file.
        call = pickle.dumps((fn.__qualname__, mesh, args, kwargs))
        # A script's own functions, without what it does as a program.
        module = "script" if fn.__module__ == "__main__" else fn.__module__
        job = pickle.dumps((path, module, call))
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(job)
        outcomes = self._collect(timeout, grace)
        # An error that all ranks raise alike leaves no message under way.
        kinds = {(o.kind, o.text.rstrip().rsplit("\n", 1)[-1]) for o in outcomes}
        lost = any(o.kind in ("died", "timeout") for o in outcomes)
        lost = lost or any(rig.is_lost(o.text) for o in outcomes)
        self.broken = lost or len(kinds) > 1 or self._threads() > MANY_THREADS
        return outcomes

    def _threads(self):
        tasks = (f"/proc/{pid}/task" for pid in self.pids if pid)
        return max((len(os.listdir(t)) for t in tasks if os.path.isdir(t)), default=0)

    def _collect(self, timeout, grace):
        outcomes = [None] * self.count
        deadline = time.monotonic() + timeout
        waiting = dict(zip(self.pipes, range(self.count), strict=True))
        while waiting:
            left = deadline - time.monotonic()
            ready = connection.wait(list(waiting), max(left, 0))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                outcomes[rank] = self._receive(pipe, rank)
                if outcomes[rank].kind in ("error", "died"):
                    deadline = min(deadline, time.monotonic() + grace)
        for rank in waiting.values():
            outcomes[rank] = self._stuck(rank)
        return outcomes

    def _receive(self, pipe, rank):
        try:
            return Outcome(*pipe.recv())
        except (EOFError, ConnectionResetError):
            status = self.seed.request({"wait": self.pids[rank]})
            self.pids[rank] = None
            return Outcome("died", status, f"{_exit_text(status)}\n{self._stack(rank)}")

    def _stuck(self, rank):
        os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.1)
        return Outcome("timeout", None, "still busy here:\n" + self._stack(rank))

    def _stack(self, rank):
        with open(os.path.join(self.folder, f"stack{rank}")) as file:
            return file.read()

    def stop(self):
        for pipe in self.pipes:
            pipe.close()
        for pid in filter(None, self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.seed.request({"wait": pid})
        shutil.rmtree(self.folder, ignore_errors=True)
        self.pids = []


def _free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _exit_text(status):
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


# ---- in the seed and in the workers -----------------------------------------


def _serve_seed(descriptor, preload):
    gc.disable()
    import torch
    import torch.distributed.tensor  # noqa: F401

    import shardtensor  # noqa: F401

    rig.prepare()
    for name in filter(rig.may_preload, preload):
        module, _, function = name.partition(":")
        module = importlib.import_module(module)
        if function:  # not while its module is imported: tracebacks take long then
            getattr(module, function)()
    gc.freeze()  # what was imported stays: collections need not visit it
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    control = socket.socket(fileno=descriptor)
    children = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 65536, 64)
        if not data:
            break
        message = json.loads(data)
        if "fork" in message:
            reply = _fork_workers(control, message, descriptors)
            children.update(reply)
        else:
            _, status = os.waitpid(message["wait"], 0)
            children.discard(message["wait"])
            reply = os.waitstatus_to_exitcode(status)
        control.send(json.dumps(reply).encode())
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _fork_workers(control, message, descriptors):
    pids = []
    for rank, mine in enumerate(descriptors):
        pid = os.fork()
        if pid == 0:
            control.close()
            for other in descriptors:
                if other != mine:
                    os.close(other)
            _worker(mine, rank, message)
        pids.append(pid)
    for descriptor in descriptors:
        os.close(descriptor)
    return pids


def _worker(descriptor, rank, message):
    try:
        stack = open(os.path.join(message["folder"], f"stack{rank}"), "w")  # noqa: SIM115
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGUSR1, stack)
        pipe = connection.Connection(descriptor)
        _prepare(rank, message)
        while True:
            pipe.send(_outcome(*pickle.loads(pipe.recv_bytes())))
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except BaseException:  # noqa: BLE001  whatever it is, the rank is lost
        traceback.print_exc()
        os._exit(1)


def _prepare(rank, message):
    """One thread, a launcher's environment and, where asked for, the world."""
    import torch
    import torch.distributed as dist

    count = message["fork"]
    torch.set_num_threads(1)
    rig.enter(rank)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank),
        MASTER_ADDR="localhost", MASTER_PORT=str(message["port"] or 29500),
    )  # fmt: skip
    if message["port"] is None:
        store = dist.FileStore(os.path.join(message["folder"], "store"), count)
        timeout = timedelta(seconds=message["timeout"])
        dist.init_process_group(
            rig.BACKEND, store=store, rank=rank, world_size=count, timeout=timeout
        )
        # Gloo's ranks connect one by one: nobody leaves before all have.
        store.set(f"connected {rank}", "")
        store.wait([f"connected {other}" for other in range(count)], timeout)


def _outcome(path, module, call):
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    _restore_settings()
    _let_ranks_go_first()
    oracle.layouts.clear()
    try:
        with _on_device():
            file = _load(path, module)
            name, mesh, args, kwargs = pickle.loads(call)
            args = [_to_device(x) for x in args]
            kwargs = {key: _to_device(x) for key, x in kwargs.items()}
            fn = getattr(file, name)
            fn = getattr(fn, "body", fn)
            mesh = [] if mesh is None else [_mesh(_shape(mesh))]
            value = fn(*mesh, *args, **kwargs)
            rig.finish()
        pickle.dumps(value)
    except BaseException as error:  # noqa: BLE001  reported by the caller
        with contextlib.suppress(Exception):  # of what the next body finds
            rig.finish()
        if isinstance(error, pytest.skip.Exception):
            return "skip", None, str(error)
        return "error", None, _format(error)
    return "ok", value, "", tuple(oracle.layouts)


def _to_device(argument):
    """Tensors and modules were made in pytest's process."""
    import torch

    kinds = torch.Tensor, torch.nn.Module
    return argument.to(rig.DEVICE) if isinstance(argument, kinds) else argument


def _on_device():
    """What a body makes without naming a device is on the rig's."""
    if rig.DEVICE == "cpu":
        return contextlib.nullcontext()
    return rig.device_of(int(os.environ["RANK"]))


def _restore_settings():
    """What an earlier body may have left, above all one that failed."""
    import shardtensor as st

    st.ShardTensor.set_promotion_mode(st.TensorPromotionMode.SILENT)
    st.set_fallback_mode("warn")
    st.reset_fallback_counts()
    st.set_attention_transport("auto")
    st.set_point_transport("auto")
    # Tests' tensors are small; what a device does with large ones is tested, too.
    st.set_conv_overlap_bytes(None if rig.DEVICE == "cpu" else 0)
    st.set_gradient_policy("coalesced")
    st.set_gradient_bucket_bytes(25 << 20)
    st.set_check_mode(False)
    st.set_random_policy("one_device")
    st.set_communication_timeout(0)
    st.distributed.DistributedManager._shared_state = {}


def _let_ranks_go_first():
    """gloo's threads poll while a message is not yet awaited: on a machine with
    fewer cores than ranks they hold up the ranks that they wait for."""
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.exists() else ():
        with contextlib.suppress(OSError):  # the thread ended since it was listed
            if (task / "comm").read_text() == "gloo_tcp_loop\n":
                os.setpriority(os.PRIO_PROCESS, int(task.name), 15)


def _format(error):
    frames = traceback.TracebackException.from_exception(error)
    # The reader wants the test, not the way to it.
    while len(frames.stack) > 1 and frames.stack[0].filename == __file__:
        frames.stack.pop(0)
    return "".join(frames.format())


class _RewrittenAsserts(importlib.machinery.SourceFileLoader):
    """Loads a test file with pytest's explanations of failed assertions, from where
    pytest keeps what it made of the file."""

    def get_code(self, fullname):
        from _pytest.assertion import rewrite

        path = Path(self.path)
        kept = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if code := rewrite._read_pyc(path, kept):
            return code
        source = self.get_data(self.path)
        tree = ast.parse(source, self.path)
        rewrite.rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


@functools.cache
def _load(path, name):
    if name == __name__:
        return sys.modules[name]
    loader = _RewrittenAsserts(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def _mesh(shape):
    from torch.distributed.device_mesh import init_device_mesh

    names = AXIS_NAMES.get(len(shape))
    return init_device_mesh(rig.DEVICE, shape, mesh_dim_names=names)
