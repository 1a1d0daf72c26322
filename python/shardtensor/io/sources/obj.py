"""Wavefront OBJ: points, triangles and quads, normals and texture coordinates of
points, groups of cells. Other faces are not read by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy

from shardtensor.io.sources.lines import (
    LineFile,
    Lines,
    LineSource,
    joined,
    without_comments,
)
from shardtensor.io.sources.source import Box, Source, choose_variable
from shardtensor.io.sources.stored_bytes import File

_POINTS = {"points": "v", "point_data/obj:vn": "vn", "point_data/obj:vt": "vt"}
_CELLS = {"triangle": "triangles", "quad": "quads"}
_FACE = b"f"


class ObjFile(LineFile):
    KINDS = ("v", "vn", "vt", "triangles", "quads", "other faces", "g")
    EXTRA = tuple(
        f"{end} {kind}" for kind in ("v", "vn", "vt") for end in ("min", "max")
    )

    def lines(self, text: bytes) -> Lines:
        return Lines(without_comments(text))

    def kinds(self, lines: Lines) -> numpy.ndarray:
        found = numpy.full(len(lines.ends), -1)
        for kind in ("v", "vn", "vt", "g"):
            found[lines.starts_with(kind.encode())] = self.KINDS.index(kind)
        face = lines.starts_with(_FACE)
        corners = lines.counts - 1
        found[face] = self.KINDS.index("other faces")
        found[face & (corners == 3)] = self.KINDS.index("triangles")
        found[face & (corners == 4)] = self.KINDS.index("quads")
        return found

    def extra(self, lines: Lines, kinds: numpy.ndarray) -> list[int]:
        """The fewest and the most numbers of a line."""
        told = []
        for kind in ("v", "vn", "vt"):
            widths = lines.counts[kinds == self.KINDS.index(kind)] - 1
            told += [int(widths.min()), int(widths.max())] if len(widths) else [0, 0]
        return told

    def width(self, kind: str) -> int | None:
        """Numbers in each line; None where they differ."""
        has_any = self.table[kind] > 0
        widths = {
            *self.table[f"min {kind}"][has_any].tolist(),
            *self.table[f"max {kind}"][has_any].tolist(),
        }
        return widths.pop() if len(widths) == 1 else None


def check_corners(told: numpy.ndarray, corners: numpy.ndarray, points: int) -> None:
    """`told`: as the file names the corners."""
    wrong = told[(corners < 0) | (corners >= points)]
    if len(wrong):
        raise ValueError(
            f"a face's corner is {wrong[0]}, expected one of 1 to {points}, or of "
            f"-1 down to the first point before the face"
        )


def check_whole(variables: Mapping[str, numpy.ndarray]) -> None:
    """Of meshio, to which a corner that counts from the last point is an index."""
    points = len(variables["points"])
    for name, corners in variables.items():
        if name.startswith("cells/") and corners.dtype != object:
            if len(relative := corners[corners < -1]):
                raise ValueError(
                    f"a face's corner is {relative[0] + 1}, expected none that counts "
                    f"from the last point beside faces that are not read by piece"
                )
            check_corners(corners + 1, corners, points)


class ObjSource(LineSource):
    def __init__(self, file: File, variable: str | None, whole: Callable):
        super().__init__(ObjFile(file))
        self._variable, self._open_whole = variable, whole
        self._fallback: Source | None = None

    def resolve(self) -> None:
        """What meshio makes of lines that differ is its business."""
        lines = self._lines
        kinds = [kind for kind in ("v", "vn", "vt") if lines.total(kind)]
        widths = {kind: lines.width(kind) for kind in kinds}
        if lines.total("other faces") or None in widths.values():
            self._fallback = self._open_whole()
            self.counted, self.whole = False, True
            return
        cells = [name for name, kind in _CELLS.items() if lines.total(kind)]
        names = [name for name, kind in _POINTS.items() if kind in kinds]
        names += [f"cells/{name}" for name in cells]
        names += [f"cell_data/obj:group_ids/{name}" for name in cells]
        self._name = choose_variable(self._variable, names)
        if self._name in _POINTS:
            self._kind = _POINTS[self._name]
            self.dtype = numpy.dtype(numpy.float64)
            self.shape = lines.total(self._kind), widths[self._kind]
            return
        self._kind = _CELLS[self._name.rsplit("/", 1)[-1]]
        self.dtype = numpy.dtype(numpy.int64)
        self.shape = (lines.total(self._kind),)
        if self._name.startswith("cells/"):
            self.shape += (3 if self._kind == "triangles" else 4,)

    def count(self, part: int, parts: int) -> object:
        return (self._fallback or super()).count(part, parts)

    def found(self, counts: Sequence) -> None:
        if self._fallback is None:
            super().found(counts)
            return
        self._fallback.found(counts)
        self.shape, self.dtype = self._fallback.shape, self._fallback.dtype
        self.counted = True

    def read(self, box: Box) -> numpy.ndarray:
        return self._fallback.read(box) if self._fallback else super().read(box)

    def rows(self, begin: int, end: int) -> numpy.ndarray:
        parts = [
            self._part(*found) for found in self._lines.blocks(self._kind, begin, end)
        ]
        return joined(parts, self.shape, self.dtype)

    def _part(self, block, lines, kinds, wanted):
        if self._name in _POINTS:
            return lines.numbers(wanted, self.dtype, 1, self.shape[1])
        if self._name.startswith("cells/"):
            told = lines.numbers(wanted, self.dtype, 1, self.shape[1], up_to=b"/")
            here = numpy.cumsum(kinds == ObjFile.KINDS.index("v"))[wanted]
            before = self._lines.before("v", block) + here[:, None]
            corners = numpy.where(told < 0, before + told, told - 1)
            check_corners(told, corners, self._lines.total("v"))
            return corners
        groups = numpy.cumsum(kinds == ObjFile.KINDS.index("g"))
        return groups[wanted] + self._lines.before("g", block) - 1
