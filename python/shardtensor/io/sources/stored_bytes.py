"""Numbers within a file, of which some rows are read: as they are, in base64, or
compressed in blocks. Thread safety: reads move no position of the file."""

from __future__ import annotations

import base64
import itertools
import os
from collections.abc import Callable, Sequence

import numpy


class File:
    _descriptor = -1  # until it is open, for what cannot be opened is closed, too

    def __init__(self, path: str):
        self._descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, begin: int, end: int) -> bytes:
        parts = []
        while begin < end:
            part = os.pread(self._descriptor, end - begin, begin)
            if not part:
                raise OSError(
                    f"the file ends at byte {begin}, expected {end - begin} more"
                )
            parts.append(part)
            begin += len(part)
        return b"".join(parts)

    def read_up_to(self, begin: int, end: int) -> bytes:
        return self.read(min(begin, self.size), min(end, self.size))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close


class Window:
    """Text of a file that is looked at in small steps, and read in larger ones."""

    SIZE = 4096

    def __init__(self, file: File):
        self._file, self._begin, self._bytes = file, 0, b""

    def at(self, begin: int, count: int) -> bytes:
        """Fewer bytes than that at the end of the file."""
        inside = begin - self._begin
        if not 0 <= inside <= len(self._bytes) - count:
            end = begin + max(count, self.SIZE)
            self._begin, self._bytes = begin, self._file.read_up_to(begin, end)
            inside = 0
        return self._bytes[inside : inside + count]

    def find(self, mark: bytes, begin: int) -> int:
        """The first place of the mark; -1 if there is none."""
        while len(text := self.at(begin, len(mark))) == len(mark):
            inside = begin - self._begin
            if (place := self._bytes.find(mark, inside)) >= 0:
                return self._begin + place
            begin = self._begin + len(self._bytes) - len(text) + 1
        return -1


# ---- bytes, however they are stored: size, read(begin, end) ------------------


class Plain:
    def __init__(self, file: File, begin: int, size: int):
        self._file, self._begin, self.size = file, begin, size

    def read(self, begin: int, end: int) -> bytes:
        return self._file.read(self._begin + begin, self._begin + end)


class Base64:
    """Four characters for three bytes, `begin` is the first one's place."""

    def __init__(self, file: File, begin: int, size: int):
        self._file, self._begin, self.size = file, begin, size

    def read(self, begin: int, end: int) -> bytes:
        first, last = begin // 3, -(-end // 3)
        text = self._file.read(self._begin + 4 * first, self._begin + 4 * last)
        found = base64.b64decode(text, validate=True)[begin - 3 * first :]
        if len(found) < end - begin:
            raise ValueError("base64 ends too early")
        return found[: end - begin]


class Compressed:
    """Blocks of `block` bytes, the last of `last`, stored one behind the other."""

    def __init__(
        self,
        stored: Plain | Base64,
        sizes: Sequence[int],
        block: int,
        last: int,
        decompress: Callable[[bytes, int], bytes],
    ):
        self._stored, self._decompress = stored, decompress
        self._begins = list(itertools.accumulate(sizes, initial=0))
        self._block, self._last = block, last
        self.size = (len(sizes) - 1) * block + last if len(sizes) else 0

    def read(self, begin: int, end: int) -> bytes:
        if begin >= end:
            return b""
        first, last = begin // self._block, -(-end // self._block)
        stored = self._stored.read(self._begins[first], self._begins[last])
        parts = [self._decoded(stored, first, i) for i in range(first, last)]
        skipped = begin - first * self._block
        return b"".join(parts)[skipped : skipped + end - begin]

    def _decoded(self, stored, first, index):
        begin, end = (self._begins[i] - self._begins[first] for i in (index, index + 1))
        size = self._last if index == len(self._begins) - 2 else self._block
        try:
            part = self._decompress(stored[begin:end], size)
        except Exception as error:
            raise ValueError(f"block {index} is damaged: {error}") from error
        if len(part) != size:
            raise ValueError(
                f"block {index} is damaged: it has {len(part)} bytes, expected {size}"
            )
        return part


# ---- numbers ----------------------------------------------------------------


class Numbers:
    """Rows of one shape."""

    def __init__(
        self,
        stored: Plain | Base64 | Compressed,
        dtype: numpy.dtype,
        shape: tuple[int, ...],
        name: str,
    ):
        self._stored, self.dtype, self.shape = stored, dtype, shape
        self._row = dtype.itemsize * int(numpy.prod(shape[1:], dtype=numpy.int64))
        if stored.size != shape[0] * self._row:
            raise ValueError(
                f"{name} has {stored.size} bytes, expected {shape[0] * self._row} for "
                f"{shape} of {dtype}"
            )

    def rows(self, begin: int, end: int) -> numpy.ndarray:
        read = self._stored.read(begin * self._row, end * self._row)
        return numpy.frombuffer(read, self.dtype).reshape(end - begin, *self.shape[1:])
