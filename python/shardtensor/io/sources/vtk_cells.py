"""Cells of VTK's files, by kind, as meshio has them: rows of corners."""

from __future__ import annotations

import functools

import numpy

from shardtensor.io.sources.source import Box, Source, rows_of_box
from shardtensor.io.sources.stored_bytes import Numbers

# VTK's number of a kind: its name and how many corners it has.
KINDS = {
    1: ("vertex", 1),
    3: ("line", 2),
    5: ("triangle", 3),
    9: ("quad", 4),
    10: ("tetra", 4),
    12: ("hexahedron", 8),
    13: ("wedge", 6),
    14: ("pyramid", 5),
    15: ("penta_prism", 10),
    16: ("hexa_prism", 12),
    21: ("line3", 3),
    22: ("triangle6", 6),
    23: ("quad8", 8),
    24: ("tetra10", 10),
    25: ("hexahedron20", 20),
    26: ("wedge15", 15),
    27: ("pyramid13", 13),
    28: ("quad9", 9),
    29: ("hexahedron27", 27),
}
_WEDGE = 13
_WEDGE_ORDER = [0, 2, 1, 3, 5, 4]  # VTK's wedge points inwards


class Unsupported(Exception):
    """Nothing is wrong, but this is not read by piece."""


class CellTable:
    """Which cells are of which kind. All ranks read the kinds of all cells, a byte
    each in most files, and of everything else what is theirs."""

    def __init__(self, types: Numbers):
        self._types = types

    @functools.cached_property
    def _runs(self):
        """Cells of one kind that follow each other: kind, first cell, count."""
        types = self._types.rows(0, self._types.shape[0]).reshape(-1)
        types = types.astype(numpy.int64)
        begins = numpy.flatnonzero(numpy.diff(types, prepend=-1))
        counts = numpy.diff(begins, append=len(types))
        found = [int(kind) for kind in types[begins]]
        if unknown := set(found) - set(KINDS):
            raise Unsupported(f"cells of VTK's kinds {sorted(unknown)}")
        return found, begins, counts

    def names(self) -> list[str]:
        return [KINDS[kind][0] for kind in dict.fromkeys(self._runs[0])]

    def count(self, name: str) -> int:
        return sum(count for _, count, _ in self._of(name))

    def corners(self, name: str) -> int:
        return next(n for kind, n in KINDS.values() if kind == name)

    def total_corners(self, extra: int = 0) -> int:
        kinds, _, counts = self._runs
        return sum(
            (KINDS[k][1] + extra) * int(n) for k, n in zip(kinds, counts, strict=True)
        )

    def slices(self, name: str, begin: int, end: int, extra: int = 0):
        """Of the kind's rows [begin, end): for each run its first cell, its number
        of cells, and the corners before it, a cell with `extra` numbers more."""
        row = 0
        for first, count, corners in self._of(name, extra):
            low, high = max(begin - row, 0), min(end - row, count)
            if low < high:
                width = self.corners(name) + extra
                yield first + low, high - low, corners + low * width
            row += count

    def _of(self, name, extra=0):
        kinds, begins, counts = self._runs
        corners = 0
        for kind, first, count in zip(kinds, begins, counts, strict=True):
            if KINDS[kind][0] == name:
                yield int(first), int(count), corners
            corners += (KINDS[kind][1] + extra) * int(count)


class CellSource(Source):
    """cells/<kind>. `extra`: numbers before each cell's corners."""

    def __init__(self, table: CellTable, name: str, corners: Numbers, extra: int):
        super().__init__({})
        if corners.shape[0] != table.total_corners(extra):
            raise ValueError(
                f"the corners of all cells are {corners.shape[0]} numbers, their kinds "
                f"need {table.total_corners(extra)}"
            )
        self._table, self._name, self._corners = table, name, corners
        self._extra, self._width = extra, table.corners(name)
        self.shape, self.dtype = (table.count(name), self._width), corners.dtype

    def read(self, box: Box) -> numpy.ndarray:
        return rows_of_box(self._rows, box)

    def _rows(self, begin, end):
        slices = list(self._table.slices(self._name, begin, end, self._extra))
        if not slices:
            return numpy.empty((0, self._width), self.dtype)
        width = self._width + self._extra
        low, high = slices[0][2], slices[-1][2] + slices[-1][1] * width
        numbers = self._corners.rows(low, high)
        parts = [
            numbers[corner - low : corner - low + count * width].reshape(-1, width)
            for _, count, corner in slices
        ]
        found = numpy.concatenate(parts)[:, self._extra :]
        return found[:, _WEDGE_ORDER] if self._name == KINDS[_WEDGE][0] else found


class CellDataSource(Source):
    """cell_data/<name>/<kind>: rows of the values of all cells."""

    def __init__(self, table: CellTable, name: str, values: Numbers):
        super().__init__({})
        self._table, self._name, self._values = table, name, values
        self.shape = (table.count(name), *values.shape[1:])
        self.dtype = values.dtype

    def read(self, box: Box) -> numpy.ndarray:
        return rows_of_box(self._rows, box)

    def _rows(self, begin, end):
        slices = list(self._table.slices(self._name, begin, end))
        if not slices:
            return numpy.empty((0, *self.shape[1:]), self.dtype)
        low, high = slices[0][0], slices[-1][0] + slices[-1][1]
        values = self._values.rows(low, high)
        parts = [values[first - low : first - low + n] for first, n, _ in slices]
        return numpy.concatenate(parts)


class RowSource(Source):
    """Numbers as they are: points, point_data/<name>."""

    def __init__(self, numbers: Numbers):
        super().__init__({})
        self._numbers = numbers
        self.shape, self.dtype = numbers.shape, numbers.dtype

    def read(self, box: Box) -> numpy.ndarray:
        return rows_of_box(self._numbers.rows, box)


class VtkMesh:
    """What a file has of each thing; arrays are found, not read."""

    def __init__(self, points, types, corners, extra, point_data, cell_data):
        self._points, self._corners, self._extra = points, corners, extra
        self._point_data, self._cell_data = point_data, cell_data
        self._table = CellTable(types)

    def names(self) -> list[str]:
        kinds = self._table.names()
        return [
            "points",
            *(f"cells/{kind}" for kind in kinds),
            *(f"point_data/{name}" for name in self._point_data),
            *(f"cell_data/{n}/{kind}" for n in self._cell_data for kind in kinds),
        ]

    def source(self, variable: str) -> Source | None:
        """None where there is no such variable."""
        what, _, rest = variable.strip("/").partition("/")
        if variable == "points":
            return RowSource(self._points)
        if what == "point_data" and rest in self._point_data:
            return RowSource(self._point_data[rest])
        name, _, kind = rest.rpartition("/")
        if what == "cells" and rest in self._table.names():
            return CellSource(self._table, rest, self._corners, self._extra)
        if what == "cell_data" and name in self._cell_data:
            if kind in self._table.names():
                return CellDataSource(self._table, kind, self._cell_data[name])
        return None
