"""VTU: tags say where arrays begin, and what stands between is skipped. Arrays in
binary are read by piece, beside their tags or appended, in base64 or not, compressed
or not; text is not."""

from __future__ import annotations

import base64
import lzma
import re
import zlib

import numpy

from shardtensor.io.sources.stored_bytes import (
    Base64,
    Compressed,
    File,
    Numbers,
    Plain,
    Window,
)
from shardtensor.io.sources.vtk_cells import Unsupported, VtkMesh

_DTYPES = {
    f"{kind}{bits}": numpy.dtype(f"{kind.lower()}{bits}")
    for kind, sizes in (
        ("Float", (32, 64)),
        ("Int", (8, 16, 32, 64)),
        ("UInt", (8, 16, 32, 64)),
    )
    for bits in sizes
}
_ATTRIBUTE = re.compile(rb"""([\w:.-]+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_SPACE = b" \t\r\n"


def open_mesh(file: File) -> VtkMesh:
    layout = _Layout(file)
    arrays = layout.arrays
    if layout.pieces != 1:
        raise Unsupported(f"{layout.pieces} pieces")
    points, cells = layout.count("NumberOfPoints"), layout.count("NumberOfCells")
    found = {
        (section, name): _numbers(layout, told, rows)
        for section, rows in (("PointData", points), ("CellData", cells))
        for (at, name), told in arrays.items()
        if at == section and told["type"] in _DTYPES
    }
    at_points = next((key for key in arrays if key[0] == "Points"), None)
    for key in (at_points, ("Cells", "connectivity"), ("Cells", "types")):
        if key not in arrays:
            raise ValueError(f"there is no array of {key or 'Points'}")
    return VtkMesh(
        _numbers(layout, arrays[at_points], points),
        _numbers(layout, arrays["Cells", "types"], cells),
        _numbers(layout, arrays["Cells", "connectivity"], None),
        0,
        {name: x for (at, name), x in found.items() if at == "PointData"},
        {name: x for (at, name), x in found.items() if at == "CellData"},
    )


def _numbers(layout, told, rows):
    dtype = _DTYPES[told["type"]].newbyteorder(layout.order)
    stored = layout.stored(told)
    if rows is None:
        rows = stored.size // dtype.itemsize
    width = told.get("NumberOfComponents")
    shape = (rows, int(width)) if width else (rows,)
    return Numbers(stored, dtype, shape, f"the array {told.get('Name')!r}")


class _Layout:
    """Where arrays are."""

    def __init__(self, file: File):
        self._file, self._at, self._window = file, 0, Window(file)
        self.arrays: dict[tuple[str, str], dict] = {}
        self.pieces, self._piece = 0, {}
        self._root, self._appended = {}, None
        self._path: list[str] = []
        self._told: dict = {}
        while self._step():
            pass
        if self._root.get("type") != "UnstructuredGrid":
            raise ValueError(
                f"expected a VTKFile of type UnstructuredGrid, found {self._root}"
            )

    def count(self, what: str) -> int:
        return int(self._piece[what])

    @property
    def order(self) -> str:
        return ">" if self._root.get("byte_order") == "BigEndian" else "<"

    @property
    def _header(self) -> numpy.dtype:
        return _DTYPES[self._root.get("header_type", "UInt32")].newbyteorder(self.order)

    # ---- tags ---------------------------------------------------------------

    def _step(self) -> bool:
        """One tag, or what stands between two."""
        self._skip_space()
        begin = self._window.at(self._at, 4)
        if not begin:
            if self._path:
                raise OSError(f"the file ends within <{self._path[-1]}>")
            return False
        if not begin.startswith(b"<"):
            return self._text()
        if begin.startswith(b"<!--"):
            self._at = self._find(b"-->") + 3
            return True
        end = self._find(b">")
        tag = self._window.at(self._at + 1, end - self._at - 1)
        self._at = end + 1
        return self._tag(tag)

    def _tag(self, tag) -> bool:
        if tag[:1] in (b"?", b"!"):
            return True
        if tag[:1] == b"/":
            name = tag[1:].strip().decode()
            if not self._path or self._path.pop() != name:
                raise ValueError(f"unexpected </{name}>")
            return True
        name = re.split(rb"[\s/]", tag, maxsplit=1)[0].decode()
        told = {
            key.decode(): (value or other).decode()
            for key, value, other in _ATTRIBUTE.findall(tag)
        }
        self._enter(name, told)
        if not tag.endswith(b"/"):
            self._path.append(name)
        return name != "AppendedData"

    def _enter(self, name, told):
        if name == "VTKFile":
            self._root = told
        elif name == "Piece":
            self.pieces += 1
            self._piece = told
        elif name == "DataArray":
            self._told = told
            if self.pieces:
                section = self._path[-1]
                self.arrays[section, told.get("Name", "")] = told
        elif name == "AppendedData":
            self._skip_space()
            if self._window.at(self._at, 1) != b"_":
                raise ValueError("appended data begin with an underscore")
            self._appended = told.get("encoding", "base64"), self._at + 1

    def _text(self) -> bool:
        """Of an array, perhaps, which is then skipped without being read."""
        in_array = self._path[-1:] == ["DataArray"]
        if in_array and self._told.get("format") == "binary":
            self._told["begin"] = self._at
            self._at += self._length(self._told)
        else:
            if in_array and self.pieces:
                raise Unsupported("arrays as text")
            self._at = self._find(b"<")
        return True

    def _skip_space(self):
        while (one := self._window.at(self._at, 1)) and one in _SPACE:
            self._at += 1

    def _find(self, mark):
        place = self._window.find(mark, self._at)
        if place < 0:
            raise OSError(f"the file ends before {mark.decode()!r}")
        return place

    # ---- arrays -------------------------------------------------------------

    def stored(self, told) -> Plain | Base64 | Compressed:
        if told.get("format") == "binary" and "begin" not in told:
            return Plain(self._file, 0, 0)  # nothing stands between the tags
        encoding, begin = self._place(told)
        if "compressor" in self._root:
            return self._compressed(encoding, begin)
        size, skipped = self._size(encoding, begin)
        if encoding == "raw":
            return Plain(self._file, begin + skipped, size)
        # Either one text of both, or one of the size and one of the numbers.
        head = self._header.itemsize
        if skipped:
            return Base64(self._file, begin + skipped, size)
        return _After(Base64(self._file, begin, head + size), head)

    def _place(self, told):
        if told.get("format") == "appended":
            if self._appended is None:
                raise OSError("the file ends before its appended data")
            encoding, begin = self._appended
            return encoding, begin + int(told["offset"])
        if told.get("format", "ascii") == "ascii":
            raise Unsupported("arrays as text")
        return "base64", told["begin"]

    def _size(self, encoding, begin):
        """Of the numbers in bytes, and what to skip before them."""
        head = self._header.itemsize
        if encoding == "raw":
            text = self._file.read(begin, begin + head)
            return self._header_numbers(text)[0], head
        chars = -(-head // 3) * 4
        found = base64.b64decode(self._file.read(begin, begin + chars), validate=True)
        apart = len(found) == head
        return self._header_numbers(found[:head])[0], chars if apart else 0

    def _header_numbers(self, text):
        return [int(n) for n in numpy.frombuffer(text, self._header)]

    def _block_sizes(self, encoding, begin):
        """(block, last, sizes of the compressed blocks), and where these begin."""
        head = self._header.itemsize

        def numbers(count):
            if encoding == "raw":
                return self._header_numbers(
                    self._file.read(begin, begin + head * count)
                )
            stored = Base64(self._file, begin, head * count)
            return self._header_numbers(stored.read(0, head * count))

        (blocks,) = numbers(1)
        if begin + blocks > self._file.size:
            raise ValueError(f"{blocks} blocks in a file of {self._file.size} bytes")
        _, block, last, *sizes = numbers(3 + blocks)
        if blocks and not block:
            raise ValueError("blocks of no bytes")
        length = head * (3 + blocks)
        if encoding != "raw":
            length = -(-length // 3) * 4
        return block, last or block, sizes, begin + length

    def _compressed(self, encoding, begin):
        block, last, sizes, begin = self._block_sizes(encoding, begin)
        kind = Plain if encoding == "raw" else Base64
        stored = kind(self._file, begin, sum(sizes))
        return Compressed(stored, sizes, block, last, self._decompressor())

    def _decompressor(self):
        name = self._root["compressor"]
        if name == "vtkZLibDataCompressor":
            return lambda stored, size: zlib.decompress(stored)
        if name == "vtkLZMADataCompressor":
            return lambda stored, size: lzma.decompress(stored)
        if name == "vtkLZ4DataCompressor":
            try:
                from lz4 import block
            except ImportError:
                raise ImportError(f"{name} needs lz4: pip install lz4") from None
            return lambda stored, size: block.decompress(stored, uncompressed_size=size)
        raise ValueError(f"unknown compressor {name!r}")

    def _length(self, told):
        """Characters of an array that stands in base64 beside its tag."""
        begin = told["begin"]
        if "compressor" in self._root:
            _, _, sizes, data = self._block_sizes("base64", begin)
            return data - begin + -(-sum(sizes) // 3) * 4
        size, skipped = self._size("base64", begin)
        if skipped:
            return skipped + -(-size // 3) * 4
        return -(-(size + self._header.itemsize) // 3) * 4


class _After:
    """Bytes without the first ones."""

    def __init__(self, stored: Base64, skipped: int):
        self._stored, self._skipped = stored, skipped
        self.size = stored.size - skipped

    def read(self, begin: int, end: int) -> bytes:
        return self._stored.read(begin + self._skipped, end + self._skipped)
