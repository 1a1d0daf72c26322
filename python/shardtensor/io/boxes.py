"""Which rows of a file a rank reads."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Mapping, Sequence

from shardtensor.spec import ShardTensorSpec

# Ghost rows: for both sides, (before, after), or by dim.
Halo = int | tuple[int, int] | Mapping[int, int | tuple[int, int]]


def selected(index: object, shape: Sequence[int]) -> tuple[list[range], list[int]]:
    """For each dim of a file the rows that `index` asks for, and the dims that
    stay in the result. As in NumPy: numbers, slices with steps forward and
    Ellipsis; None takes everything."""
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [slice(None) if part is None else part for part in parts]
    places = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(places) > 1:
        raise IndexError("an index has one Ellipsis at most")
    if not places:
        parts.append(Ellipsis)
    at = places[0] if places else len(parts) - 1
    missing = len(shape) - len(parts) + 1
    if missing < 0:
        raise IndexError(f"{len(parts) - 1} indices for {len(shape)} dims")
    parts[at : at + 1] = [slice(None)] * missing
    rows = [_rows(part, extent) for part, extent in zip(parts, shape, strict=True)]
    kept = [dim for dim, part in enumerate(parts) if isinstance(part, slice)]
    return rows, kept


def _rows(part, extent):
    if isinstance(part, slice):
        if part.step is not None and part.step < 1:
            raise IndexError(f"expected a step forward, got {part}")
        return range(*part.indices(extent))
    try:
        row = None if isinstance(part, bool) else operator.index(part)
    except TypeError:
        row = None
    if row is None:
        raise TypeError(
            f"expected numbers, slices and Ellipsis in an index, got {part!r}"
        )
    if not -extent <= row < extent:
        raise IndexError(f"index {row} is out of range for extent {extent}")
    return range(row % extent, row % extent + 1)


def as_slice(rows: range) -> slice:
    return slice(rows.start, rows.stop, rows.step) if len(rows) else slice(0, 0)


def within(
    rows: Sequence[range], kept: Sequence[int], wanted: Sequence[range]
) -> list[range]:
    """Of the rows of a file those at positions `wanted` of the kept dims."""
    found = list(rows)
    for dim, positions in zip(kept, wanted, strict=True):
        found[dim] = found[dim][positions.start : positions.stop]
    return found


def chunk_sizes(rows: range, begins: Sequence[int], pieces: int) -> list[int]:
    """Cuts `rows` into pieces at the borders of chunks nearest to an even cut.
    `begins`: the rows of the file where chunks begin. Pieces are empty where
    there are more of them than chunks.

        chunk_sizes(range(0, 10), range(0, 10, 4), 2)  # [4, 6]: chunks 4 4 2
    """
    cuts = [0]
    for piece in range(1, pieces):
        wanted = len(rows) * piece // pieces
        if not rows or wanted >= len(rows):
            cuts.append(len(rows))
            continue
        after = bisect.bisect_right(begins, rows[wanted])
        near = [begins[i] for i in (after - 1, after) if 0 <= i < len(begins)]
        borders = [bisect.bisect_left(rows, begin) for begin in near]
        borders += [len(rows)] if after == len(begins) else []
        last = cuts[-1]
        cuts.append(
            max(last, min(borders, key=lambda b: (abs(b - wanted), b <= last, b)))
        )
    cuts.append(len(rows))
    return [end - begin for begin, end in zip(cuts, cuts[1:], strict=False)]


def own_rows(spec: ShardTensorSpec) -> list[range]:
    """For each dim what this rank owns."""
    rows = [range(extent) for extent in spec.shape]
    for dim in range(spec.ndim):
        if spec.is_sharded(dim):
            if spec.partition(dim).repeat != 1:
                raise ValueError(
                    f"sizes: dim {dim} is cut {spec.partition(dim).repeat} times over; "
                    "expected one interval per rank"
                )
            rows[dim] = range(*spec.interval(dim))
    return rows


def widened(spec: ShardTensorSpec, halo: Halo) -> list[range]:
    """What this rank owns and the ghost rows around it, as far as there are any;
    of an empty piece those around the place where it would be."""
    rows = own_rows(spec)
    for dim, (before, after) in _widths(spec, halo).items():
        begin, end = rows[dim].start, rows[dim].stop
        rows[dim] = range(max(0, begin - before), min(spec.shape[dim], end + after))
    return rows


def _widths(spec, halo):
    """By dim; a number is for every sharded one."""
    if not isinstance(halo, Mapping):
        halo = {dim: halo for dim in range(spec.ndim) if spec.is_sharded(dim)}
    widths = {}
    for dim, width in halo.items():
        sides = (width, width) if isinstance(width, int) else width
        if (
            not isinstance(sides, Sequence)
            or len(sides) != 2
            or not all(isinstance(each, int) for each in (dim, *sides))
        ):
            raise TypeError(
                f"halo: expected a number of rows, or (before, after), got {width!r} "
                f"for dim {dim!r}"
            )
        if not -spec.ndim <= dim < spec.ndim or min(sides) < 0:
            raise ValueError(f"halo: {width} rows of dim {dim} of {spec.ndim}")
        widths[dim % spec.ndim] = tuple(sides)
    return widths
