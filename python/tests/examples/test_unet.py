"""The demo's UNet, as it is, on shards: the numbers of one process."""

import sys

import pytest
import rig
import torch
from oracle import every
from programs import EXAMPLES
from ranks import assert_close, check_op, partitions, ranks, shard, sharded, uneven
from torch import nn
from torch.distributed.tensor import Shard

sys.path.append(str(EXAMPLES))
from unet import UNet, segmentation_loss  # noqa: E402

SHAPE = (13, 10, 7)
TINY = {"channels": (4, 8, 12)}
VARIANTS = [
    {"norm": "group", "down": "conv", "up": "trilinear", "activation": "silu"},
    {"norm": "batch", "down": "pool", "up": "transpose", "activation": "relu"},
    {"norm": "batch", "down": "conv", "up": "transpose", "activation": "silu"},
    {"norm": "group", "down": "pool", "up": "trilinear", "activation": "relu"},
    {"norm": "group", "checkpointing": True},
]


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, volume, labels):
        logits = self.model(volume)
        return logits, segmentation_loss(logits, labels)


def data(dtype=torch.float64):
    volume = torch.randn(1, 1, *SHAPE, dtype=dtype)
    return volume, torch.randint(3, (1, *SHAPE))


def placed(mesh, x, first, sizes=None):
    """Mesh axis i cuts spatial dim i, which is dim first + i of x."""
    placements = [Shard(first + i) for i in range(mesh.ndim)]
    sizes = {first + i: s for i, s in (sizes or {}).items()}
    return sharded(x, placements, sizes)


def unevenly(mesh):
    return {i: uneven(SHAPE[i], mesh.size(i)) for i in range(mesh.ndim)}


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values()))
)
def test_loss_and_gradients(mesh, variant):
    model = Loss(UNet(**TINY, **variant)).double()
    volume, labels = data()
    sizes = unevenly(mesh)
    check_op(
        model,
        placed(mesh, volume.requires_grad_(), 2, sizes),
        placed(mesh, labels, 1, sizes),
        mesh=mesh,
    )


@ranks(4)
def test_any_partition_empty_pieces_too(mesh):
    model = Loss(UNet(**TINY)).double()
    volume, labels = data()
    for sizes in partitions(SHAPE[0], mesh.size()):
        check_op(
            model,
            placed(mesh, volume, 2, {0: sizes}),
            placed(mesh, labels, 1, {0: sizes}),
            mesh=mesh,
        )


@ranks(2, "2x2")
def test_training_gives_the_same_weights(mesh):
    for norm in every(2, ("group", "batch"), mesh.ndim - 1):
        check_training(mesh, norm)


def check_training(mesh, norm):
    volume, labels = data()
    whole = train(norm, volume, labels)
    sizes = unevenly(mesh)
    parts = []
    for x, first in ((volume, 2), (labels, 1)):
        asked = placed(mesh, x, first, sizes)
        parts.append(shard(x, mesh, asked.placements, asked.sizes))
    trained = train(norm, *parts)
    for (name, expected), actual in zip(
        whole.state_dict().items(), trained.state_dict().values(), strict=True
    ):
        assert_close(actual, expected, rtol=1e-7, atol=1e-9, what=name)


def train(norm, volume, labels):
    torch.manual_seed(1)
    model = UNet(**TINY, norm=norm).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        segmentation_loss(model(volume), labels).backward()
        optimizer.step()
    return model


@ranks(2, "2x2")
def test_autocast_to_bfloat16(mesh):
    model = UNet(**TINY)
    volume, labels = data(torch.float32)
    expected, gradients = loss_in_bfloat16(model, volume, labels)
    sizes = unevenly(mesh)
    parts = []
    for x, first in ((volume, 2), (labels, 1)):
        asked = placed(mesh, x, first, sizes)
        parts.append(shard(x, mesh, asked.placements, asked.sizes))
    actual, shard_gradients = loss_in_bfloat16(model, *parts)
    assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    for a, e in zip(shard_gradients, gradients, strict=True):
        assert a.dtype == torch.float32
        assert (a - e).norm() <= 0.05 * e.norm() + 1e-3


def loss_in_bfloat16(model, volume, labels):
    model.zero_grad()
    with rig.autocast(torch.bfloat16):
        logits = model(volume)
        loss = segmentation_loss(logits, labels)
    assert logits.dtype == torch.bfloat16
    loss.backward()
    return loss, [p.grad.clone() for p in model.parameters()]
