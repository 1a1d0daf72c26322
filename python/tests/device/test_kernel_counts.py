"""How many kernels a call queues, counted by the guarded device."""

import pytest
import rig
import torch
import torch.nn.functional as F
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Replicate, Shard

import shardtensor

pytestmark = pytest.mark.skipif(
    rig.DEVICE != "guarded", reason="counts of the guarded device"
)

KERNELS = {  # forward and backward, on one rank and on two
    "softmax": (lambda x: x.softmax(2), {1: 3, 2: 24}),
    "log_softmax": (lambda x: x.log_softmax(2), {1: 3, 2: 23}),
    "group_norm": (lambda x: F.group_norm(x, 2), {1: 27, 2: 45}),
}


@ranks(1, 2)
def test_statistics_of_a_cut_dim_take_few_kernels(mesh):
    import guarded

    whole = torch.rand(1, 4, 8, 6)
    for name, (call, most) in KERNELS.items():
        x = shard(whole, mesh, [Shard(2)]).requires_grad_()
        for _ in range(2):  # what plans keep is made once
            before = guarded.count()["kernels"]
            y = call(x)
            torch.autograd.grad(y, x, torch.ones_like(y.detach()))
            kernels = guarded.count()["kernels"] - before
        assert kernels <= most[mesh.size()], (name, kernels)


@ranks(1, 2)
def test_dropout_takes_few_kernels(mesh):
    import guarded

    def kernels(x, policy):
        with shardtensor.random_policy(policy):
            for _ in range(2):
                before = guarded.count()["kernels"]
                torch.native_dropout(x, 0.5, True)
                count = guarded.count()["kernels"] - before
        return count

    whole = torch.rand(4, 8, 6)
    x = shard(whole, mesh, [Shard(1)])
    of_plain = kernels(whole, "one_device")
    # The whole is filled and drawn, the mask cut out and the piece scaled.
    assert kernels(x, "one_device") <= of_plain + (3 if mesh.size() > 1 else 0)
    assert kernels(x, "counter") <= 187


@ranks(2)
def test_many_boxes_take_one_kernel(mesh):
    import guarded

    x = torch.rand(24, 6, 5)
    s = shard(x, mesh, [Shard(1)]).flatten(0, 1)  # 24 intervals on each rank

    def gather():
        before = guarded.count()
        whole = s.redistribute(placements=[Replicate()])
        now = guarded.count()
        return whole, now["kernels"] - before["kernels"], before

    gather()
    whole, kernels, before = gather()
    assert kernels < 24  # not one for each box
    assert guarded.copies_since(before) == {"to_host": 0, "to_device": 0}
    assert_close(whole, x.flatten(0, 1))
