"""What does not fit on one rank alone is one error on all of them."""

import pytest
import rig
import torch
import torch.distributed as dist
from bad_calls import check_bad_calls
from bad_makers import check_bad_makers
from ranks import ranks
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _ops
from shardtensor import distributed as st
from shardtensor.distributed import DistributedManager
from shardtensor.distributed.utils import distributed_transpose


@ranks(2, 3)
def test_every_rank_raises_the_same(mesh):
    DistributedManager.initialize()
    check_bad_calls()


@ranks(2, "2x2")
def test_makers_raise_the_same(mesh):
    check_bad_makers(mesh)


@ranks(3)
def test_makers_raise_the_same_on_some_ranks_of_a_job(mesh):
    some = DeviceMesh(rig.DEVICE, [0, 2])
    if some.get_coordinate() is not None:
        check_bad_makers(some)


@ranks(2, 3)
def test_what_all_ranks_got_wrong_names_no_rank(mesh):
    with pytest.raises(ValueError, match="expected 7 in dim 0$"):
        st.reduce_scatter_v(torch.ones(3), [7] + [0] * (mesh.size() - 1))


@ranks(3)
def test_a_rank_outside_of_the_group_raises_alone(mesh):
    some = dist.new_group([0, 1])
    calls = [
        lambda x: st.all_gather_v(x, [1, 2], group=some),
        lambda x: st.all_reduce(x.sum(), group=some),
        lambda x: distributed_transpose(x.sum().repeat(2, 2), 0, 1, some),
    ]
    for call in calls:
        x = torch.ones(1 + dist.get_rank())
        if dist.get_rank() < 2:
            call(x)
        else:
            with pytest.raises(ValueError, match="group that this rank is in$"):
                call(x)
        assert st.broadcast(x.sum(), 1).item() == 2


@ranks(2)
def test_transforms_and_traces_reach_the_collective(mesh):
    name, sizes = dist.group.WORLD.group_name, [1, 2]
    x = torch.ones(sizes[dist.get_rank()])
    gather = lambda t: _ops.all_gather_v(t, 0, sizes, name)  # noqa: E731
    _, vjp = torch.func.vjp(gather, x)
    assert vjp(torch.ones(3))[0].tolist() == [2.0] * x.numel()
    _, tangent = torch.func.jvp(gather, (x,), (x,))
    assert tangent.tolist() == [1.0] * 3
    compiled = torch.compile(gather, backend="aot_eager", fullgraph=True)
    assert compiled(x).tolist() == [1.0] * 3
    # A traced call is not compared: a graph has no place for that.
    one_alone = torch.empty(2 - dist.get_rank(), device="meta")
    shape = [2, 1]
    assert _ops.all_gather_v(one_alone, 0, shape, name).shape == (3,)
