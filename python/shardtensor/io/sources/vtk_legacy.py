"""VTK's older format, of which binary files of unstructured grids are read by piece:
lines say what follows them, numbers are skipped without being read."""

from __future__ import annotations

import numpy

from shardtensor.io.sources.stored_bytes import File, Numbers, Plain, Window
from shardtensor.io.sources.vtk_cells import Unsupported, VtkMesh

_DTYPES = {
    "unsigned_char": "u1",
    "char": "i1",
    "unsigned_short": "u2",
    "short": "i2",
    "unsigned_int": "u4",
    "int": "i4",
    "unsigned_long": "u8",
    "long": "i8",
    "float": "f4",
    "double": "f8",
    **{f"vtktypeint{8 * n}": f"i{n}" for n in (1, 2, 4, 8)},
    **{f"vtktypeuint{8 * n}": f"u{n}" for n in (1, 2, 4, 8)},
}
# What follows one line each: the shape of a row.
_ROWS = {"VECTORS": (3,), "NORMALS": (3,), "TENSORS": (3, 3)}


def open_mesh(file: File) -> VtkMesh:
    return _Reader(file).mesh()


class _Reader:
    def __init__(self, file: File):
        self._file, self._at, self._window = file, 0, Window(file)
        if not self._line().startswith("# vtk DataFile"):
            raise ValueError("expected '# vtk DataFile' in the first line")
        self._line()  # a title
        if self._line().upper() != "BINARY":
            raise Unsupported("numbers as text")
        self._points = self._corners = self._types = None
        self._extra = 0
        self._data: dict[str, dict[str, Numbers]] = {"POINT": {}, "CELL": {}}
        self._rows, self._active = 0, {}
        while words := self._words():
            self._section(words[0].upper(), words)

    def mesh(self) -> VtkMesh:
        for what in ("points", "corners", "types"):
            if getattr(self, f"_{what}") is None:
                raise ValueError(f"the file has no {what} of cells")
        point_data, cell_data = self._data["POINT"], self._data["CELL"]
        return VtkMesh(
            self._points, self._types, self._corners, self._extra, point_data, cell_data
        )

    # ---- lines --------------------------------------------------------------

    def _line(self) -> str:
        end = self._window.find(b"\n", self._at)
        end = self._file.size if end < 0 else end
        if end - self._at > Window.SIZE:
            raise ValueError(f"expected a line of text at byte {self._at}")
        line = self._window.at(self._at, end - self._at).decode("latin-1").strip()
        self._at = min(end + 1, self._file.size)
        return line

    def _words(self) -> list[str]:
        """Of the next line that has any, behind what VTK says of the array before;
        none at the end."""
        while self._at < self._file.size:
            words = self._line().split()
            if words == ["METADATA"]:
                while self._line():
                    pass
            elif words:
                return words
        return []

    # ---- sections -----------------------------------------------------------

    def _section(self, name, words):
        if name == "DATASET":
            if words[1].upper() != "UNSTRUCTURED_GRID":
                raise Unsupported(words[1])
        elif name == "POINTS":
            self._points = self._numbers(words[2], (int(words[1]), 3), "POINTS")
        elif name == "CELLS":
            self._cells(int(words[1]), int(words[2]))
        elif name == "CELL_TYPES":
            self._types = self._numbers("int", (int(words[1]),), name)
        elif name in ("POINT_DATA", "CELL_DATA"):
            self._rows = int(words[1])
            self._active = self._data[name.split("_")[0]]
        elif name == "FIELD":
            for _ in range(int(words[2])):
                self._field(self._words())
        else:
            self._attribute(name, words)

    def _cells(self, count, numbers):
        begin = self._at
        words = self._words()
        if words and words[0] == "OFFSETS":
            self._numbers(words[1], (count,), "OFFSETS")
            words = self._words()
            if not words or words[0] != "CONNECTIVITY":
                raise ValueError("expected CONNECTIVITY after OFFSETS")
            self._corners = self._numbers(words[1], (numbers,), "CONNECTIVITY")
        else:  # each cell begins with its number of corners
            self._at, self._extra = begin, 1
            self._corners = self._numbers("int", (numbers,), "CELLS")

    def _attribute(self, name, words):
        if name in _ROWS:
            shape = (self._rows, *_ROWS[name])
            self._active[words[1]] = self._numbers(words[2], shape, words[1])
        elif name == "SCALARS":
            width = int(words[3]) if len(words) > 3 else 1
            self._words()  # its LOOKUP_TABLE
            shape = (self._rows,) if width == 1 else (self._rows, width)
            self._active[words[1]] = self._numbers(words[2], shape, words[1])
        elif name == "TEXTURE_COORDINATES":
            shape = self._rows, int(words[2])
            self._active[words[1]] = self._numbers(words[3], shape, words[1])
        elif name == "LOOKUP_TABLE":
            self._numbers("unsigned_char", (int(words[2]), 4), words[1])
        else:
            raise Unsupported(name)

    def _field(self, words):
        name, width, rows, dtype = words
        if dtype == "string":
            self._skip_strings(int(width) * int(rows))
            return
        shape = (int(rows),) if int(width) == 1 else (int(rows), int(width))
        found = self._numbers(dtype, shape, name)
        if self._rows == int(rows):
            self._active[name] = found

    def _skip_strings(self, count):
        """The first two bits of a string's length say in how many bytes it is."""
        for _ in range(count):
            first = self._file.read(self._at, self._at + 1)[0]
            size = (8, 4, 2, 1)[first >> 6]
            number = self._file.read(self._at, self._at + size)
            length = int.from_bytes(number, "big") & ((1 << (8 * size - 2)) - 1)
            self._at += size + length

    def _numbers(self, dtype, shape, name) -> Numbers:
        """Those at this place, which is left behind them."""
        if dtype.lower() not in _DTYPES:
            raise Unsupported(f"numbers of type {dtype}")
        dtype = numpy.dtype(">" + _DTYPES[dtype.lower()])
        size = dtype.itemsize * int(numpy.prod(shape, dtype=numpy.int64))
        found = Numbers(Plain(self._file, self._at, size), dtype, shape, name)
        if self._at + size > self._file.size:
            raise OSError(
                f"the file ends at byte {self._file.size}, within {name}, which has "
                f"{size} bytes from byte {self._at}"
            )
        self._at += size
        return found
