"""One case: a sample with one of its tensors cut, against one device."""

import copy
import dataclasses
import itertools
import math

import oracle
import torch
from oracle import assert_close, from_spec, merged, shard, uneven
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import shardtensor
from shardtensor import ShardTensor

SEED = 5
# Operators whose values are whatever the memory held.
UNDEFINED = ("empty", "new_empty")


@dataclasses.dataclass
class Run:
    """What came of a call: its results, or the error that it raised."""

    error: str = ""
    outputs: list = dataclasses.field(default_factory=list)
    given: list = dataclasses.field(default_factory=list)  # the arguments
    written: list = dataclasses.field(default_factory=list)  # which of them were
    leaves: list = dataclasses.field(default_factory=list)
    gradients: list = dataclasses.field(default_factory=list)
    gradient_error: str = ""
    seconds: list = dataclasses.field(default_factory=list)  # second derivatives
    second_error: str = ""
    forward: tuple = (0, 0, 0)  # exchanges, all-reduces, bytes
    backward: tuple = (0, 0, 0)


def layouts(shape, mesh):
    """(name, placements, sizes): each dim cut evenly, unevenly, with an empty piece,
    and as one that is merged from two, where its extent allows. On a mesh of more
    axes: two dims, one dim by all axes, one axis alone."""
    if not shape:
        yield "replicated", [Replicate()] * mesh.ndim, None
    for dim, extent in enumerate(shape):
        fewer = [0, *uneven(extent, mesh.size(-1) - 1)]
        if mesh.ndim == 1:
            yield f"dim {dim} even", [Shard(dim)], None
            yield f"dim {dim} uneven", [Shard(dim)], {dim: uneven(extent, mesh.size())}
            yield f"dim {dim} empty", [Shard(dim)], {dim: fewer}
        else:
            dims = [(dim + axis % 2) % len(shape) for axis in range(mesh.ndim)]
            yield f"dim {dim} even", [Shard(d) for d in dims], None
            sizes = uneven(extent, mesh.size())
            yield f"dim {dim} uneven", [Shard(dim)] * mesh.ndim, {dim: sizes}
            whole = [Replicate()] * (mesh.ndim - 1)
            yield f"dim {dim} empty", [*whole, Shard(dim)], {dim: fewer}
        if pieces := merged(extent, mesh.size()):
            yield f"dim {dim} merged", [Shard(dim)] * mesh.ndim, {dim: pieces}


def plain(i, x):
    return x.detach().clone()


def cut_at(positions, placements, sizes, mesh, sample):
    """Puts the tensors at `positions` down as ShardTensors, and those of out="""
    written = {id(x) for x in tree_leaves(sample.kwargs.get("out"))}

    def place(i, x):
        if i in positions:
            return shard(x.detach(), mesh, placements, sizes)
        if id(x) in written:
            whole = [Replicate()] * (mesh.ndim - bool(x.dim()))
            return shard(x, mesh, [Shard(0)] * bool(x.dim()) + whole)
        return plain(i, x)

    return place


def perform(sample, place, undefined=False):
    """The call with its tensors put down by `place`, and its gradients."""
    run = Run()
    leaves, tree = tree_flatten((sample.args, sample.kwargs))
    for i, x in enumerate(leaves):
        if isinstance(x, torch.Tensor):
            leaves[i] = place(i, x).requires_grad_(x.requires_grad)
    call = copy.deepcopy(sample.call)
    args, kwargs = tree_unflatten(leaves, tree)
    counted = _counted()
    torch.manual_seed(SEED)
    try:
        result = call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  compared with one device's
        run.error = _said(error)
        return run
    run.forward = _counted(counted)
    run.outputs = tree_leaves(result)
    run.given = leaves
    run.written = [
        i for i, x in enumerate(leaves)
        if isinstance(x, torch.Tensor) and x._version and not x.requires_grad
    ]  # fmt: skip
    run.leaves = [x for x in leaves if _needs_grad(x)]
    if isinstance(call, torch.nn.Module):
        run.outputs += list(call.buffers())
        run.leaves += [p for p in call.parameters() if p.requires_grad]
    if not undefined:
        _differentiate(run)
    return run


def _needs_grad(x):
    return isinstance(x, torch.Tensor) and x.requires_grad


def _is_whole(dtype):
    """Of integers, which some operators say need gradients."""
    return not (dtype.is_floating_point or dtype.is_complex)


def _differentiate(run):
    outputs = [x for x in run.outputs if _needs_grad(x) and not _is_whole(x.dtype)]
    if not outputs or not run.leaves:
        return
    generator = torch.Generator("cpu").manual_seed(SEED)
    directions = [_direction(x, generator) for x in outputs]
    counted = _counted()
    try:
        run.gradients = list(
            torch.autograd.grad(
                outputs, run.leaves, directions, allow_unused=True, retain_graph=True
            )
        )
    except Exception as error:  # noqa: BLE001  compared with one device's
        run.gradient_error = _said(error)
    run.backward = _counted(counted)
    if not run.gradient_error:
        _differentiate_twice(run, outputs, directions, generator)


