"""One object that knows the job: rank, device, groups and the global mesh."""

import atexit
import contextlib
import os
import sys
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardtensor import _C
from shardtensor.device_mesh import forget_groups, whole_group
from shardtensor.distributed import mpi
from shardtensor.distributed.config import ProcessGroupConfig, ProcessGroupNode


class UninitializedManagerError(RuntimeError, Warning):
    """DistributedManager() before DistributedManager.initialize(). A Warning,
    too, for programs that catch PhysicsNeMo's by that kind."""

    def __init__(self):
        super().__init__(
            "DistributedManager(): call DistributedManager.initialize() first, "
            "once per process"
        )


class UndefinedGroupError(KeyError, ValueError):
    """A group or mesh axis that nobody has created."""

    def __init__(self, kind: str, name: str, known: Sequence[str]):
        super().__init__(name)
        known = ", ".join(known) or "none"
        self.message = f"no {kind} named {name!r}; there are: {known}"

    def __str__(self):
        return self.message


class GroupError(ValueError, RuntimeError, AssertionError):
    """A group that cannot be made. Of the kinds that this is: PhysicsNeMo's are
    AssertionErrors and ValueErrors."""


PhysicsNeMoUninitializedDistributedManagerWarning = UninitializedManagerError
PhysicsNeMoUndefinedGroupError = UndefinedGroupError


