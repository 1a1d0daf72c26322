"""DistributedManager: one per process, from any launcher."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from jobs import ON_THE_HOST, free_port, values
from programs import ROOT
from ranks import ranks, run_isolated
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.distributed import (
    DistributedManager,
    GroupError,
    PhysicsNeMoUndefinedGroupError,
    PhysicsNeMoUninitializedDistributedManagerWarning,
    ProcessGroupConfig,
    ProcessGroupNode,
    UndefinedGroupError,
    UninitializedManagerError,
)


def initialize_from(environment):
    """In a worker: leaves its world and joins the one of `environment`."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update({k: v.replace("RANK", str(rank)) for k, v in environment.items()})
    DistributedManager.initialize()
    manager = DistributedManager()
    x = torch.tensor(float(manager.rank + 1))
    if manager.distributed:
        dist.all_reduce(x)
    text = repr(manager)
    DistributedManager.cleanup(barrier=True)
    assert not dist.is_initialized()
    assert not DistributedManager.is_initialized()
    return manager.rank, manager.world_size, manager.local_rank, x.item(), text


LAUNCHERS = {
    "env": {"RANK": "RANK", "WORLD_SIZE": "2", "LOCAL_RANK": "RANK"},
    "slurm": {
        "SLURM_PROCID": "RANK",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "RANK",
        "SLURM_STEP_NODELIST": "localhost",
    },
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "RANK",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "RANK",
        # No mpirun started them: see test_mpi.py.
        "SHARDTENSOR_DISTRIBUTED_BACKEND": "gloo",
    },
}


def launched(launcher, port):
    environment = {**LAUNCHERS[launcher], "MASTER_PORT": str(port)}
    return initialize_from({k: str(v) for k, v in environment.items()})


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_initialize_joins_the_job_of_each_launcher(launcher):
    got = values(run_isolated(2, launched, launcher, free_port()))
    for rank, (mine, size, local, total, text) in enumerate(got):
        assert (mine, size, local, total) == (rank, 2, rank, 3.0)
        assert f"rank {rank} of 2" in text and f"by {launcher}" in text


def single():
    got = initialize_from({})
    DistributedManager.initialize()
    manager = DistributedManager()
    assert not manager.distributed and not dist.is_initialized()
    mesh = manager.initialize_mesh((1, -1), ("a", "b"))
    assert mesh.shape == (1, 1)
    assert manager.group_size("a") == 1
    assert manager._initialization_method == "None" and not manager._distributed
    for kind in (GroupError, RuntimeError, AssertionError):
        with pytest.raises(kind, match="without a launcher"):
            DistributedManager.create_process_subgroup("g", 1)
    return got


def test_without_a_launcher_there_is_one_rank_and_no_group():
    got = values(run_isolated(1, single))
    assert got[0][:4] == (0, 1, 0, 1.0)


def test_torchrun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import torch, torch.distributed as dist
        from shardtensor.distributed import DistributedManager
        DistributedManager.initialize()
        m = DistributedManager()
        mesh = m.initialize_mesh((-1,), ("domain",))
        x = torch.ones(1)
        dist.all_reduce(x, group=m.group("domain"))
        print(f"{m!r} {m.group_rank('domain')} sum {x.item()}", flush=True)
        """)
    )
    environment = {**os.environ, **ON_THE_HOST, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
         "--standalone", str(program)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert (
            f"DistributedManager(rank {rank} of 2, cpu, by env) {rank} sum 2.0"
            in done.stdout
        )


def adopted():
    """The manager of a worker's own world."""
    DistributedManager._shared_state = {}
    DistributedManager.initialize()
    return DistributedManager()


def test_nccl_that_pytorch_does_not_have_is_an_error(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="backend: nccl, which this PyTorch was built"):
        DistributedManager.setup(rank=0, world_size=1, port="0", backend="nccl")
    assert not dist.is_initialized()


