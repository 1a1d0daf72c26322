"""What all formats have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

Box = tuple[slice, ...]  # one slice per dim, steps positive, within the shape


class Source:
    """A variable of a file, as stored."""

    shape: tuple[int, ...]
    dtype: numpy.dtype
    chunks: tuple[int, ...] | None = None
    dims: tuple[str, ...] | None = None
    # Whether any box costs reading the whole file.
    whole = False

    def __init__(self, attributes: Mapping):
        self.attributes = {key: _plain(value) for key, value in attributes.items()}

    def read(self, box: Box) -> numpy.ndarray:
        raise NotImplementedError

    def close(self) -> None:
        """Before the file is written to."""

    def beside(self, name: str) -> Source | None:
        """Another variable of this file, which coordinates are; None if there is
        no such one."""
        return None

    def chunk_begins(self, dim: int) -> Sequence[int]:
        """Where chunks begin along `dim`, ascending."""
        extent = self.shape[dim]
        return range(0, extent, self.chunks[dim] if self.chunks else max(extent, 1))


def _plain(value):
    """An attribute as a Python number, string or list."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if getattr(value, "dtype", None) is None:
        return value
    value = value.tolist()
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
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
