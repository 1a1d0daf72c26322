"""What is the host's work, whatever the default device."""

import os

import pytest
import rig
import torch
import torch.distributed as dist
from ranks import assert_close, ranks, run_isolated, shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import checkpoint
from shardtensor.nn.functional import partition_points

pytestmark = pytest.mark.skipif(rig.DEVICE == "cpu", reason="for devices")
guarded_only = pytest.mark.skipif(
    rig.DEVICE != "guarded", reason="counts copies, and its backend stands for NCCL"
)


@ranks(2)
def test_files_are_read_and_written_under_a_default_device(mesh, tmp_path):
    write_and_read(mesh, tmp_path)


def write_and_read(mesh, tmp_path):
    whole = torch.arange(24.0).reshape(8, 3)
    x, again = (shard(y, mesh, [Shard(0)]) for y in (whole, torch.zeros(8, 3)))
    saved, loaded = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (saved, loaded)]
    saved(torch.ones(3)).sum().backward()
    optimizers[0].step()
    checkpoint.save({"x": x, "model": saved, "optimizer": optimizers[0]}, tmp_path, 1)
    into = {"x": again, "model": loaded, "optimizer": optimizers[1]}
    assert checkpoint.load(into, tmp_path) == 1
    assert_close(again, whole)
    assert torch.equal(loaded.weight, saved.weight)
    path = tmp_path / "x.npy"
    shardtensor.io.write(path, x)
    dist.barrier()
    assert_close(shardtensor.io.open(path).read(..., mesh, [Shard(0)]), whole)


def work_without_messages_of_the_host(tmp_path):
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("guarded:guarded", rank=rank, world_size=ranks)
    torch.set_default_device(rig.DEVICE)
    mesh = init_device_mesh(rig.DEVICE, (ranks,))
    write_and_read(mesh, tmp_path)
    with pytest.raises(OSError, match="cannot open .*nothing.npy"):
        shardtensor.io.open(tmp_path / "nothing.npy").read(..., mesh, [Shard(0)])
    same_group = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    part = torch.zeros(2, device="cpu")
    on_host = shardtensor.ShardTensor.from_local(
        part, same_group, [Shard(0)], sharding_shapes="chunk"
    )
    with pytest.raises(ValueError, match="no messages for tensors on cpu, but for"):
        on_host.cumsum(0)
    model = nn.Linear(3, 2)
    shardtensor.sync_module_over_mesh(model, mesh)
    model.weight.data += rank
    with pytest.raises(RuntimeError, match="weight: mesh ranks 0 and 1"):
        shardtensor.check_replicas(model, mesh)


@guarded_only
def test_a_job_may_have_messages_of_a_device_alone(tmp_path):
    """As that of init_process_group("nccl")."""
    job = work_without_messages_of_the_host
    for outcome in run_isolated(2, job, tmp_path, world=False):
        assert outcome.kind == "ok", outcome.text


@ranks(2)
@pytest.mark.parametrize("method", ["rcb", "hilbert", "given"])
def test_points_are_partitioned_by_way_of_the_host(mesh, method):
    x = torch.rand(9, 3)
    owners = torch.arange(9) % 2 if method == "given" else None
    weights = torch.rand(9).double() if method == "rcb" else None
    points = shard(x, mesh, [Shard(0)]).requires_grad_()
    cut, rows = partition_points(points, mesh, method, weights, owners=owners)
    assert cut.device.type == rows.device.type == rig.DEVICE
    rows = rows.full_tensor()
    assert sorted(rows.tolist()) == [*range(9)]
    assert_close(cut, x[rows])
    (cut * x[rows]).sum().backward()
    assert_close(points.grad, x)


@ranks(1, 2)
def test_faces_of_cells_are_found_on_a_device(mesh):
    find, cells = shardtensor.mesh.cell_faces, torch.tensor([[0, 1, 2], [2, 1, 3]])
    cut = shard(cells, mesh, [Shard(0)])
    found, expected = find({"triangle": cut}, 4), find({"triangle": cells.cpu()}, 4)
    for x, there in zip(found, expected, strict=True):
        assert x.full_tensor().equal(there.to(rig.DEVICE))


@guarded_only
@ranks(2)
def test_a_source_on_the_host_is_cut_there(mesh):
    import guarded

    from shardtensor import distribute_tensor, scatter_tensor

    whole = torch.arange(20_000.0, device="cpu")
    for make in (
        lambda: scatter_tensor(whole, 0, mesh, [Shard(0)]),
        lambda: distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
    ):
        x = make()
        assert guarded.count()["largest_to_device"] == 10_000
        assert x.to_local().device.type == "guarded"
        assert_close(x, whole)