@ranks(1, 2, 4)
def test_it_is_one_object_that_adopts_an_existing_group(mesh):
    manager = adopted()
    assert DistributedManager() is manager
    assert (manager.rank, manager.world_size) == (dist.get_rank(), mesh.size())
    assert manager.device == torch.device("cpu") and not manager.cuda
    assert manager.distributed and manager.get_available_backend() == "gloo"
    with pytest.warns(UserWarning, match="initialized already"):
        DistributedManager.initialize()
    with pytest.raises(RuntimeError, match="a process group already"):
        DistributedManager.setup(rank=0, world_size=1)


def test_it_must_be_initialized_first():
    assert not DistributedManager.is_initialized()
    with pytest.raises(UninitializedManagerError, match=r"initialize\(\) first"):
        DistributedManager()


def test_the_environment_chooses_the_backend(monkeypatch):
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    best = "nccl" if has_nccl else "gloo"
    assert DistributedManager.get_available_backend() == best
    monkeypatch.setenv("SHARDTENSOR_DISTRIBUTED_BACKEND", "pigeon")
    with pytest.raises(ValueError, match="'pigeon', expected mpi, gloo or nccl"):
        DistributedManager.get_available_backend()


@ranks(4)
def test_a_mesh_finds_its_missing_extent(mesh):
    manager = adopted()
    assert manager.mesh_dims == {} and manager.mesh_names() == []
    assert manager.global_mesh.mesh_dim_names == ("world",)
    grid = manager.initialize_mesh((-1, 2), ("data", "domain"))
    assert grid.shape == (2, 2) and manager.global_mesh is grid
    assert manager.mesh_dims == {"data": 2, "domain": 2}
    assert manager.mesh_sizes() == [2, 2]
    assert manager.mesh() is grid
    assert manager.mesh("domain").mesh_dim_names == ("domain",)
    assert manager.group_size("data") == 2 and manager.group_size() == 4
    assert manager.group_rank("data") == manager.rank // 2
    assert manager.group_rank("domain") == manager.rank % 2
    assert manager.group_rank() == manager.rank
    assert manager.group_name(manager.group("domain")) == "domain"
    assert manager.group_name() is None and manager.group() is None
    with pytest.raises(UndefinedGroupError, match="no mesh axis named 'x'"):
        manager.mesh("x")
    with pytest.raises(UndefinedGroupError, match="are: data, domain"):
        manager.group("x")


@ranks(4)
@pytest.mark.parametrize(
    "shape, names, message",
    [
        ((), (), "at least one axis"),
        ((2, 2), ("a",), "2 axes .* but 1 names"),
        ((2, 2), ("a", "a"), "not unique"),
        ((3, -1), ("a", "b"), r"\(3, -1\) does not have the 4 ranks"),
        ((2, 1), ("a", "b"), r"\(2, 1\) does not have the 4 ranks"),
        ((-1, -1), ("a", "b"), "does not have the 4 ranks"),
        ((0, -1), ("a", "b"), "does not have the 4 ranks"),
    ],
)
def test_a_wrong_mesh_is_an_error(mesh, shape, names, message):
    with pytest.raises(ValueError, match=message):
        adopted().initialize_mesh(shape, names)


@ranks(2, 3)
def test_ranks_make_the_same_meshes_and_groups(mesh):
    manager, ranks = adopted(), mesh.size()
    mine = manager.rank == ranks - 1
    for wrong, text in (
        (((1, 1, -1), ("a", "b", "c")), "ranks were told different things"),
        (((1, -1), ("a", "c")), "ranks were told different things"),
        (((1, -1), ("a", "a")), f"not unique .on rank {ranks - 1}"),
        (((7, -1), ("a", "b")), f"does not have the .* .on rank {ranks - 1}"),
    ):
        with pytest.raises(ValueError, match=text):
            manager.initialize_mesh(*(wrong if mine else ((1, -1), ("a", "b"))))
    make = DistributedManager.create_process_subgroup
    for wrong, kind, text in (
        (("all", 1), ValueError, "ranks were told different things"),
        (("each", ranks), ValueError, "ranks were told different things"),
        (("all", 0), GroupError, f"groups of 0 do not .* .on rank {ranks - 1}"),
    ):
        with pytest.raises(kind, match=text):
            make(*(wrong if mine else ("all", ranks)))
    assert not manager.group_names
    make("all", ranks)
    assert manager.group_size("all") == ranks


