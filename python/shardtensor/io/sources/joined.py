"""Several files, one after the other along the first dim."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy

from shardtensor.io.sources.source import Box, Source


class Joined(Source):
    def __init__(self, sources: Sequence[Source]):
        first = sources[0]
        for index, source in enumerate(sources):
            told = source.shape[1:], source.dtype, source.dims
            if told != (first.shape[1:], first.dtype, first.dims) or not source.shape:
                raise ValueError(
                    f"file {index} has shape {source.shape} of {source.dtype}, file 0 "
                    f"{first.shape} of {first.dtype}: only the first dim may differ"
                )
        super().__init__(first.attributes)
        self._sources = sources
        self._begins = list(
            itertools.accumulate((s.shape[0] for s in sources), initial=0)
        )
        self.shape = (self._begins.pop(), *first.shape[1:])
        self.dtype, self.dims, self.whole = first.dtype, first.dims, first.whole
        self.chunks = first.chunks

    def read(self, box: Box) -> numpy.ndarray:
        rows = range(*box[0].indices(self.shape[0]))
        parts = []
        for source, begin in zip(self._sources, self._begins, strict=True):
            # Rows of `rows` within this file: positions first..last of the range.
            end = begin + source.shape[0]
            inside = rows[_position(rows, begin) : _position(rows, end)]
            if len(inside):
                local = slice(inside[0] - begin, inside[-1] + 1 - begin, rows.step)
                parts.append(source.read((local, *box[1:])))
        return numpy.concatenate(parts) if parts else self._sources[0].read(box)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def beside(self, name: str) -> Source | None:
        """Coordinates of the first dim run through all files, others are alike."""
        found = [source.beside(name) for source in self._sources]
        if any(each is None for each in found):
            return None
        along_first = self.dims is not None and name == self.dims[0]
        return JoinedTimes(found) if along_first else found[0]

    def chunk_begins(self, dim: int) -> Sequence[int]:
        if dim != 0:
            return self._sources[0].chunk_begins(dim)
        return [
            begin + inner
            for source, begin in zip(self._sources, self._begins, strict=True)
            for inner in source.chunk_begins(0)
        ]


class JoinedTimes:
    """A coordinate of several files, each with units of its own."""

    def __init__(self, parts: Sequence[Source]):
        self.parts = parts


def _position(rows: range, row: int) -> int:
    """How many of `rows` come before `row`."""
    return bisect.bisect_left(rows, row)
