"""What all formats have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy

from shardtensor.io import cf

# Where a variable would be made in the place of one.
GROUP_THERE = "a group stands there, of which nothing would be left"

Box = tuple[slice, ...]  # one slice per dim, steps positive, within the shape


class Source:
    """A variable of a file, as stored."""

    shape: tuple[int, ...]
    dtype: numpy.dtype
    chunks: tuple[int, ...] | None = None
    dims: tuple[str | None, ...] | None = None
    # Whether any box costs reading the whole file.
    whole = False
    # Whether shape and dtype are known. Where they are not, every rank counts its
    # part, in as many rounds as it takes, and learns what all have found.
    counted = True

    def __init__(self, attributes: Mapping):
        self.attributes = {key: _plain(value) for key, value in attributes.items()}

    def count(self, part: int, parts: int) -> object:
        return None

    def found(self, counts: Sequence) -> None:
        """What `count` has returned for each part."""

    def read(self, box: Box) -> numpy.ndarray:
        raise NotImplementedError

    @functools.cached_property
    def decoding(self) -> cf.Decoding:
        return cf.decoding(self.dtype, self.attributes)

    @property
    def value_dtype(self) -> numpy.dtype:
        return self.decoding.dtype

    def begin(self, box: Box) -> Callable[[], numpy.ndarray]:
        """Asks for a box; the call waits for it. Formats whose library reads in the
        background do so from here on, others at the call."""
        return functools.partial(self.read, box)

    def begin_values(self, box: Box, wide: bool = False) -> Callable[[], numpy.ndarray]:
        """What the numbers that are stored stand for; `wide`: unpacked in float64
        at least."""
        stored = self.begin(box)
        decoding = self.decoding.wide() if wide else self.decoding
        return lambda: decoding(stored())

    def close(self) -> None:
        """Before the file is written to."""

    def beside(self, name: str) -> Source | None:
        """Another variable of this file, which coordinates are; None if there is
        no such one."""
        return None

    def chunk_begins(self, dim: int) -> Sequence[int]:
        """Where chunks begin along `dim`, ascending; any row where there are none."""
        return range(0, self.shape[dim], self.chunks[dim] if self.chunks else 1)


class Format(Protocol):
    """What a module of a format has."""

    def open_source(self, path: str, variable: str | None) -> Source: ...


class WritableFormat(Format, Protocol):
    # Whether one process may have the file open to write, no other meanwhile.
    one_writer_at_a_time: bool

    def create(
        self,
        path: str,
        variable: str | None,
        shape: tuple[int, ...],
        dtype: numpy.dtype,
        chunks: tuple[int, ...] | None,
        dims: Sequence[str] | None,
        attributes: dict,
        **options: object,
    ) -> None: ...

    def write_box(
        self, path: str, variable: str | None, box: Box, values: numpy.ndarray
    ) -> None: ...


def rows_of_box(rows: Callable[[int, int], numpy.ndarray], box: Box):
    """The box, from what reads whole rows [begin, end)."""
    first, *others = box
    values = rows(first.start, first.stop)
    return values[(slice(None, None, first.step), *others)].copy()


def _plain(value):
    """An attribute as a Python number, string or list."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if getattr(value, "dtype", None) is None:
        return value
    value = value.tolist()
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else [_plain(each) for each in value]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def choose_variable(variable: str | None, names: Sequence[str]) -> str:
    """The variable asked for, or the only one."""
    if variable is None:
        if len(names) == 1:
            return names[0]
        raise ValueError(
            f"several variables, name one of {', '.join(names) or '(none)'}"
        )
    if variable.strip("/") not in names:
        known = ", ".join(names) or "none"
        raise ValueError(f"there is no such variable; the file has {known}")
    return variable.strip("/")