@ranks(4)
def test_a_mesh_of_several_axes_has_one_group(mesh):
    manager = adopted()
    grid = manager.initialize_mesh((2, 2), ("a", "b"))
    assert manager.get_mesh_group(grid) is dist.group.WORLD
    assert manager.get_mesh_group(grid["b"]) is grid.get_group("b")
    corner = DeviceMesh("cpu", [[0, 1]])
    if manager.rank < 2:
        group = manager.get_mesh_group(corner)
        assert dist.get_world_size(group) == 2
        assert manager.get_mesh_group(corner) is group
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        assert x.item() == 2


@ranks(4)
def test_groups_of_consecutive_and_of_orthogonal_ranks(mesh):
    manager = adopted()
    DistributedManager.create_process_subgroup("pair", 2)
    DistributedManager.create_orthogonal_process_group("across", "pair")
    DistributedManager.create_process_subgroup("alone", 1, group_name="pair")
    assert dist.get_process_group_ranks(manager.group("pair")) == [
        [0, 1], [0, 1], [2, 3], [2, 3]
    ][manager.rank]  # fmt: skip
    assert dist.get_process_group_ranks(manager.group("across")) == [
        [0, 2], [1, 3], [0, 2], [1, 3]
    ][manager.rank]  # fmt: skip
    assert dist.get_process_group_ranks(manager.group("alone")) == [manager.rank]
    assert manager.group_names == ["pair", "across", "alone"]
    assert manager.group_name(manager.group("pair")) == "pair"
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="groups of 3 do not divide the 4 ranks"):
            DistributedManager.create_process_subgroup("three", 3)
        with pytest.raises(kind, match="a group named 'pair' already"):
            DistributedManager.create_process_subgroup("pair", 2)
    for kind in (UndefinedGroupError, ValueError):
        with pytest.raises(kind, match="no group named 'none'"):
            DistributedManager.create_orthogonal_process_group("x", "none")


@ranks(2)
def test_a_group_may_have_the_name_of_a_mesh_axis(mesh):
    manager = adopted()
    assert manager.mesh().mesh_dim_names == ("world",)
    DistributedManager.create_process_subgroup("world", 2)
    assert manager.group_size("world") == 2 and manager.mesh("world").size() == 2


# ---- groups from a tree -----------------------------------------------------


def tree(**sizes):
    config = ProcessGroupConfig(ProcessGroupNode("world"))
    for name in ("model", "data"):
        config.add_node(ProcessGroupNode(name), parent="world")
    config.set_leaf_group_sizes(sizes)
    return config


