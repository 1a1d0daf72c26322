"""What test_two_nodes.py starts on each of two nodes: one step, then what is called
until it fails."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardtensor import Shard, _ops, checkpoint, scatter_tensor
from shardtensor.agree import agree_everywhere
from shardtensor.distributed import DistributedManager


def main(what, folder):
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((2, -1), ("data", "domain"))
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 2, 3, padding=1)
    image = torch.randn(1, 1, 9, 6)
    whole = conv(image).square().mean()
    wanted = torch.autograd.grad(whole, conv.weight)[0]
    across = scatter_tensor(
        image if manager.rank == 0 else None, 0, mesh, [Shard(2), Shard(3)]
    )
    step(across, conv, wanted, mesh)
    (Path(folder) / f"{manager.rank} of {mesh.size()}").touch()
    JOBS[what](across, conv, folder)


def step(x, conv, wanted, mesh):
    """Once over both nodes, once within a node."""
    conv(x).square().mean().backward()
    torch.testing.assert_close(conv.weight.grad, wanted)
    ranks = mesh["domain"].mesh.tolist()
    image = x.full_tensor()
    inside = scatter_tensor(image, ranks[0], mesh["domain"], [Shard(2)])
    conv.zero_grad()
    conv(inside).square().mean().backward()
    torch.testing.assert_close(conv.weight.grad, wanted)
    assert len(ranks) == 2 and ranks[1] == ranks[0] + 1


def until_it_fails(call, folder):
    call()
    (Path(folder) / "ready").touch()
    while True:
        call()
        time.sleep(0.01)


def forward(x, conv, folder):
    with torch.no_grad():
        until_it_fails(lambda: conv(x), folder)


def backward(x, conv, folder):
    """Whose forward sends nothing."""
    point = nn.Conv2d(1, 1, 1)
    until_it_fails(lambda: point(x).backward(torch.ones_like(x)), folder)


def collective(x, conv, folder):
    large, group = torch.ones(100_000), dist.group.WORLD.group_name
    until_it_fails(lambda: _ops.all_reduce(large, "sum", group), folder)


def agreement(x, conv, folder):
    until_it_fails(lambda: agree_everywhere(None), folder)


def saving(x, conv, folder):
    state = {"model": conv, "field": x}
    until_it_fails(lambda: checkpoint.save(state, folder, step=1), folder)


JOBS = {f.__name__: f for f in (forward, backward, collective, agreement, saving)}

if __name__ == "__main__":
    main(*sys.argv[1:])