def _differentiate_twice(run, outputs, directions, generator):
    """By the leaves and by the directions of the first derivatives."""
    directions = [x.requires_grad_() for x in directions]
    at = [*run.leaves, *directions]
    try:
        gradients = torch.autograd.grad(
            outputs, run.leaves, directions, allow_unused=True, create_graph=True
        )
        chosen = [x is not None and x.requires_grad for x in gradients]
        further = [_direction(x, generator) for x in run.leaves]
        run.seconds = [None] * len(at)
        if any(chosen):
            gradients = itertools.compress(gradients, chosen)
            further = itertools.compress(further, chosen)
            run.seconds = list(
                torch.autograd.grad(
                    list(gradients), at, list(further), allow_unused=True
                )
            )
    except Exception as error:  # noqa: BLE001  compared with one device's
        run.second_error = _said(error)
    run.leaves = at


def _direction(x, generator):
    """The same random numbers for a tensor and for its pieces."""
    whole = torch.randn(x.shape, dtype=x.dtype, generator=generator, device="cpu")
    whole = whole.to(x.device)
    if isinstance(x, ShardTensor):
        return from_spec(whole, x._spec.without_partial())
    return whole


def _said(error):
    return f"{type(error).__name__}: {str(error).strip()}"


def _counted(since=(0, 0, 0)):
    stats = shardtensor.comm_stats()
    now = stats.exchanges, stats.all_reduces, stats.bytes
    return tuple(n - s for n, s in zip(now, since))


def compare(actual, expected, undefined, row_major):
    """Raises AssertionError where the ranks' run is not one device's. `row_major`: all
    that was given lies so in the sample; pieces always do."""
    assert len(actual.outputs) == len(expected.outputs), "number of outputs"
    for i, (a, e) in enumerate(zip(actual.outputs, expected.outputs)):
        what = f"output {i}"
        if not isinstance(e, torch.Tensor):
            same = a == e or (isinstance(e, float) and math.isnan(e) and math.isnan(a))
            assert same, f"{what}: {a!r}, expected {e!r}"
        elif undefined:
            assert (a.shape, a.dtype) == (e.shape, e.dtype), what
        else:
            assert a.requires_grad == e.requires_grad, f"{what}: requires_grad"
            assert_close(a, e, what=what)
            told = f"{what}: strides {a.stride()}, expected {e.stride()}"
            alike = strides_that_matter(a) == strides_that_matter(e)
            assert alike or not row_major, told
    for i in expected.written:
        assert_close(actual.given[i], expected.given[i], what=f"written tensor {i}")
    compare_gradients(actual.gradients, expected.gradients, actual, expected, "")
    if not expected.second_error:
        compare_gradients(actual.seconds, expected.seconds, actual, expected, "second ")


def compare_gradients(gradients, wanted, actual, expected, order):
    tolerance = {}
    if any(x.dtype == torch.float32 for x in expected.leaves):  # beside float64
        tolerance = {"rtol": 1.3e-6, "atol": 1e-5}
    for i, (a, e) in enumerate(zip(gradients, wanted)):
        e = torch.zeros_like(expected.leaves[i]) if e is None else e
        leaf = actual.leaves[i]
        a = torch.zeros_like(leaf) if a is None else a
        assert isinstance(a, ShardTensor) == isinstance(leaf, ShardTensor), (
            f"{order}gradient {i}: a {type(a).__name__}, of a {type(leaf).__name__}"
        )
        assert_close(a, e, what=f"{order}gradient {i}", **tolerance)


def strides_that_matter(x):
    return [s for n, s in zip(x.shape, x.stride()) if n > 1 and x.numel()]


@dataclasses.dataclass
class Verdict:
    """What one rank says about a case."""

    kind: str  # native, gathered, refused, raised; wrong, accepted
    text: str = ""
    layouts: str = ""
    forward: tuple = (0, 0, 0)
    backward: tuple = (0, 0, 0)
    gathered: dict = dataclasses.field(default_factory=dict)


def is_row_major(sample):
    leaves = tree_leaves((sample.args, sample.kwargs))
    return all(
        x.layout == torch.strided and x.is_contiguous()
        for x in leaves if isinstance(x, torch.Tensor)
    )  # fmt: skip


def judge(sample, place, expected, undefined):
    """This rank's verdict on a case."""
    oracle.layouts.clear()
    shardtensor.reset_fallback_counts()
    actual = perform(sample, place, undefined)
    gathered = {op: n for op, (_, n) in shardtensor.fallback_counts().items()}
    verdict = Verdict("gathered" if gathered else "native", gathered=gathered)
    verdict.forward, verdict.backward = actual.forward, actual.backward
    error = actual.error or actual.gradient_error
    wanted = expected.error or (not actual.error and expected.gradient_error)
    if not expected.second_error:  # PyTorch lacks some
        error = error or actual.second_error
    if error or wanted:
        verdict.kind = ("raised" if wanted else "refused") if error else "accepted"
        verdict.text = error or wanted
        return verdict
    try:
        compare(actual, expected, undefined, is_row_major(sample))
    except AssertionError as difference:
        verdict.kind, verdict.text = "wrong", str(difference)
    except Exception as late:  # noqa: BLE001  the value of a Partial is asked for here
        verdict.kind, verdict.text = "refused", _said(late)
    verdict.layouts = "; ".join(oracle.layouts)
    return verdict