@ranks(4)
def test_siblings_of_a_tree_are_orthogonal(mesh):
    manager = adopted()
    DistributedManager.create_groups_from_config(tree(model=2, data=2))

    def ranks_of(name):
        return dist.get_process_group_ranks(manager.group(name))

    rank = manager.rank
    assert ranks_of("world") == [0, 1, 2, 3]
    assert ranks_of("model") == [[0, 1], [2, 3]][rank // 2]
    assert ranks_of("data") == [[0, 2], [1, 3]][rank % 2]
    name = DistributedManager.create_group_from_node(
        ProcessGroupNode("last", 1), parent="data"
    )
    assert name == "__orthogonal_to_last" and ranks_of("last") == [rank]
    with pytest.raises(AssertionError, match="'none' has no size"):
        DistributedManager.create_group_from_node(ProcessGroupNode("none"))


@ranks(4)
def test_a_tree_may_be_deep(mesh):
    manager = adopted()
    config = ProcessGroupConfig(ProcessGroupNode("world"))
    config.add_node(ProcessGroupNode("model"), "world")
    config.add_node(ProcessGroupNode("rows", 2), config.get_node("model"))
    config.add_node(ProcessGroupNode("columns", 2), "model")
    assert config.update_parent_sizes() == 4
    DistributedManager.create_groups_from_config(config)
    ranks_of = dist.get_process_group_ranks
    assert ranks_of(manager.group("model")) == [0, 1, 2, 3]
    assert ranks_of(manager.group("rows")) == [[0, 1], [2, 3]][manager.rank // 2]
    assert ranks_of(manager.group("columns")) == [[0, 2], [1, 3]][manager.rank % 2]


def test_trees_know_their_sizes(capsys):
    config = tree(model=2, data=3)
    assert config.root.size == 6 and config.root_id == "world"
    assert config.leaf_groups() == ["model", "data"]
    config.set_leaf_group_sizes({"data": 5}, update_parent_sizes=False)
    assert config.root.size == 6 and config.get_node("data").size == 5
    assert config.update_parent_sizes(verbose=True) == 10
    assert "group 'world': 10 ranks" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="'world' is none of the leaves"):
        config.set_leaf_group_sizes({"world": 2})
    with pytest.raises(ValueError, match="a node named 'data' already"):
        config.add_node(ProcessGroupNode("data"), "world")
    with pytest.raises(ValueError, match="no node is named 'x'"):
        config.add_node(ProcessGroupNode("y"), "x")
    with pytest.raises(AssertionError, match="'model' has no size"):
        tree(data=2)


# ---- under PhysicsNeMo's names ----------------------------------------------


@ranks(2)
def test_a_fixture_that_empties_the_shared_state_gets_a_new_manager(mesh):
    manager = adopted()
    assert manager._distributed and manager._initialization_method == "existing"
    DistributedManager._shared_state = {}
    assert not DistributedManager.is_initialized()
    for kind in (
        PhysicsNeMoUninitializedDistributedManagerWarning, Warning, RuntimeError
    ):  # fmt: skip
        with pytest.raises(kind):
            DistributedManager()
    DistributedManager.initialize()
    assert DistributedManager() is not manager and DistributedManager().rank < 2
    with pytest.raises(PhysicsNeMoUndefinedGroupError):
        DistributedManager().group("x")


def by_one_launcher(launcher, port):
    """With the variables of all launchers, and no rank of theirs but ours."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    for name, variables in LAUNCHERS.items():
        for key, value in variables.items():
            value = value.replace("RANK", str(rank if name == launcher else 7))
            os.environ[key] = value
    os.environ["MASTER_PORT"] = str(port if launcher == "env" else 1)
    os.environ["MASTER_ADDR"] = "localhost"
    {
        "env": lambda: DistributedManager.initialize_env(),
        "slurm": lambda: DistributedManager.initialize_slurm(port),
        "openmpi": lambda: DistributedManager.initialize_open_mpi("localhost", port),
    }[launcher]()
    manager = DistributedManager()
    x = torch.ones(1)
    dist.all_reduce(x)
    method = manager._initialization_method
    DistributedManager.cleanup(barrier=True)
    return manager.rank, method, x.item()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_launchers_variables_may_be_chosen(launcher):
    got = values(run_isolated(2, by_one_launcher, launcher, free_port()))
    assert got == [(0, launcher, 2.0), (1, launcher, 2.0)]


# ---- joining again ----------------------------------------------------------


def join(rank, size, port, seconds="20"):
    """As torchrun starts a rank."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        "SHARDTENSOR_DISTRIBUTED_TIMEOUT": seconds,
    }  # fmt: skip
    DistributedManager.initialize()


