"""Function-level rules beside torch.func: a transform's tensors pass them by."""

import pytest
import torch
import torch.nn.functional as F
from ranks import assert_close, partitions, ranks, shard
from torch.distributed.tensor import Shard

CASES = {
    "conv1d": ((3, 4, 3), lambda x, w: F.conv1d(x, w, padding=1)),
    "conv1d same": ((3, 4, 3), lambda x, w: F.conv1d(x, w, padding="same")),
    "conv_transpose1d": ((4, 3, 2), lambda x, w: F.conv_transpose1d(x, w, stride=2)),
    "convolution": (
        (3, 4, 3),
        lambda x, w: torch.convolution(x, w, None, [1], [1], [1], False, [0], 1),
    ),
    "group_norm": ((4,), lambda x, w: F.group_norm(x, 2, w)),
    "layer_norm": ((9,), lambda x, w: F.layer_norm(x, (9,), w)),
    "rms_norm": ((9,), lambda x, w: F.rms_norm(x, (9,), w)),
    "batch_norm": (
        (4,),
        lambda x, w: F.batch_norm(x, None, None, w, training=True),
    ),
    "instance_norm": ((4,), lambda x, w: F.instance_norm(x, weight=w)),
    "linear": ((2, 9), lambda x, w: F.linear(x, w)),
    "mse_loss": ((2, 4, 9), lambda x, w: F.mse_loss(x, w)),
}


@ranks(2, 3)
@pytest.mark.parametrize("name", CASES)
def test_a_transformed_weight_meets_a_sharded_input(mesh, name):
    shape, fn = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, dtype=torch.float64)
    w = torch.randn(shape, dtype=torch.float64)

    def loss(w, x):
        return (fn(x, w) ** 3).sum()

    expected = torch.func.grad(loss)(w, x)
    for sizes in partitions(9, mesh.size()):
        part = shard(x, mesh, [Shard(2)], {2: sizes})
        assert_close(torch.func.grad(loss)(w, part), expected)
