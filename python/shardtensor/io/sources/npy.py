"""NumPy's own format, by memory mapping."""

from __future__ import annotations

import contextlib
import os

import numpy

from shardtensor.io.sources.source import Box, Source


class NpySource(Source):
    def __init__(self, path: str):
        super().__init__({})
        self._mapped = numpy.load(path, mmap_mode="r")
        self.shape, self.dtype = self._mapped.shape, self._mapped.dtype

    def read(self, box: Box) -> numpy.ndarray:
        return numpy.array(self._mapped[box])


def open_source(path: str, variable: str | None) -> Source:
    if variable is not None:
        raise ValueError("a .npy file has one array and no variables")
    return NpySource(path)


def create(path, variable, shape, dtype, chunks, dims, attributes) -> None:
    del variable, chunks, dims, attributes  # the format has none of these
    path = os.path.realpath(path)
    made = f"{path}.new"
    try:
        numpy.lib.format.open_memmap(made, "w+", dtype, shape).flush()
        # Who has mapped the file that is there keeps it.
        os.replace(made, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(made)
        raise


def write_box(path: str, variable: str | None, box: Box, values) -> None:
    mapped = numpy.lib.format.open_memmap(path, "r+")
    mapped[box] = values
    mapped.flush()


one_writer_at_a_time = False