def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def join_three_times(ports):
    rank = dist.get_rank()
    dist.destroy_process_group()
    for port in ports:
        join(rank, 2, port)
        DistributedManager().initialize_mesh((-1,), ("domain",))
        DistributedManager.create_process_subgroup("pair", 2)
        assert total() == 2
        DistributedManager.cleanup(barrier=True)
        assert not DistributedManager.is_initialized()


def test_initialize_may_follow_cleanup_again_and_again():
    values(run_isolated(2, join_three_times, [free_port() for _ in range(3)]))


def one_round(port, size):
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        time.sleep(0.3)  # so that the others come to what is there already
    join(rank, size, port, "8")
    return total()  # and goes without a word


def test_ranks_start_again_on_the_store_that_torchrun_keeps():
    """With what those before them have left there, on another number of ranks, too."""
    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for size in (2, 2, 3):
        assert values(run_isolated(size, one_round, agent.port, size)) == [size] * size
        for rank in range(3):  # of one that died before it met the others
            agent.set(f"shardtensor/meeting/joined/{rank}", "an-old-id")


def meet_nobody(port, sizes):
    rank = dist.get_rank()
    dist.destroy_process_group()
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        join(rank, sizes[rank], port, "2")
    assert time.monotonic() - began < 20
    assert not DistributedManager.is_initialized()
    return str(caught.value)


def test_a_job_whose_ranks_do_not_all_come_is_an_error():
    (text,) = values(run_isolated(1, meet_nobody, free_port(), [2]))
    assert "imed out" in text and "1/2" in text


def test_a_port_in_use_is_an_error():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        (text,) = values(run_isolated(1, meet_nobody, port, [1]))
    assert "address already in use" in text.lower() and str(port) in text


def set_up(port):
    rank = dist.get_rank()
    dist.destroy_process_group()
    DistributedManager.setup(rank=rank, world_size=2, port=str(port))
    return DistributedManager().local_rank


def test_without_a_local_rank_there_is_one():
    places = torch.cuda.device_count() or 2
    assert values(run_isolated(2, set_up, free_port())) == [0, 1 % places]


@ranks(4)
def test_an_adopted_group_has_the_gpus_of_each_node(mesh):
    """Also of several ranks on each, where nobody tells the local rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_RANK")
        patch.delenv("SHARDTENSOR_DISTRIBUTED_BACKEND", raising=False)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(dist, "is_nccl_available", lambda: True)
        manager = adopted()
        assert manager.local_rank == manager.rank % 2
        assert manager.device == torch.device("cuda", manager.rank % 2)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        assert adopted().local_rank == manager.rank
        patch.setenv("LOCAL_RANK", "1")
        assert adopted().local_rank == 1


@ranks(1)
def test_settings_for_data_parallel(mesh):
    manager = adopted()
    assert not manager.broadcast_buffers and not manager.find_unused_parameters
    manager.broadcast_buffers = True
    with pytest.warns(UserWarning, match="walk the graph"):
        manager.find_unused_parameters = True
    assert manager.broadcast_buffers and manager.find_unused_parameters


def time_limit():
    # The limit bounds the meeting, too: generous, so that a busy machine meets.
    os.environ["SHARDTENSOR_DISTRIBUTED_TIMEOUT"] = "3"
    rank = dist.get_rank()
    dist.destroy_process_group()
    DistributedManager.initialize()
    store = dist.distributed_c10d._get_default_store()
    patience = timedelta(seconds=60)
    if rank == 0:
        with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
            dist.barrier()
        store.set("rank 0 gave up", "")
        store.wait(["rank 1 knows"], patience)
    else:
        store.wait(["rank 0 gave up"], patience)
        store.set("rank 1 knows", "")


def timed(port):
    os.environ["MASTER_PORT"] = str(port)
    time_limit()


def test_the_time_limit_bounds_collectives():
    values(run_isolated(2, timed, free_port()))
