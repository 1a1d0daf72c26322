"""Tables of numbers as text, edge lists among them: a row in each line, numbers apart
by commas, semicolons or space. A head of names, what stands behind #, lines that
begin with % and empty ones are left out. Integers where every number is one."""

from __future__ import annotations

import numpy

from shardtensor.io.sources.lines import (
    LineFile,
    Lines,
    LineSource,
    joined,
    without_comments,
)
from shardtensor.io.sources.source import Source
from shardtensor.io.sources.stored_bytes import File

_ROW, _OTHER = 0, 1


def _characters(text: bytes) -> numpy.ndarray:
    known = numpy.zeros(256, bool)
    known[list(text)] = True
    return known


_NUMBER_BEGINS = _characters(b"+-.0123456789")
_IN_INTEGERS = _characters(b"+-0123456789,; \t\r\n\v\f")


class TableFile(LineFile):
    KINDS = ("row", "other")
    # Other lines after a row, the fewest and most numbers of a row, whether all
    # are integers.
    EXTRA = ("other after", "min", "max", "integers")

    def lines(self, text: bytes) -> Lines:
        return Lines(without_comments(text), space=b",;")

    def kinds(self, lines: Lines) -> numpy.ndarray:
        first = lines.first_characters()
        is_row = _NUMBER_BEGINS[first]
        for name in (b"nan", b"NaN", b"inf", b"Inf"):
            is_row |= lines.starts_with(name)
        left_out = (lines.counts == 0) | (first == ord("%"))
        return numpy.where(is_row, _ROW, numpy.where(left_out, -1, _OTHER))

    def extra(self, lines: Lines, kinds: numpy.ndarray) -> list[int]:
        rows = numpy.flatnonzero(kinds == _ROW)
        if not len(rows):
            return [0, 0, 0, 1]
        after = int((kinds[rows[0] :] == _OTHER).sum())
        widths = lines.counts[rows]
        edges = numpy.zeros(len(lines.text) + 1, numpy.int8)
        edges[lines.begins[rows]] += 1
        edges[lines.ends[rows]] -= 1
        of_rows = numpy.cumsum(edges[:-1], dtype=numpy.int8).astype(bool)
        whole = bool(_IN_INTEGERS[lines.text[of_rows]].all())
        return [after, int(widths.min()), int(widths.max()), int(whole)]


class TableSource(LineSource):
    def __init__(self, file: File):
        super().__init__(TableFile(file))

    def resolve(self) -> None:
        table = self._lines.table
        has_rows = table["row"] > 0
        low, high = table["min"][has_rows], table["max"][has_rows]
        if not len(low):
            raise ValueError("the file has no row of numbers")
        rows_before = numpy.cumsum(table["row"]) - table["row"]
        if table["other after"].any() or table["other"][rows_before > 0].any():
            raise ValueError("a line after the first row is no row of numbers")
        if low.min() != high.max():
            raise ValueError(f"rows of {low.min()} and of {high.max()} numbers")
        self.dtype = numpy.dtype("i8" if table["integers"].all() else "f8")
        self.shape = self._lines.total("row"), int(low.min())

    def rows(self, begin: int, end: int) -> numpy.ndarray:
        parts = [
            lines.numbers(wanted, self.dtype, 0, self.shape[1])
            for _, lines, _, wanted in self._lines.blocks("row", begin, end)
        ]
        return joined(parts, self.shape, self.dtype)


def open_source(path: str, variable: str | None) -> Source:
    if variable is not None:
        raise ValueError("a table has no variables")
    return TableSource(File(path))
