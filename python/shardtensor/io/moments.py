"""Mean and deviation of what is too large to read: one pass, shared by all ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.agree import agree
from shardtensor.device_mesh import core_mesh, default_mesh, device_of, whole_group
from shardtensor.io import boxes
from shardtensor.io.array import Array

BLOCK = 1 << 24  # elements that a rank reads at a time


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of the values that are no NaN; float64, of the shape of the kept dims. std is
    that of the whole population."""

    count: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    min: torch.Tensor
    max: torch.Tensor


def statistics(
    array: Array,
    mesh: DeviceMesh | None = None,
    *,
    keep: Sequence[int] = (),
    index: object = ...,
) -> Statistics:
    """Over all dims of `array[index]` but those in `keep`: keep=(1,) of (time,
    channel, y, x) gives one mean for each channel. Each rank reads its share of the
    dim with the most chunks, some blocks at a time, and merges its terms with the
    others'; the same bits on every rank. Communication: a small reduction, a gather of
    the terms."""
    mesh = default_mesh() if mesh is None else mesh
    position = core_mesh(mesh).position
    if not isinstance(array, Array):
        agree(mesh, TypeError(f"statistics: expected an Array, got {array!r}"))
    array._count_together(mesh)
    told = terms = problem = None
    try:
        if array.dtype.is_complex:
            raise TypeError(f"statistics: expected real numbers, got {array.dtype}")
        rows, kept = boxes.selected(index, array.shape)
        keep = _kept(keep, len(kept))
        told = tuple(array.shape), index, keep
        dim = _widest(array, rows, kept, keep)
        terms = _empty([len(rows[kept[dim]]) for dim in keep])
        for block in _blocks(array, rows, kept, keep, dim, mesh.size(), position):
            terms = _merge(terms, _terms(block, keep))
    except Exception as error:  # noqa: BLE001  whatever it is, all must know
        problem = error
    agree(mesh, problem, told, "statistics: ")
    return _finish(_merged(torch.stack(terms), mesh))


def _kept(keep, ndim):
    if not isinstance(keep, Sequence):
        raise TypeError(f"statistics: keep: expected dims, got {keep!r}")
    for dim in keep:
        if not -ndim <= dim < ndim:
            raise IndexError(f"statistics: dim {dim} of an array of {ndim} dims")
    dims = sorted(dim % ndim for dim in keep)
    if len(set(dims)) < len(dims):
        raise ValueError(f"statistics: keep: expected each dim once, got {keep}")
    return dims


def _widest(array, rows, kept, keep):
    """The dim to share: of those that are summed the one with the most chunks."""
    free = [dim for dim in range(len(kept)) if dim not in keep]
    if not free:
        raise ValueError("statistics: expected a dim that is not kept")
    if not all(len(rows[kept[dim]]) for dim in free):
        raise ValueError(f"statistics: nothing in shape {[len(rows[d]) for d in kept]}")
    chunks = array.chunks or [1] * array.ndim
    return max(free, key=lambda dim: len(rows[kept[dim]]) / chunks[kept[dim]])


def _blocks(array, rows, kept, keep, dim, ranks, position):
    """This rank's share, some rows at a time, whole chunks if they fit."""
    file_dim = kept[dim]
    sizes = array.chunk_sizes(dim, ranks, _index(rows, kept))
    begin = sum(sizes[:position])
    others = math.prod(len(rows[d]) for d in kept if d != file_dim)
    at_a_time = max(1, BLOCK // max(1, others))
    if array.chunks:
        chunk = array.chunks[file_dim]
        at_a_time = max(1, at_a_time // chunk) * chunk
    end = begin + sizes[position]
    for first in range(begin, end, at_a_time):
        part = list(rows)
        part[file_dim] = rows[file_dim][first : min(first + at_a_time, end)]
        # Also of packed numbers, which float32 would round.
        dtype = torch.float64 if array.dtype.is_floating_point else None
        yield array._begin(_index(part, kept), dtype)()


def _index(rows, kept):
    return tuple(
        boxes.as_slice(each) if dim in kept else each.start
        for dim, each in enumerate(rows)
    )


# ---- terms: count, mean, sum of squared differences, min, max ---------------


def _empty(shape):
    zero = torch.zeros(shape, dtype=torch.float64, device="cpu")
    return zero, zero, zero, zero + math.inf, zero - math.inf


def _terms(block, keep):
    x = block.double().movedim(keep, list(range(len(keep)))).flatten(len(keep))
    there = ~x.isnan()
    count = there.sum(-1, dtype=torch.float64)
    mean = torch.where(there, x, 0).sum(-1) / count.clamp(min=1)
    squares = torch.where(there, x - mean.unsqueeze(-1), 0).square().sum(-1)
    low = torch.where(there, x, math.inf).amin(-1)
    return count, mean, squares, low, torch.where(there, x, -math.inf).amax(-1)


def _merge(one, other):
    """Chan's: nothing is lost where the mean is large. An infinite one stays so."""
    count = one[0] + other[0]
    share = other[0] / count.clamp(min=1)
    apart = other[1] - one[1]
    is_finite = one[1].isfinite() & other[1].isfinite()
    return (
        count,
        torch.where(is_finite, one[1] + apart * share, one[1] + other[1]),
        one[2] + other[2] + apart.square() * one[0] * share,
        torch.minimum(one[3], other[3]),
        torch.maximum(one[4], other[4]),
    )


def _merged(terms, mesh):
    """In rank order, on every rank."""
    mine = terms.to(device_of(mesh))
    everyone = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(everyone, mine, whole_group(mesh))
    merged = tuple(everyone[0])
    for other in everyone[1:]:
        merged = _merge(merged, tuple(other))
    return merged


def _finish(terms):
    count, mean, squares, low, high = terms
    nothing = count == 0
    mean, low, high = (torch.where(nothing, math.nan, x) for x in (mean, low, high))
    return Statistics(count.long(), mean, (squares / count).sqrt(), low, high)
