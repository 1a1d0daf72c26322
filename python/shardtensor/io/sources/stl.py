"""STL: facets, each with its normal and its own three corners. Which corners are one
point is a question to all of them: `points` and cells are not read by piece."""

from __future__ import annotations

import codecs
import re

import numpy

from shardtensor.io.sources.lines import LineFile, Lines, LineSource, joined
from shardtensor.io.sources.source import Box, Source, rows_of_box
from shardtensor.io.sources.stored_bytes import File

CORNERS, NORMALS = "corners", "cell_data/facet_normals/triangle"
_AROUND = (b"solid", b"endsolid", b"outer", b"endloop", b"endfacet")
_VERTEX = re.compile(rb"\bvertex(?:[ \t]+[-+.\de]+){3}")
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
    begin = head.removeprefix(codecs.BOM_UTF8).lstrip()[:5]
    return begin.lower() == b"solid" and b"\0" not in head


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
    KINDS = ("facet", "vertex", "other")
    EXTRA = ("vertices",)  # on lines of their own or not

    def lines(self, text: bytes) -> Lines:
        return Lines(text.lower())

    def kinds(self, lines: Lines) -> numpy.ndarray:
        found = numpy.where(lines.counts > 0, self.KINDS.index("other"), -1)
        for word in _AROUND:
            found[lines.starts_with(word)] = -1
        for kind in ("facet", "vertex"):
            found[lines.starts_with(kind.encode())] = self.KINDS.index(kind)
        return found

    def extra(self, lines: Lines, kinds: numpy.ndarray) -> list[int]:
        return [len(_VERTEX.findall(lines.text.tobytes()))]


class TextFacets(LineSource):
    def __init__(self, file: File, variable: str):
        super().__init__(FacetLines(file))
        self._variable = variable

    def resolve(self) -> None:
        facets, vertices, others = map(self._lines.total, FacetLines.KINDS)
        told = int(self._lines.table["vertices"].sum())
        if told > vertices:
            raise ValueError(
                f"expected each vertex on a line of its own, got {told} on "
                f"{vertices} lines"
            )
        if vertices != 3 * facets:
            raise ValueError(
                f"{facets} facets have {vertices} corners, expected {3 * facets}"
            )
        if facets == 0 and others > 0:
            tell = "line tells" if others == 1 else "lines tell"
            raise ValueError(
                f"there is no facet, and {others} {tell} of something else"
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