class DistributedManager:
    """The job of this process. `initialize()` joins it, once; afterwards every
    `DistributedManager()` is the same object.

        DistributedManager.initialize()
        manager = DistributedManager()
        mesh = manager.initialize_mesh((-1, 2), ("data", "domain"))
        x = x.to(manager.device)

    Thread safety / ordering: initialize, cleanup, initialize_mesh,
    get_mesh_group and the create functions communicate: all ranks call them in
    the same order.
    """

    # Holds the one object. Tests that want a new job assign {}: process groups
    # stay, and initialize() finds them.
    _shared_state: dict[str, "DistributedManager"] = {}

    def __new__(cls):
        if not cls.is_initialized():
            raise UninitializedManagerError()
        return cls._shared_state["manager"]

    # ---- joining and leaving ------------------------------------------------

    @classmethod
    def is_initialized(cls) -> bool:
        return "manager" in cls._shared_state

    @classmethod
    def initialize(cls, pg_options=None) -> None:
        """Joins the job that the environment describes (see detect_launch), or
        the process group that the program has made already. With one process
        and no launcher nothing is opened. SHARDTENSOR_DISTRIBUTED_BACKEND is
        nccl, mpi or gloo (default: nccl with CUDA devices, else mpi under
        mpirun where the library was built with MPI, else gloo);
        SHARDTENSOR_DISTRIBUTED_TIMEOUT bounds every collective, in seconds
        (default: 1800). `pg_options` are init_process_group's, for the default
        group; over NCCL without any its kernels go before others (a halo before
        the convolution beside it)."""
        if cls.is_initialized():
            warnings.warn(
                "DistributedManager is initialized already; this call does nothing",
                stacklevel=2,
            )
            return
        if dist.is_initialized():
            launch = _adopt()
        else:
            launch = _C.detect_launch()
            if launch.method != "single":
                _join(launch, pg_options=pg_options)
        cls._create(launch)

    @classmethod
    def setup(
        cls,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int | None = None,
        addr: str = "localhost",
        port: int | str = 12355,
        backend: str | None = None,
        method: str = "env",
        pg_options=None,
    ) -> None:
        """initialize() for a program that knows its place by other means.
        Without local_rank it is the rank, modulo the number of GPUs if there are
        any; without backend, the best there is."""
        if local_rank is None:
            local_rank = _local_rank(rank, world_size)
        launch = _C.Launch(rank, world_size, local_rank, addr, int(port), method)
        _join(launch, backend, pg_options)
        cls._create(launch, backend)

    @staticmethod
    def initialize_env() -> None:
        """initialize() from torchrun's variables, whatever else is set."""
        _setup_as("ENV")

    @staticmethod
    def initialize_slurm(port: int | str) -> None:
        """The same from SLURM's; rank 0 listens at `port`."""
        _setup_as("SLURM", port=port)

    @staticmethod
    def initialize_open_mpi(addr: str, port: int | str) -> None:
        """The same from Open MPI's; rank 0 listens at `addr` and `port`."""
        _setup_as("OPENMPI", addr=addr, port=port)

    @classmethod
    def _create(cls, launch, backend=None):
        manager = object.__new__(cls)
        manager._launch = launch
        manager._device = _device(launch, backend)
        manager._groups = {}
        manager._group_ranks = {}
        manager._global_mesh = None
        manager._meshes = []
        manager._broadcast_buffers = False
        manager._find_unused_parameters = False
        cls._shared_state["manager"] = manager
        if manager._device.type == "cuda":
            torch.cuda.set_device(manager._device)
        atexit.register(cls._leave_quietly)

    @classmethod
    def cleanup(cls, barrier: bool = False) -> None:
        """Leaves the job; initialize() may follow. `barrier` waits for the
        other ranks first. Where the way out waits for them, as NCCL's does, the
        process ends with status 1 after SHARDTENSOR_DISTRIBUTED_TIMEOUT."""
        if not cls.is_initialized():
            return
        manager = cls._shared_state.pop("manager")
        atexit.unregister(cls._leave_quietly)
        if barrier and dist.is_initialized():
            dist.barrier()
        manager._groups.clear()
        forget_groups(manager._meshes)
        if dist.is_initialized():
            print(end="", flush=True)  # nothing is, where the process ends here
            with _C.LeavesInTime():
                dist.destroy_process_group()

    @classmethod
    def _leave_quietly(cls):
        with contextlib.suppress(RuntimeError):
            if _ended_by_error() and _uses_nccl():
                # NCCL's way out waits for the other ranks, and they for this one.
                dist.distributed_c10d._abort_process_group()
                atexit.unregister(cls._leave_quietly)
            else:
                cls.cleanup()

    # ---- this process -------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process among all of the job."""
        return self._launch.rank

    @property
    def world_size(self) -> int:
        """How many processes the job has; 1 without a launcher."""
        return self._launch.world_size

    @property
    def local_rank(self) -> int:
        """The rank on this node."""
        return self._launch.local_rank

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors belong: one GPU per rank, else the host."""
        return self._device

    @property
    def cuda(self) -> bool:
        """Whether that is a GPU."""
        return self._device.type == "cuda"

    @property
    def distributed(self) -> bool:
        """Whether a launcher started this process (one rank counts)."""
        return self._launch.method != "single"

    @property
    def _distributed(self) -> bool:
        return self.distributed

    @property
    def _initialization_method(self) -> str:
        """env, slurm, openmpi, existing; the string "None" without a launcher."""
        return self._launch.method if self.distributed else "None"

    @staticmethod
    def get_available_backend() -> str:
        """What a program without a launcher gets: nccl, gloo, or what
        SHARDTENSOR_DISTRIBUTED_BACKEND says."""
        return _backend(_C.Launch())

    # ---- settings that programs hand to DistributedDataParallel -------------

    @property
    def broadcast_buffers(self) -> bool:
        """For DDP's argument of this name; nothing here reads it. False at first."""
        return self._broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self._broadcast_buffers = bool(value)

    @property
    def find_unused_parameters(self) -> bool:
        """The same; setting it to True warns of what that costs."""
        return self._find_unused_parameters

    @find_unused_parameters.setter
    def find_unused_parameters(self, value: bool) -> None:
        if value:
            warnings.warn(
                "find_unused_parameters=True makes DistributedDataParallel walk "
                "the graph in every step; use it only if parameters are unused",
                stacklevel=2,
            )
        self._find_unused_parameters = bool(value)

    # ---- the global mesh ----------------------------------------------------

    def initialize_mesh(
        self,
        mesh_shape: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: dict | None = None,
    ) -> DeviceMesh:
        """A mesh over all ranks. One entry of `mesh_shape` may be -1: with 8
        ranks, (-1, 2) is (4, 2). A single process gets a group of its own, so
        that the same program runs without a launcher.

        `backend_override` is init_device_mesh's: axis name -> backend, options or
        both for the groups along this axis. An axis over all ranks gets a group
        of its own then; else it has the default one, in whose queue over NCCL halos
        stand behind the buckets of a DDP that was given no other group:

            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            mesh = manager.initialize_mesh((-1,), ("domain",), {"domain": options})
        """
        shape = _C.complete_mesh_shape(mesh_shape, mesh_dim_names, self.world_size)
        if not dist.is_initialized():
            dist.init_process_group(
                _name_in_torch(self.get_available_backend()),
                store=dist.HashStore(),
                rank=0,
                world_size=1,
            )
        self._global_mesh = init_device_mesh(
            self.device.type,
            tuple(shape),
            mesh_dim_names=tuple(mesh_dim_names),
            backend_override=backend_override,
        )
        self._meshes.append(self._global_mesh)
        return self._global_mesh

    @property
    def global_mesh(self) -> DeviceMesh:
        """The mesh of initialize_mesh; one axis "world" if nobody called it."""
        if self._global_mesh is None:
            self.initialize_mesh((-1,), ("world",))
        return self._global_mesh

    def mesh(self, name: str | None = None) -> DeviceMesh:
        """One axis of the global mesh; the global mesh itself for None."""
        if name is None:
            return self.global_mesh
        if name not in self.mesh_dims:
            raise UndefinedGroupError("mesh axis", name, list(self.mesh_dims))
        return self.global_mesh[name]

    @property
    def mesh_dims(self) -> dict[str, int]:
        """Axis name -> number of ranks; empty before there is a mesh."""
        if self._global_mesh is None:
            return {}
        names = self._global_mesh.mesh_dim_names
        return dict(zip(names, self._global_mesh.shape, strict=True))

    def mesh_names(self) -> list[str]:
        return list(self.mesh_dims)

    def mesh_sizes(self) -> list[int]:
        return list(self.mesh_dims.values())

    def get_mesh_group(self, mesh: DeviceMesh) -> dist.ProcessGroup:
        """The group of all ranks of a mesh of any number of axes. Made on the
        first call, by the ranks of that mesh, then kept."""
        return whole_group(mesh)

    # ---- named groups -------------------------------------------------------

    @property
    def group_names(self) -> list[str]:
        return list(self._groups)

    def group(self, name: str | None = None) -> dist.ProcessGroup | None:
        """The named group, or this rank's group along the mesh axis of that
        name; None (torch's default group) for None."""
        if name is None:
            return None
        if name in self._groups:
            return self._groups[name]
        if name in self.mesh_dims:
            return self.global_mesh.get_group(name)
        raise UndefinedGroupError("group", name, [*self._groups, *self.mesh_dims])

    def group_size(self, name: str | None = None) -> int:
        if name is None:
            return self.world_size
        return dist.get_world_size(self.group(name))

    def group_rank(self, name: str | None = None) -> int:
        if name is None:
            return self.rank
        return dist.get_rank(self.group(name))

    def group_name(self, group: dist.ProcessGroup | None = None) -> str | None:
        """The name under which a group was created; None for the default."""
        if group is None:
            return None
        for name in [*self._groups, *self.mesh_dims]:
            if self.group(name) is group:
                return name
        raise UndefinedGroupError("group", str(group), self.group_names)

    @classmethod
    def create_process_subgroup(
        cls,
        name: str,
        size: int,
        group_name: str | None = None,
        verbose: bool = False,
        *,
        backend: str | None = None,
        pg_options=None,
    ) -> None:
        """Cuts the ranks (or each group called `group_name`) into groups of
        `size` consecutive ranks; `name` is then the one of this rank. `backend` and
        `pg_options` are new_group's."""
        manager = cls()
        parents = [list(range(manager.world_size))]
        if group_name is not None:
            parents = manager._ranks_of(group_name)
        if size < 1 or any(len(parent) % size for parent in parents):
            raise GroupError(
                f"create_process_subgroup: groups of {size} do not divide the "
                f"{len(parents[0])} ranks of {group_name or 'the job'}"
            )
        ranks = [
            parent[begin : begin + size]
            for parent in parents
            for begin in range(0, len(parent), size)
        ]
        manager._create_groups(name, ranks, verbose, backend, pg_options)

    @classmethod
    def create_orthogonal_process_group(
        cls,
        orthogonal_group_name: str,
        group_name: str,
        verbose: bool = False,
        *,
        backend: str | None = None,
        pg_options=None,
    ) -> None:
        """Groups that take one rank of each `group_name`: with groups [0, 1]
        and [2, 3] these are [0, 2] and [1, 3]. `backend` and `pg_options` are
        new_group's."""
        manager = cls()
        ranks = [
            list(column) for column in zip(*manager._ranks_of(group_name), strict=True)
        ]
        manager._create_groups(
            orthogonal_group_name, ranks, verbose, backend, pg_options
        )

    @classmethod
    def create_group_from_node(
        cls, node: ProcessGroupNode, parent: str | None = None, verbose: bool = False
    ) -> str:
        """The groups of a node of a ProcessGroupConfig, `node.size` ranks each
        within every group called `parent`, and those orthogonal to them, whose
        name is returned."""
        if node.size is None:
            raise GroupError(f"create_group_from_node: {node.name!r} has no size")
        cls.create_process_subgroup(node.name, node.size, parent, verbose)
        orthogonal = f"__orthogonal_to_{node.name}"
        cls.create_orthogonal_process_group(orthogonal, node.name, verbose)
        return orthogonal

    @classmethod
    def create_groups_from_config(
        cls, config: ProcessGroupConfig, verbose: bool = False
    ) -> None:
        """The groups of every node of a tree, see ProcessGroupConfig. A mesh of
        several axes says the same in one call: initialize_mesh((-1, 2), ("data",
        "model"))."""
        cls.create_group_from_node(config.root, verbose=verbose)
        for node in config.breadth_first():
            parent = node.name
            for child in config.children(node.name):
                # Siblings are orthogonal: each cuts what the one before left.
                parent = cls.create_group_from_node(child, parent, verbose)

    def _ranks_of(self, name):
        if name not in self._group_ranks:
            raise UndefinedGroupError("group", name, list(self._group_ranks))
        return self._group_ranks[name]

    def _create_groups(self, name, ranks, verbose, backend, pg_options):
        if name in self._groups:
            raise GroupError(f"there is a group named {name!r} already")
        if not self.distributed:
            raise GroupError(
                f"group {name!r}: this process was started without a launcher"
            )
        for members in ranks:
            group = dist.new_group(members, backend=backend, pg_options=pg_options)
            if self.rank in members:
                self._groups[name] = group
        self._group_ranks[name] = ranks
        if verbose and self.rank == 0:
            print(f"group {name!r}: {ranks}")

    def __repr__(self):
        return (
            f"DistributedManager(rank {self.rank} of {self.world_size}, "
            f"{self.device}, by {self._launch.method})"
        )


