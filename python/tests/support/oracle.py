"""The oracle: the same computation on one unsharded tensor.

Comparisons look at this rank's own piece against the piece that its layout
promises, so they need no communication and cannot be fooled by a gather that
makes the same mistake twice. The layouts are handed to the harness, which
fails the test when ranks disagree about them.
"""

import copy
import dataclasses
import os
import re

import pytest
import rig
import torch
from torch.utils._pytree import tree_leaves

# str(spec) of every comparison in this test body, see ranks.py.
layouts = []
# `make test-all` sweeps more of what is alike; see conftest.py.
WHOLE = os.environ.get("SWEEP") == "whole"


def every(nth, items, start=0):
    """One of each `nth` that are alike, of the first the one at `start`; a whole sweep
    has them all. Which one goes by the sum of digits (the Thue-Morse sequence), so that
    no row and no column of a table is left out."""
    items, chosen = list(items), []
    for number, first in enumerate(range(0, len(items), nth)):
        place, rest = start, number
        while rest:
            rest, digit = divmod(rest, nth)
            place += digit
        alike = items[first : first + nth]
        chosen.append(alike[place % len(alike)])
    return items if WHOLE else chosen


def uneven(extent, ranks):
    """Decreasing piece sizes, as different as possible: uneven(10, 3) is
    [5, 3, 2]. Pieces may be empty when there are few rows."""
    weights = list(range(ranks + 1, 1, -1))
    sizes = [extent * w // sum(weights) for w in weights]
    sizes[0] += extent - sum(sizes)
    return sizes


class Repeated(list):
    """Piece sizes of a dim merged from others: the same cut `repeat` times."""

    def __init__(self, sizes, repeat):
        super().__init__(sizes)
        self.repeat = repeat

    def __repr__(self):
        return f"{self.repeat} x {super().__repr__()}"


def partitions(extent, ranks, repeated=True):
    """Piece sizes to sweep: torch.chunk's split or an uneven one, one with empty pieces
    and, where the extent has a divisor, an uneven one repeated. Which of the first two,
    and of what is empty, the first piece, the last one or all but one, the extent
    decides; a whole sweep has them all, and the uneven one's reverse."""
    step = -(-extent // ranks)
    chunk = [max(0, min(step, extent - r * step)) for r in range(ranks)]
    if ranks == 1:
        return [chunk]
    fewer, none = uneven(extent, ranks - 1), [0] * (ranks - 1)
    empty = [[0, *fewer], [*fewer, 0], [*none, extent]]
    ordinary = [chunk, uneven(extent, ranks)[::-1]]
    if WHOLE:
        several = [*ordinary, uneven(extent, ranks), *empty]
    else:
        several = [ordinary[extent % 2], empty[extent % 3]]
    if repeated and (of_merged := merged(extent, ranks)):
        several.append(of_merged)
    return [p for i, p in enumerate(several) if p not in several[:i]]


def merged(extent, ranks):
    """The pieces of a dim merged from two, of which the second is cut unevenly; None
    where the extent has no small divisor."""
    repeat = next((n for n in (2, 3) if extent % n == 0 and extent > n), None)
    return repeat and Repeated(uneven(extent // repeat, ranks)[::-1], repeat)


# ---- making shards ----------------------------------------------------------


def shard(x, mesh, placements, sizes=None):
    """This rank's part of `x` (the same on all ranks) as a ShardTensor, a leaf
    that requires grad where x does. No communication. `sizes` gives the piece
    sizes per tensor dim, {2: [5, 3, 2]}; other dims are chunked. For a dim
    that several mesh axes shard, pieces are row-major over these axes. With a
    Partial placement the terms differ between ranks and reduce to x."""
    import shardtensor

    cuts = {dim: _cut(pieces) for dim, pieces in (sizes or {}).items()}
    spec = shardtensor.make_spec(mesh, x.shape, placements, cuts)
    return from_spec(x, spec).requires_grad_(x.requires_grad)


def _cut(pieces):
    from shardtensor import _C

    if isinstance(pieces, Repeated):
        return _C.Partition(list(pieces), pieces.repeat)
    return pieces


def from_spec(x, spec):
    """The plain tensor `x` laid out as `spec`, detached."""
    from shardtensor import ShardTensor

    local = piece(x.detach(), spec).clone().to(rig.DEVICE)
    for axis, placement in enumerate(spec.placements):
        if placement.is_partial():
            local = _term(local, spec.mesh, axis, placement.reduce_op)
    return ShardTensor.from_spec(local, spec)


def _term(local, mesh, axis, reduce_op):
    """What one rank contributes so that the reduction gives `local`."""
    rank, ranks = mesh.get_local_rank(axis), mesh.size(axis)
    if reduce_op != "sum":
        return local
    others = ranks * (ranks - 1) // 2
    return local - others if rank == 0 else torch.full_like(local, rank)


def piece(x, spec):
    """What this rank owns of the plain tensor `x`."""
    for dim in range(x.dim()):
        if spec.is_sharded(dim):
            partition = spec.partition(dim)
            begin, end = spec.interval(dim)
            x = x.unflatten(dim, (partition.repeat, partition.period))
            x = x.narrow(dim + 1, begin, end - begin).flatten(dim, dim + 1)
    return x


# ---- comparing --------------------------------------------------------------


def assert_close(actual, expected, *, rtol=None, atol=None, what="result"):
    """`actual` (a ShardTensor of any layout, or a plain tensor that must be the
    same everywhere) is the plain tensor `expected`: shape, dtype, values."""
    from shardtensor import ShardTensor

    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    assert actual.dtype == expected.dtype, (
        f"{what}: {actual.dtype}, expected {expected.dtype}"
    )
    actual, expected = actual.detach(), expected.detach()
    if isinstance(actual, ShardTensor):
        spec = actual._spec
        layouts.append(f"{what} {spec}")
        if any(p.is_partial() for p in spec.placements):
            actual = actual.full_tensor()
        else:
            actual, expected = actual.to_local(), piece(expected, spec)
        what = f"{what}, {spec}"
    actual, expected = actual.cpu(), expected.cpu()
    # What follows takes long to prepare what it may have to say, but compares
    # complex halves, too.
    alike = actual.dtype == expected.dtype != torch.complex32
    if alike and torch.equal(actual, expected):
        return
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


@dataclasses.dataclass
class Sharded:
    """An input of check_op that is a ShardTensor."""

    tensor: torch.Tensor
    placements: list
    sizes: dict | None = None


def sharded(tensor, placements, sizes=None):
    return Sharded(tensor, placements, sizes)


def check_op(
    fn, *inputs, mesh, second_order=False, backward=True, saves=False,
    rtol=None, atol=None,
):  # fmt: skip
    """`fn` gives the same on shards as on whole tensors: values, gradients of
    every input that requires grad and, if fn is a module, of its parameters,
    its buffers, and second-order gradients when asked. First order alone goes by
    backward, second order by autograd.grad, a whole sweep both ways. `saves`: ranks
    compare whether autograd saves anything. Returns the sharded outputs.

    Inputs made by sharded(tensor, placements, sizes) are ShardTensors in the
    sharded run; plain tensors stay plain (the same on every rank), everything
    else is passed on. `fn` may return any nest of tensors.

        check_op(F.conv1d, sharded(x, [Shard(2)], {2: [5, 3]}), w, mesh=mesh)
    """
    tolerance = {"rtol": rtol, "atol": atol}
    whole = [_whole(x) for x in inputs]
    parts = [_part(x, mesh) for x in inputs]
    reference = copy.deepcopy(fn)
    expected = reference(*whole)
    actual = _recorded(fn, parts) if saves else fn(*parts)
    _compare(actual, expected, "output", tolerance)
    if isinstance(fn, torch.nn.Module):
        _compare(list(fn.buffers()), list(reference.buffers()), "buffer", tolerance)
    leaves = _leaves(reference, whole), _leaves(fn, parts)
    if backward and leaves[0]:
        _check_gradients(expected, actual, leaves, second_order, tolerance)
    return actual


def _recorded(fn, parts):
    """Whether autograd saves anything, ranks compare: where it does not,
    torch.utils.checkpoint computes nothing again, and sends nothing."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(None) or x, lambda x: x
    ):
        result = fn(*parts)
    layouts.append("tensors are saved" if saved else "nothing is saved")
    return result


def _whole(x):
    x = x.tensor if isinstance(x, Sharded) else x
    return _leaf(x) if isinstance(x, torch.Tensor) else x


def _leaf(x):
    return x.detach().clone().to(rig.DEVICE).requires_grad_(x.requires_grad)


def _part(x, mesh):
    if isinstance(x, Sharded):
        return shard(x.tensor, mesh, x.placements, x.sizes)
    return _leaf(x) if isinstance(x, torch.Tensor) else x


def _leaves(fn, inputs):
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if isinstance(fn, torch.nn.Module):
        leaves += [p for p in fn.parameters() if p.requires_grad]
    return leaves


def _compare(actual, expected, what, tolerance):
    actual, expected = tree_leaves(actual), tree_leaves(expected)
    assert len(actual) == len(expected), f"{len(actual)} {what}s"
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(e, torch.Tensor):
            assert a == e, f"{what} {i}: {a!r}, expected {e!r}"
            continue
        assert a.requires_grad == e.requires_grad, f"{what} {i}: requires_grad"
        assert_close(a, e, what=f"{what} {i}", **tolerance)


def _check_gradients(expected, actual, leaves, second_order, tolerance):
    outputs = _differentiable(expected), _differentiable(actual)
    if not outputs[0]:
        return
    cotangents = _cotangents(*outputs, requires_grad=second_order)
    try:
        _check_orders(outputs, leaves, cotangents, second_order, tolerance)
    except RuntimeError as error:
        # A derivative that this version of PyTorch has not, ranks have not either.
        if "derivative for" not in str(error):
            raise
        for out, cot in zip(outputs, cotangents, strict=True):
            with pytest.raises(type(error), match=re.escape(str(error))):
                torch.autograd.backward(out, cot)


def _check_orders(outputs, leaves, cotangents, second_order, tolerance):
    if second_order or WHOLE:
        grads = [
            torch.autograd.grad(
                out,
                at,
                cot,
                create_graph=second_order,
                retain_graph=True,
                allow_unused=True,
            )
            for out, at, cot in zip(outputs, leaves, cotangents, strict=True)
        ]
        _compare_gradients(grads, leaves, "gradient", tolerance)
    if second_order:
        _check_second_order(grads, leaves, cotangents, tolerance)
    if not second_order or WHOLE:
        _check_accumulated(outputs, leaves, cotangents, tolerance)


def _check_accumulated(outputs, leaves, cotangents, tolerance):
    for out, at, cot in zip(outputs, leaves, cotangents, strict=True):
        for leaf in at:
            leaf.grad = None
        torch.autograd.backward(out, [c.detach() for c in cot])
    accumulated = [[leaf.grad for leaf in at] for at in leaves]
    _compare_gradients(accumulated, leaves, "accumulated gradient", tolerance)


def _check_second_order(grads, leaves, cotangents, tolerance):
    chosen = [
        i
        for i, g in enumerate(grads[0])
        if g is not None and g.requires_grad and grads[1][i] is not None
    ]
    if not chosen:
        return
    picked = [[g[i] for i in chosen] for g in grads]
    directions = _cotangents(*picked, requires_grad=False)
    at = [list(a) + list(c) for a, c in zip(leaves, cotangents, strict=True)]
    seconds = [
        torch.autograd.grad(g, a, d, retain_graph=True, allow_unused=True)
        for g, a, d in zip(picked, at, directions, strict=True)
    ]
    _compare_gradients(seconds, at, "second-order gradient", tolerance)


def _differentiable(outputs):
    return [
        t for t in tree_leaves(outputs)
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]  # fmt: skip


def _cotangents(expected, actual, requires_grad):
    """Random tensors of the outputs' shapes, whole and laid out like them."""
    from shardtensor import ShardTensor

    whole = [torch.randn_like(e.detach()) for e in expected]
    parts = []
    for w, a in zip(whole, actual, strict=True):
        parts.append(w.clone())
        if isinstance(a, ShardTensor):
            parts[-1] = from_spec(w, a._spec.without_partial())
    for t in whole + parts:
        t.requires_grad_(requires_grad)
    return whole, parts


def _compare_gradients(grads, leaves, what, tolerance):
    from shardtensor import ShardTensor

    for i, (e, a) in enumerate(zip(*grads, strict=True)):
        leaf = leaves[1][i]
        if e is None and a is None:
            continue
        # An absent gradient is a zero one.
        e = torch.zeros_like(leaves[0][i]) if e is None else e
        a = torch.zeros_like(leaf) if a is None else a
        kind = isinstance(leaf, ShardTensor)
        assert isinstance(a, ShardTensor) == kind, (
            f"{what} {i} is a {type(a).__name__}, of a {type(leaf).__name__}"
        )
        assert_close(a, e, what=f"{what} {i}", **tolerance)
