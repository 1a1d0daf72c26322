"""Tables of numbers as text, edge lists among them: a row in each line, numbers apart
by commas, semicolons or space, in .tsv files by tabs, too. A field with nothing
between two of these (space alone is one) is NaN. A head of names in the first line,
what stands behind #, lines that begin with % and empty ones are left out. Integers
where every number is one."""

from __future__ import annotations

import codecs
import re

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
_NOTHING = b"nAn"  # stands in an empty field: a number, as nobody else writes it


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

    def __init__(self, file: File, separators: bytes):
        super().__init__(file)
        self._separators = separators
        self._empty = _empty_field(separators)

    def lines(self, text: bytes) -> Lines:
        text = without_comments(b"\n" + text.removeprefix(codecs.BOM_UTF8))
        text = self._empty.sub(rb"\g<0>" + _NOTHING, text)
        return Lines(text[1:], self._separators)

    def kinds(self, lines: Lines) -> numpy.ndarray:
        place = _first_fields(lines)
        first = lines.text[place]
        is_row = _NUMBER_BEGINS[first]
        for name in (b"nan", b"inf", b"infinity"):
            is_row |= lines.stands_at(place, name, any_case=True)
        # Which is no number of NumPy's: an error, as in other lines, and no head.
        is_row |= lines.stands_at(place, b"NA")
        is_row |= (place == lines.ends) & (lines.counts > 0)  # empty fields alone
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


def _empty_field(separators):
    """What stands before one: a separator, or the line before."""
    one = b"[" + separators + b"]"
    space = b"[" + bytes(c for c in b" \t\r\v\f" if c not in separators) + b"]*"
    begins = [b"\n" + space + b"(?=" + one + b")"]
    # A character each: re then looks for these alone.
    begins += [
        bytes([each]) + space + b"(?=" + one + rb"|\n|\Z)" for each in separators
    ]
    return re.compile(b"|".join(begins))


def _first_fields(lines):
    """Where the first field that is not empty begins, the line's end where all are."""
    is_empty = lines.stands_at(lines.words, _NOTHING)
    begins = numpy.append(lines.words[~is_empty], len(lines.text))
    place = begins[numpy.searchsorted(begins, lines.begins)]
    return numpy.minimum(place, lines.ends)


class TableSource(LineSource):
    def __init__(self, file: File, separators: bytes):
        super().__init__(TableFile(file, separators))

    def resolve(self) -> None:
        table = self._lines.table
        has_rows = table["row"] > 0
        low, high = table["min"][has_rows], table["max"][has_rows]
        if not len(low):
            raise ValueError("the file has no row of numbers")
        rows_before = numpy.cumsum(table["row"]) - table["row"]
        is_after = table["other after"].any() or table["other"][rows_before > 0].any()
        if is_after or table["other"].sum() > 1:
            raise ValueError("a line after the first is no row of numbers")
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
    is_cut_at_tabs = path.lower().endswith(".tsv")
    return TableSource(File(path), b",;\t" if is_cut_at_tabs else b",;")
