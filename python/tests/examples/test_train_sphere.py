"""The demo's Earth: its solver is right, also on shards, and its losses are those of
one process."""

import re
import sys

import pytest
import torch
from fourier import OnMesh
from programs import EXAMPLES, printed
from ranks import check_op, ranks, sharded, uneven
from torch.distributed.tensor import Shard

PRELOAD = ("neuralop.models", "torch_harmonics", "matplotlib.pyplot")

sys.path.append(str(EXAMPLES))


def test_the_solver_is_that_of_torch_harmonics():
    from shallow_water import GEOPOTENTIAL, OMEGA, RADIUS, ShallowWater, weather
    from torch_harmonics.examples.shallow_water_equations import ShallowWaterSolver

    ours = ShallowWater(24, 48)
    theirs = ShallowWaterSolver(
        24, 48, 600, 16, 16, "legendre-gauss", RADIUS, OMEGA, 1.0, GEOPOTENTIAL, 0.0
    ).double()
    fields = weather(1, 24, 48)[0]
    found = ours.back(ours.tendency(ours.there(fields)))
    state = theirs.grid2spec(fields)
    expected = theirs.spec2grid(theirs.dudtspec(state))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()


def test_mass_stays_and_waves_stay_small():
    from shallow_water import ShallowWater, weather

    start = weather(1, 24, 48)
    end = ShallowWater(24, 48)(start, 36)
    assert (end - start)[0, 1].abs().max() > 1e-6  # the weather changed
    assert end[0, 1].abs().max() < 3 * start[0, 1].abs().max()
    there = ShallowWater(24, 48).there
    mass = [there(x)[0, 0, 0, 0].real for x in (start, end)]
    torch.testing.assert_close(*mass, rtol=1e-12, atol=0)


@ranks(2, "2x2")
def test_the_solver_is_differentiable_on_shards(mesh):
    from shallow_water import ShallowWater, weather

    solver = ShallowWater(12, 24)
    scale = torch.tensor([1e4, 1e-5, 1e-5], dtype=torch.float64)[:, None, None]
    model = OnMesh(Scaled(solver, scale), mesh)
    fields = (weather(2, 12, 24) / scale).requires_grad_()
    sizes = {2: uneven(12, mesh.size(0))}
    part = sharded(fields, [Shard(2), Shard(3)][: mesh.ndim], sizes)
    y = check_op(model, part, mesh=mesh, rtol=1e-8, atol=1e-10)
    assert y._spec.sizes()[2] == sizes[2]


class Scaled(torch.nn.Module):
    def __init__(self, solver, scale):
        super().__init__()
        self.solver, self.scale = solver, scale

    def forward(self, fields):
        return self.solver(fields * self.scale, 2) / self.scale


@pytest.mark.parametrize(
    "count, arguments",
    [(2, ()), pytest.param(4, ("--mesh=2x2",), marks=pytest.mark.tail)],
    ids=["latitudes", "2x2"],
)
def test_demo_equals_one_process(count, arguments, tmp_path):
    picture = tmp_path / "globe.png"
    tiny = "--grid=24x48", "--hours=1", "--steps=4", "--channels=4", "--samples=2"
    text = printed(count, "train_sphere.py", *tiny, *arguments, f"--picture={picture}")
    difference = re.search(r"largest difference of the losses: (\S+)", text)
    assert float(difference.group(1)) < 1e-5, text
    losses = [float(x) for x in re.findall(r"^ +\d+ +(\S+)$", text, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < losses[0], text
    assert picture.read_bytes().startswith(b"\x89PNG")
