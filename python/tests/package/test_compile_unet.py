"""torch.compile(fullgraph=True) of a UNet and a perceptron, forward and
backward, on even and uneven pieces, one and two mesh axes."""

import pytest
import torch
import torch.nn.functional as F
from compiled import Compiled
from ranks import check_op, ranks, sharded
from torch import nn
from torch.distributed.tensor import Shard

PRELOAD = ("torch._inductor.compile_fx",)


class UNet(nn.Module):
    """Convolutions with halos, both norms, pooling, up-sampling, a skip."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()
        )
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.inner = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.pool = nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=4, mode="bilinear")
        self.last = nn.Conv2d(12, 3, 1)

    def forward(self, x):
        x = self.first(x)
        y = self.up(self.pool(self.inner(self.down(x))))
        return self.last(torch.cat([x, y], 1))


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        shape = (1, 16, 8)
        self.register_buffer("truth", torch.arange(128).reshape(shape) % 3)

    def forward(self, x):
        scores = self.model(x)
        probabilities = scores.softmax(1)
        overlap = probabilities[:, 0].square().sum() / probabilities.sum()
        return F.cross_entropy(scores, self.truth) + 1 - overlap


LAYOUTS = {
    "even": ([Shard(2)], None),
    "uneven": ([Shard(2)], {2: [10, 6]}),
    "three": ([Shard(2)], {2: [4, 10, 2]}),
    "empty": ([Shard(2)], {2: [8, 0, 8]}),
    "grid": ([Shard(2), Shard(3)], None),
}


def check(mesh, layout, model, backend):
    torch.manual_seed(0)
    x = torch.randn(1, 2, 16, 8, dtype=torch.double, requires_grad=True)
    placements, sizes = LAYOUTS[layout]
    check_op(
        Compiled(model.double(), backend=backend, fullgraph=True),
        sharded(x, placements, sizes),
        mesh=mesh,
    )


# Inductor takes a minute of g++ for a UNet.
@ranks(2, timeout=300)
@pytest.mark.parametrize(
    "layout, backend",
    [
        pytest.param("even", "aot_eager", marks=pytest.mark.tail),
        ("uneven", "aot_eager"),
        pytest.param("uneven", "inductor", marks=pytest.mark.tail),
        pytest.param("even", "inductor", marks=pytest.mark.tail),
    ],
)
def test_a_unet_compiles_whole(mesh, layout, backend):
    torch.manual_seed(0)
    check(mesh, layout, WithLoss(UNet()), backend)


@ranks(3, timeout=300)
@pytest.mark.parametrize(
    "layout", ["empty", pytest.param("three", marks=pytest.mark.tail)]
)
def test_a_unet_compiles_whole_on_three_pieces(mesh, layout):
    torch.manual_seed(0)
    check(mesh, layout, WithLoss(UNet()), "aot_eager")


@ranks("2x2", timeout=300)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.tail)]
)
def test_a_unet_compiles_whole_on_two_axes(mesh, backend):
    torch.manual_seed(0)
    check(mesh, "grid", WithLoss(UNet()), backend)


@ranks(1, 2, timeout=300)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.tail)]
)
def test_a_perceptron_compiles_whole(mesh, backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).double()
    x = torch.randn(7, 4, dtype=torch.double, requires_grad=True)
    check_op(
        Compiled(model, backend=backend, fullgraph=True),
        sharded(x, [Shard(0)]),
        mesh=mesh,
    )
