"""What test_mpi.py starts with mpirun: a job whose messages travel over MPI, on the
device of rig.py."""

import sys

import rig
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bad_calls import check_bad_calls
from collective_checks import check_collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardtensor import (
    _C,
    ShardTensor,
    comm_stats,
    get_gradient_bucket_bytes,
    gradient_bucket_bytes,
    scatter_tensor,
)
from shardtensor.distributed import DistributedManager, mpi

close = torch.testing.assert_close


def collectives(mesh):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = ranks * (ranks - 1) / 2
    x = torch.full((3, 2), float(rank))
    for op, expected in [("SUM", total), ("AVG", total / ranks), ("MAX", ranks - 1)]:
        y = x.t().clone()
        dist.all_reduce(y, getattr(dist.ReduceOp, op))
        close(y, torch.full((2, 3), float(expected)))
    y = x.clone()
    dist.reduce(y, dst=ranks - 1)
    close(y, torch.full_like(x, total) if rank == ranks - 1 else x)
    rows = torch.empty(3 * ranks, 2)
    dist.all_gather_into_tensor(rows, x)
    close(rows[:, 0], torch.arange(ranks).repeat_interleave(3).float())
    mine = torch.empty(2)
    dist.reduce_scatter_tensor(mine, torch.arange(2.0 * ranks) + rank)
    close(mine, ranks * torch.tensor([2.0 * rank, 2.0 * rank + 1]) + total)
    dist.reduce_scatter(mine, list((torch.arange(2.0 * ranks) + rank).split(2)))
    close(mine, ranks * torch.tensor([2.0 * rank, 2.0 * rank + 1]) + total)
    received = [torch.empty(1) for _ in range(ranks)]
    dist.all_to_all(received, [torch.tensor([10.0 * rank + p]) for p in range(ranks)])
    close(torch.cat(received), 10.0 * torch.arange(ranks) + rank)
    both = [torch.full((1,), float(rank)), torch.full((5000,), float(rank))]
    dist.all_reduce_coalesced(both)
    close(torch.cat(both), torch.full((5001,), total))
    weight = nn.Parameter(x.clone())
    for _ in range(2):
        dist.all_reduce(weight)
    close(weight.data, torch.full_like(x, total * ranks))


def messages_and_objects(mesh):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out = torch.empty(2)
    works = [dist.irecv(out, (rank - 1) % ranks)]
    works.append(dist.isend(torch.full((2,), float(rank)), (rank + 1) % ranks))
    for work in works:
        work.wait()
    close(out, torch.full((2,), float((rank - 1) % ranks)))
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(ranks)]
    dist.barrier()
    if rig.DEVICE != "cpu":
        results_are_there_for_the_stream_that_waits(ranks)


def results_are_there_for_the_stream_that_waits(ranks):
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    with torch.Stream(rig.DEVICE):
        work.wait()
        close(x * 2, torch.full((3,), 2.0 * ranks))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)

    def forward(self, x):
        x = F.silu(self.norm(self.conv(x)))
        return x + F.interpolate(self.down(x), scale_factor=2, mode="bilinear")


def sharded_model(mesh):
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(1, 2, 24, 16, dtype=torch.float64)
    expected = model(x).square().mean()
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    placements = [Shard(2), Shard(3)][: mesh.ndim]
    part = scatter_tensor(x, 0, mesh, placements)
    assert isinstance(part, ShardTensor)
    for bytes in (1, get_gradient_bucket_bytes()):
        model.zero_grad()
        loss = model(part).square().mean()
        with gradient_bucket_bytes(bytes):
            loss.backward()
        close(loss.full_tensor(), expected)
        close([p.grad for p in model.parameters()], list(wanted))
    assert comm_stats().messages > 0


class Modes(nn.Module):
    """Complex weights between two transforms."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 5, dtype=torch.cdouble))

    def forward(self, x):
        modes = torch.fft.rfft2(x)[..., :5]
        modes = torch.einsum("bixy,ioy->boxy", modes, self.weight)
        return torch.fft.irfft2(modes, s=x.shape[-2:])


def complex_numbers(mesh):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.complex(torch.arange(5.0) + rank, torch.full((5,), -2.0 * rank))
    total = torch.complex(
        ranks * torch.arange(5.0) + ranks * (ranks - 1) / 2,
        torch.full((5,), -1.0 * ranks * (ranks - 1)),
    )
    y = x.clone()
    dist.all_reduce(y)
    close(y, total)
    torch.manual_seed(0)
    model, x = Modes(), torch.randn(2, 3, 12, 16, dtype=torch.float64)
    expected = model(x).square().mean()
    (wanted,) = torch.autograd.grad(expected, [model.weight])
    placements = [Shard(2), Shard(3)][: mesh.ndim]
    loss = model(scatter_tensor(x, 0, mesh, placements)).square().mean()
    loss.backward()
    close(loss.full_tensor(), expected)
    close(model.weight.grad, wanted)


def data_parallel(mesh):
    """DDP asks works for futures; FSDP gathers and scatters flat tensors."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    batch = torch.randn(ranks, 5, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    wanted = torch.autograd.grad(model(batch).mean(), list(model.parameters()))
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(batch[rank : rank + 1]).mean().backward()
    close([p.grad for p in model.parameters()], list(wanted))
    model.zero_grad()
    fully_shard(model, mesh=init_device_mesh(rig.DEVICE, (ranks,)))
    model(batch[rank : rank + 1]).mean().backward()
    close([p.grad.full_tensor() for p in model.parameters()], list(wanted))


def dtensors(mesh):
    x = torch.arange(float(mesh.size() * 6)).view(-1, 3)
    placements = [Shard(0), Shard(1)][: mesh.ndim]
    part = scatter_tensor(x, 0, mesh, placements)
    close(part.to_dtensor().full_tensor(), x)
    whole = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)
    close(whole.redistribute(mesh, placements).to_local(), part.to_local())


def pieces(mesh):
    check_collectives()


def calls_that_differ(mesh):
    if rig.DEVICE == "cpu":  # of an index out of range a device asserts
        check_bad_calls()


CHECKS = (
    collectives,
    pieces,
    calls_that_differ,
    messages_and_objects,
    complex_numbers,
    sharded_model,
    dtensors,
    data_parallel,
)


def join():
    if rig.DEVICE != "guarded":
        DistributedManager.initialize()
        assert dist.get_backend() == mpi.BACKEND, dist.get_backend()
        return
    launch = _C.detect_launch()
    backend = f"cpu:{mpi.BACKEND},{rig.DEVICE}:{mpi.BACKEND}"
    address = f"tcp://{launch.address}:{launch.port}"
    dist.init_process_group(backend, address, None, launch.world_size, launch.rank)
    DistributedManager.initialize()


def main():
    rig.prepare()
    join()
    torch.set_default_device(rig.device_of(dist.get_rank()))
    shape = [int(extent) for extent in sys.argv[1].split("x")]
    names = ("rows", "columns")[: len(shape)]
    mesh = init_device_mesh(rig.DEVICE, shape, mesh_dim_names=names)
    for check in CHECKS:
        check(mesh)
        if dist.get_rank() == 0:
            print(f"{check.__name__}: ok", flush=True)
    DistributedManager.cleanup(barrier=True)


if __name__ == "__main__":
    main()
