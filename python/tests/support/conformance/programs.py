"""Random programs: chains of operators on tensors in random layouts.

A program is source code. What it reads like, and how a failure is printed:

    def program(x0, x1):
        x2 = x0.cumsum(1)
        x3 = redistributed(x2, [Shard(1)], {1: [0, 3]})
        x4 = torch.cat([x1, x3], 0)
        return x2, x3, x4,

    inputs = [
        sharded(random((2, 3), 0), [Shard(0)], {0: [2, 0]}),
        random((1, 3), 1),
    ]

While it is drawn, every line runs on plain tensors: that tells the shapes, and a
line that PyTorch refuses, or whose values are too large to compare, is left out.
`steps.py` holds the lines that there are.
"""

import contextlib
import textwrap

import hypothesis
import oracle
import ranks
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from oracle import check_op, sharded
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardtensor
from conformance import WAIT, steps, sweep

PRELOAD = sweep.PRELOAD
LARGEST = 100.0  # values beyond are not compared: too little is left of the digits
STEPS = 8


def random(shape, seed):
    """The same on every device: masks of them have as many rows."""
    numbers = torch.randn(
        shape,
        dtype=torch.float64,
        generator=torch.Generator("cpu").manual_seed(seed),
        device="cpu",
    )
    return numbers.to(torch.get_default_device()).requires_grad_()


def redistributed(x, placements, sizes=None):
    """Another layout; on one device nothing happens."""
    if isinstance(x, shardtensor.ShardTensor):
        return x.redistribute(placements=placements, sizes=sizes)
    return x


NAMES = {
    "F": F, "Partial": Partial, "Replicate": Replicate, "Shard": Shard,
    "checkpoint": checkpoint, "random": random, "redistributed": redistributed,
    "sharded": sharded, "torch": torch,
}  # fmt: skip


class Writer:
    """A program that is being drawn, and the values of its names."""

    def __init__(self, draw, mesh):
        self.draw = draw
        self.mesh = mesh  # its shape
        self.inputs = []
        self.lines = []
        self.values = {}

    def pick(self, *choices):
        return self.draw(st.sampled_from(choices))

    def tensor(self, accept=lambda x: True):
        """The name of a tensor so far; raises Unfit where none is accepted."""
        names = [n for n, x in self.values.items() if accept(x)]
        if not names:
            raise steps.Unfit
        return self.pick(*reversed(names))

    def dim(self, name):
        return self.pick(*range(self.values[name].dim()))

    def layout(self, shape, partial=False):
        """Placements and piece sizes, as source code."""
        kinds = [None, *range(len(shape)), *["+"] * partial]
        axes = [self.pick(*kinds) for _ in self.mesh]
        sizes = {}
        for dim in {a for a in axes if isinstance(a, int)}:
            pieces = 1
            for axis, ranks_of_axis in zip(axes, self.mesh):
                pieces *= ranks_of_axis if axis == dim else 1
            if self.draw(st.booleans()):
                sizes[dim] = self.pieces(shape[dim], pieces)
        text = {None: "Replicate()", "+": "Partial()"}
        placements = ", ".join(text.get(a, f"Shard({a})") for a in axes)
        return f"[{placements}], {sizes}"

    def pieces(self, extent, count):
        """Sizes of any pieces of a dim, also empty ones."""
        cuts = st.lists(st.integers(0, extent), min_size=count - 1, max_size=count - 1)
        edges = [0, *sorted(self.draw(cuts)), extent]
        return [end - begin for begin, end in zip(edges, edges[1:])]

    def given(self, shape, plain=False):
        """A new input of the program: its name."""
        name = f"x{len(self.values)}"
        call = f"random({tuple(shape)}, {len(self.values)})"
        text = call
        if not plain:
            text = f"sharded({text}, {self.layout(shape, partial=True)})"
        self.inputs.append((name, text))
        self.values[name] = eval(call)
        return name

    def add(self, expression, before=(), after=(), least=None):
        """A line `xN = expression`, and those that belong to it; no value of it
        may be less than `least`."""
        name = f"x{len(self.values)}"
        lines = [*before, f"{name} = {expression}", *after]
        names = {**NAMES, **{n: x.detach().clone() for n, x in self.values.items()}}
        try:
            exec("\n".join(lines), names)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise steps.Unfit from error
        value = names[name]
        if not (value.isfinite().all() and (value.abs() <= LARGEST).all()):
            raise steps.Unfit
        if least is not None and (value < least).any():
            raise steps.Unfit
        if value.dim() > 4 or value.numel() > 2000:
            raise steps.Unfit
        self.lines += lines
        self.values[name] = value

    def source(self):
        """The program, which returns every value that it computes."""
        given = [name for name, _ in self.inputs]
        results = [name for name in self.values if name not in given]
        lines = [*self.lines, f"return {', '.join(results)},"]
        body = textwrap.indent("\n".join(lines), "    ")
        inputs = "".join(f"    {text},\n" for _, text in self.inputs)
        return f"def program({', '.join(given)}):\n{body}\n\ninputs = [\n{inputs}]\n"


@st.composite
def sources(draw, mesh):
    """The source code of a program for a mesh of this shape."""
    writer = Writer(draw, mesh)
    extents = st.lists(st.integers(0, 6), min_size=1, max_size=4)
    writer.given(draw(extents))
    for _ in range(STEPS):
        step = draw(st.none() | st.sampled_from(steps.STEPS))
        if step:
            with contextlib.suppress(steps.Unfit):
                step(writer)
    hypothesis.assume(writer.lines)
    return writer.source()


# ---- running ----------------------------------------------------------------


def run_on_rank(mesh, source, order):
    """Values and derivatives up to `order` are one device's; the layouts then met."""
    shardtensor.set_fallback_mode("silent")
    shardtensor.set_communication_timeout(WAIT)
    names = dict(NAMES)
    exec(source, names)
    for twice in [False, True][:order]:
        check_op(names["program"], *names["inputs"], mesh=mesh, second_order=twice)
    return list(oracle.layouts)


def derivatives(source):
    """Up to which order one device has them (2 at most): PyTorch refuses those of some
    empty tensors, some arguments that require gradients, and some second ones."""
    names = {**NAMES, "sharded": lambda tensor, *layout: tensor}
    exec(source, names)
    inputs, order = names["inputs"], 0
    try:
        outputs = [x for x in names["program"](*inputs) if x.requires_grad]
        ones = [torch.ones_like(x, requires_grad=True) for x in outputs]
        how = {"allow_unused": True, "create_graph": True}
        gradients = torch.autograd.grad(outputs, inputs, ones, **how)
        order = 1
        found = [x for x in gradients if x is not None and x.requires_grad]
        if found:
            torch.autograd.backward(found, [torch.ones_like(x) for x in found])
    except RuntimeError:
        return order
    return 2


def check_source(mesh, source, order):
    """Raises RankError with the program where it fails on the ranks of a mesh."""
    try:
        found = ranks.run(mesh, run_on_rank, source, order)
        if any(layouts != found[0] for layouts in found):
            raise ranks.RankError(f"layouts differ between ranks: {found}")
    except ranks.RankError as error:
        raise ranks.RankError(f"on mesh {mesh}:\n\n{source}\n{error}") from None


def search(mesh, count, seed=0):
    """Tries `count` programs; raises the smallest that fails."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(sources(tuple(map(int, str(mesh).split("x")))))
    def attempt(source):
        order = derivatives(source)
        hypothesis.assume(order)
        check_source(mesh, source, order)

    attempt()
