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
from shardtensor.agree import made_everywhere
from shardtensor.device_mesh import forget_groups, whole_group
from shardtensor.distributed import joining
from shardtensor.distributed.groups import NamedGroups, UndefinedGroupError


class UninitializedManagerError(RuntimeError, Warning):
    """DistributedManager() before DistributedManager.initialize(). A Warning,
    too, for programs that catch PhysicsNeMo's by that kind."""

    def __init__(self):
        super().__init__(
            "DistributedManager(): call DistributedManager.initialize() first, "
            "once per process"
        )


PhysicsNeMoUninitializedDistributedManagerWarning = UninitializedManagerError
PhysicsNeMoUndefinedGroupError = UndefinedGroupError


class DistributedManager(NamedGroups):
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
            launch = joining.adopted()
        else:
            launch = _C.detect_launch()
            if launch.method != "single":
                joining.join(launch, pg_options=pg_options)
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
            local_rank = joining.local_rank_of(rank, world_size)
        launch = _C.Launch(rank, world_size, local_rank, addr, int(port), method)
        joining.join(launch, backend, pg_options)
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
        manager._drop_groups()
        manager._device = joining.device_of(launch, backend)
        manager._global_mesh = None
        manager._meshes = []
        manager._broadcast_buffers = False
        manager._find_unused_parameters = False
        cls._shared_state["manager"] = manager
        if manager._device.type == "cuda":
            torch.cuda.set_device(manager._device)
        atexit.register(cls._leave_quietly, os.getpid())

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
        manager._drop_groups()
        forget_groups(manager._meshes)
        if dist.is_initialized():
            print(end="", flush=True)  # nothing is, where the process ends here
            with _C.LeavesInTime():
                dist.destroy_process_group()

    @classmethod
    def _leave_quietly(cls, process):
        """Of the process that joined; one that it forks is none of the job."""
        if os.getpid() != process:
            return
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
        return joining.backend_of(_C.Launch())

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
        that the same program runs without a launcher. Ranks that are told different
        things all raise. Communication: a small reduction.

        `backend_override` is init_device_mesh's: axis name -> backend, options or
        both for the groups along this axis. An axis over all ranks gets a group
        of its own then; else it has the default one, in whose queue over NCCL halos
        stand behind the buckets of a DDP that was given no other group:

            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            mesh = manager.initialize_mesh((-1,), ("domain",), {"domain": options})
        """
        shape = made_everywhere(
            lambda: _C.complete_mesh_shape(mesh_shape, mesh_dim_names, self.world_size),
            lambda shape: f"initialize_mesh: {shape} {tuple(mesh_dim_names)}",
        )
        if not dist.is_initialized():
            dist.init_process_group(
                joining.name_in_torch(self.get_available_backend()),
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