def _ended_by_error():
    """At exit: whether the program ends by an exception that nobody caught."""
    return getattr(sys, "last_value", None) is not None


def _uses_nccl():
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


def _setup_as(method, addr=None, port=None):
    """setup() with what one launcher says, and the caller where it says more."""
    variable = "SHARDTENSOR_DISTRIBUTED_INITIALIZATION_METHOD"
    launch = _C.detect_launch({**os.environ, variable: method})
    DistributedManager.setup(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        addr=launch.address if addr is None else addr,
        port=launch.port if port is None else port,
        method=launch.method,
    )


def _adopt():
    """The launch of a process group that the program made itself."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    told = os.environ.get("LOCAL_RANK")
    local_rank = int(told) if told else _local_rank(rank, world_size)
    return _C.Launch(rank, world_size, local_rank, "", 0, "existing")


def _local_rank(rank, world_size):
    """Where nobody tells it."""
    return rank % (torch.cuda.device_count() or world_size)


def _join(launch, backend=None, pg_options=None):
    if dist.is_initialized():
        raise RuntimeError("DistributedManager: there is a process group already")
    device = _device(launch, backend)
    backend = backend or _backend(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # c10d asks for the current one here and there
    dist.init_process_group(
        _name_in_torch(backend),
        **_meeting(launch),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=_C.time_limit(),
        pg_options=pg_options or _default_options(backend),
        device_id=device if device.type == "cuda" else None,
    )


def _default_options(backend):
    if backend != "nccl":
        return None
    if not dist.is_nccl_available():
        raise ValueError(
            "backend: nccl, which this PyTorch was built without; expected gloo or mpi"
        )
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = _C.time_limit()
    return options


def _meeting(launch):
    """Where the ranks meet: init_process_group's arguments."""
    address, limit = _C.address_of_rank_0(launch), _C.time_limit()
    # A launcher's store that has seen ranks before these.
    name = _C.name_in_launchers_store(launch, limit)
    if not name:
        return {"init_method": f"tcp://{address}:{launch.port}"}
    store = dist.TCPStore(address, launch.port, is_master=False, timeout=limit)
    return {"store": dist.PrefixStore(name, store)}


def _name_in_torch(backend):
    # With NCCL both, so that host tensors can be reduced next to device tensors.
    names = {"nccl": "cpu:gloo,cuda:nccl", "mpi": mpi.BACKEND}
    return names.get(backend, backend)


def _device(launch, backend=None):
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    return _C.choose_device(launch, gpus, backend or "")


def _backend(launch):
    return _C.choose_backend("", launch, _device(launch), _C.has_mpi())
