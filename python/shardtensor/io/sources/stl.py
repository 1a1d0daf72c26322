"""STL: facets, each with its normal and its own three corners. Which corners are one
point is a question to all of them: `points` and cells are not read by piece."""

from __future__ import annotations

import numpy

from shardtensor.io.sources.lines import LineFile, Lines, LineSource, joined
from shardtensor.io.sources.source import Box, Source, rows_of_box
from shardtensor.io.sources.stored_bytes import File

CORNERS, NORMALS = "corners", "cell_data/facet_normals/triangle"
_HEAD = 84
_FACET = numpy.dtype(
    [("normal", "<f4", (3,)), ("corners", "<f4", (3, 3)), ("attributes", "<u2")]
)


def open_facets(file: File, variable: str) -> Source:
    if _is_text(file):
        return TextFacets(file, variable)
    return BinaryFacets(file, variable)


def _is_text(file: File) -> bool:
    """Binary files may begin with "solid", too; no text has bytes of zero."""
    head = file.read_up_to(0, 512)
    return head.lstrip().startswith(b"solid") and b"\0" not in head


class BinaryFacets(Source):
    def __init__(self, file: File, variable: str):
        super().__init__({})
        self._file = file
        self._field = "corners" if variable == CORNERS else "normal"
        (count,) = numpy.frombuffer(file.read(_HEAD - 4, _HEAD), "<u4").tolist()
        expected = _HEAD + count * _FACET.itemsize
        if file.size != expected:
            raise ValueError(
                f"{count} facets need {expected} bytes, the file has {file.size}"
            )
        self.dtype, inner = _FACET[self._field].subdtype
        self.shape = (count, *inner)

    def read(self, box: Box) -> numpy.ndarray:
        return rows_of_box(self._rows, box)

    def _rows(self, begin, end):
        places = (_HEAD + row * _FACET.itemsize for row in (begin, end))
        return numpy.frombuffer(self._file.read(*places), _FACET)[self._field]


class FacetLines(LineFile):
    KINDS = ("facet", "vertex")

    def kinds(self, lines: Lines) -> numpy.ndarray:
        found = numpy.full(len(lines.ends), -1)
        for index, kind in enumerate(self.KINDS):
            found[lines.starts_with(kind.encode())] = index
        return found


class TextFacets(LineSource):
    def __init__(self, file: File, variable: str):
        super().__init__(FacetLines(file))
        self._variable = variable

    def resolve(self) -> None:
        facets, vertices = (self._lines.total(kind) for kind in FacetLines.KINDS)
        if vertices != 3 * facets:
            raise ValueError(
                f"{facets} facets have {vertices} corners, expected {3 * facets}"
            )
        self.dtype = numpy.dtype(numpy.float64)
        self.shape = (facets, 3, 3) if self._variable == CORNERS else (facets, 3)

    def rows(self, begin: int, end: int) -> numpy.ndarray:
        kind, lines_each, skipped = ("facet", 1, 2)
        if self._variable == CORNERS:
            kind, lines_each, skipped = ("vertex", 3, 1)
        parts = [
            lines.numbers(wanted, self.dtype, skipped, 3)
            for _, lines, _, wanted in self._lines.blocks(
                kind, begin * lines_each, end * lines_each
            )
        ]
        return joined(parts, (0, 3), self.dtype).reshape(-1, *self.shape[1:])
