"""Several files, one after the other along the first dim."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

import numpy

from shardtensor.io.sources.source import Box, Source


class Joined(Source):
    def __init__(self, sources: Sequence[Source]):
        super().__init__({})
        self._sources = sources
        if self.counted:
            self._join()

    @property
    def counted(self) -> bool:
        return all(source.counted for source in self._sources)

    def count(self, part: int, parts: int) -> list:
        return [
            None if source.counted else source.count(part, parts)
            for source in self._sources
        ]

    def found(self, counts: Sequence) -> None:
        for index, source in enumerate(self._sources):
            if not source.counted:
                source.found([each[index] for each in counts])
        if self.counted:
            self._join()

    def _join(self):
        first = self._sources[0]
        for index, source in enumerate(self._sources):
            told = source.shape[1:], source.dtype, source.dims
            if told != (first.shape[1:], first.dtype, first.dims) or not source.shape:
                raise ValueError(
                    f"file {index} has shape {source.shape} of {source.dtype}, file 0 "
                    f"{first.shape} of {first.dtype}: only the first dim may differ"
                )
        self.attributes = _alike([source.attributes for source in self._sources])
        self._begins = list(
            itertools.accumulate((s.shape[0] for s in self._sources), initial=0)
        )
        self.shape = (self._begins.pop(), *first.shape[1:])
        self.dtype, self.dims, self.chunks = first.dtype, first.dims, first.chunks
        self.whole = any(source.whole for source in self._sources)

    @property
    def value_dtype(self) -> numpy.dtype:
        return numpy.result_type(*(source.value_dtype for source in self._sources))

    def begin(self, box: Box) -> Callable[[], numpy.ndarray]:
        return self._of_each(lambda source, part: source.begin(part), box)

    def begin_values(self, box: Box, wide: bool = False) -> Callable[[], numpy.ndarray]:
        """Each file has a scale and offset of its own."""
        return self._of_each(lambda source, part: source.begin_values(part, wide), box)

    def _of_each(self, begin_part: Callable, box: Box) -> Callable[[], numpy.ndarray]:
        rows = range(*box[0].indices(self.shape[0]))
        parts = []
        for source, begin in zip(self._sources, self._begins, strict=True):
            # Rows of `rows` within this file: positions first..last of the range.
            end = begin + source.shape[0]
            inside = rows[_position(rows, begin) : _position(rows, end)]
            if len(inside):
                local = slice(inside[0] - begin, inside[-1] + 1 - begin, rows.step)
                parts.append(begin_part(source, (local, *box[1:])))
        if not parts:
            return begin_part(self._sources[0], box)
        return lambda: numpy.concatenate([part() for part in parts])

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def beside(self, name: str) -> Source | None:
        """Coordinates along the first dim run through all files, others are alike."""
        found = [source.beside(name) for source in self._sources]
        if any(each is None for each in found):
            return None
        first = self.dims[0] if self.dims else None
        is_along_first = first in (name, *(found[0].dims or ())[:1])
        return JoinedTimes(found) if first and is_along_first else found[0]

    def chunk_begins(self, dim: int) -> Sequence[int]:
        if dim != 0:
            return self._sources[0].chunk_begins(dim)
        if not any(source.chunks for source in self._sources):
            return range(self.shape[0])
        return [
            begin + inner
            for source, begin in zip(self._sources, self._begins, strict=True)
            for inner in source.chunk_begins(0)
        ]


def _alike(attributes: Sequence[dict]) -> dict:
    """Those that are the same in all files."""
    first, *others = attributes
    return {
        key: value
        for key, value in first.items()
        if all(repr(other.get(key)) == repr(value) for other in others)
    }


class JoinedTimes:
    """A coordinate of several files, each with units of its own."""

    def __init__(self, parts: Sequence[Source]):
        self.parts = parts


def _position(rows: range, row: int) -> int:
    """How many of `rows` come before `row`."""
    return bisect.bisect_left(rows, row)
