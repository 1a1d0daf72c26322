"""What one rank of many does must not grow with their number where it need not."""

import pytest
import rig
import torch
from many_ranks import join, operators_of, run_on_one_of
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.agree import agree

pytestmark = pytest.mark.skipif(
    rig.DEVICE != "cpu", reason="the fake process group has messages for the host"
)
ROWS, CHANNELS = 64, 16


def agreeing(count):
    mesh = join(count)
    return operators_of(lambda: agree(mesh, None, "the same"))[0]


def test_agreeing_takes_as_many_operators():
    assert run_on_one_of(16, agreeing) == run_on_one_of(2048, agreeing)


FEW = torch.tensor([1, 5, 3])
CALLS = {
    "index": lambda x: x[FEW],
    "index_select": lambda x: x.index_select(0, FEW),
    "gather": lambda x: x.gather(0, FEW[:, None].expand(-1, CHANNELS)),
    "take_along_dim": lambda x: torch.take_along_dim(x, FEW[:, None], 0),
    "index_add": lambda x: torch.zeros(8, CHANNELS).index_add(0, whole(x) % 8, x),
    "scatter_add": lambda x: torch.zeros(8, CHANNELS).scatter_add(
        0, (whole(x) % 8)[:, None].expand(-1, CHANNELS), x
    ),
    "index_reduce": lambda x: torch.zeros(8, CHANNELS).index_reduce(
        0, whole(x) % 8, x, "amax"
    ),
}


def whole(x):
    return torch.arange(len(x))


def rows_by_index(count, name):
    mesh, shape = join(count), (ROWS * count, CHANNELS)
    x = shardtensor.ones(
        *shape, device_mesh=mesh, placements=[Shard(0)], requires_grad=True
    )

    def step():
        (gradient,) = torch.autograd.grad(CALLS[name](x).square().sum(), x)
        assert gradient.spec == x.spec

    step()  # plans
    shardtensor.reset_comm_stats()
    _, most = operators_of(step)
    return most, shardtensor.comm_stats().messages


@pytest.mark.parametrize("name", CALLS)
def test_rows_that_a_whole_index_names_gather_nothing(name):
    """Neither what is indexed nor, on the way back, its gradient."""
    most, messages = run_on_one_of(512, rows_by_index, name)
    whole_bytes = 512 * ROWS * CHANNELS * 4
    index_bytes = 512 * ROWS * 8  # of a plain one, on every rank
    assert most <= index_bytes < whole_bytes / 4
    assert messages <= 3 * 16 * 2  # of merged terms
