"""Where variables end in NetCDF's classic formats (CDF-1, 2 and 5): the library reads
zeros behind the end of a file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

# Bytes of a number, by the format's codes of types.
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}


class _Variable(NamedTuple):
    extents: list[int]  # 0: as many as there are records
    type: int
    begin: int

    @property
    def is_record(self) -> bool:
        return 0 in self.extents[:1]

    @property
    def size(self) -> int:
        """Of all, or of one record."""
        return math.prod(self.extents[self.is_record :]) * _BYTES[self.type]


class Lengths:
    """Of a file and of what its header tells, in the order of its variables."""

    def __init__(self, path: str, names: Sequence[str]):
        self._size = os.path.getsize(path)
        with open(path, "rb") as file:
            header = _Header(file)
            records, variables = header.count(), header.variables()
        stride = _record_size(variables)
        ends = [_end(variable, records, stride) for variable in variables]
        self._ends = dict(zip(names, ends, strict=True))

    def check(self, name: str) -> None:
        end = self._ends[name]
        if end > self._size:
            raise OSError(
                f"the file ends at byte {self._size}, within {name}, which by its "
                f"header ends at byte {end}"
            )


def _record_size(variables):
    sizes = [variable.size for variable in variables if variable.is_record]
    return sizes[0] if len(sizes) == 1 else sum(-(-size // 4) * 4 for size in sizes)


def _end(variable, records, stride):
    if not variable.is_record:
        return variable.begin + variable.size
    return variable.begin + (records - 1) * stride + variable.size if records else 0


class _Header:
    def __init__(self, file: BinaryIO):
        self._file = file
        version = self._bytes(4)[3]
        self._count_bytes = 8 if version == 5 else 4
        self._begin_bytes = 4 if version == 1 else 8

    def count(self) -> int:
        return self._number(self._count_bytes)

    def variables(self) -> list[_Variable]:
        """Behind the number of records."""
        dims = [self._dim() for _ in range(self._list())]
        self._attributes()
        return [self._variable(dims) for _ in range(self._list())]

    def _list(self) -> int:
        self._number(4)  # what kind
        return self.count()

    def _dim(self):
        self._padded(self.count())  # its name
        return self.count()

    def _variable(self, dims):
        self._padded(self.count())
        extents = [dims[self.count()] for _ in range(self.count())]
        self._attributes()
        type = self._number(4)
        self.count()  # its size, which may be larger than this number can be
        return _Variable(extents, type, self._number(self._begin_bytes))

    def _attributes(self):
        for _ in range(self._list()):
            self._padded(self.count())
            size = _BYTES[self._number(4)]
            self._padded(self.count() * size)

    def _number(self, size) -> int:
        return int.from_bytes(self._bytes(size), "big")

    def _padded(self, size) -> None:
        self._file.seek(-(-size // 4) * 4, os.SEEK_CUR)

    def _bytes(self, size) -> bytes:
        found = self._file.read(size)
        if len(found) < size:
            raise OSError(f"the file ends at byte {self._file.tell()}, in its header")
        return found
