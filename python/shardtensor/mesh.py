"""Meshes of points and cells, cut over ranks, differentiable.

Points (N, D), D up to 3, and cells (C, corners) of one kind, rows of the points in
the order of VTK and meshio: "line", "triangle", "quad", "tetra" or "hexahedron". A
mesh of several kinds has a call for each, or gives a dict from kind to cells. Plain
tensors or ShardTensors in any layout. See docs/mesh.md.

Points are of floating point and values of their dtype, cells of int64. On all ranks
alike, another dtype is a TypeError (of cells in a dict, and of corners, a ValueError),
a wrong size, kind or method a ValueError, a row that no point has an IndexError. Where
a coordinate is NaN, so is what is made of it, and nothing else: check_cells finds it.

Communication, where nothing else is said: the corners that other ranks have, each once,
and terms of results at points; planned once for `cells`.
"""

from collections.abc import Mapping

import torch

from shardtensor import _ops


def check_cells(points: torch.Tensor, cells: torch.Tensor, kind: str) -> None:
    """Raises ValueError on all ranks, with the first such cell, where a cell names a
    point twice, or is flat or turned inside out because its corners stand in a wrong
    order or a coordinate is NaN. Of surfaces in space, all corners must turn alike.
    The other functions take cells as they are. Communication: the corners that other
    ranks have, and two reductions of a number."""
    _ops.check_cells(points, cells, kind)


def cell_measures(points: torch.Tensor, cells: torch.Tensor, kind: str) -> torch.Tensor:
    """Lengths, areas or volumes (C); negative where a cell that fills its space is
    turned inside out."""
    return _ops.cell_measures(points, cells, kind)


def cell_centers(points: torch.Tensor, cells: torch.Tensor, kind: str) -> torch.Tensor:
    """The means of the cells' corners (C, D)."""
    return _ops.cell_centers(points, cells, kind)


def cell_normals(
    points: torch.Tensor, cells: torch.Tensor, kind: str, weighted: bool = False
) -> torch.Tensor:
    """Of triangles and quads in space, the normals (C, 3), and of lines in the plane,
    (C, 2): of length 1 or, weighted, of the cell's area or length. Those of
    `cell_faces` point out of the first cell."""
    return _ops.cell_normals(points, cells, kind, weighted)


def cell_gradients(
    points: torch.Tensor,
    cells: torch.Tensor,
    kind: str,
    values: torch.Tensor,
    method: str = "green_gauss",
) -> torch.Tensor:
    """Gradients of the points' values (N) or (N, channels), one for each cell: (C, D)
    or (C, channels, D). "green_gauss": their mean over the cell; "least_squares": of
    the linear function that fits the corners' values. The same on simplices."""
    return _ops.cell_gradients(points, cells, kind, values, method)


def cell_centered_gradients(
    points: torch.Tensor,
    cells: Mapping[str, torch.Tensor],
    faces: tuple[torch.Tensor, torch.Tensor],
    values: torch.Tensor,
    method: str = "least_squares",
    boundary_values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradients of values that belong to cells, (C) or (C, channels), cells numbered
    kind after kind: (C, D) or (C, channels, D), from the cells across `faces`, which
    is what `cell_faces` gives. Cells fill their space, of two or three dims.
    "least_squares" fits the differences between centers, weighted by their distance
    to the power -2: exact for linear values, zero along directions that neighbours
    leave open. "green_gauss": exact for them where lines between centers meet the
    faces' centers. `boundary_values` (F) or (F, channels) are those at the centers of
    faces with one cell, others are not read; without, least squares leaves these faces
    out and Green-Gauss takes the cell's value. Communication: corners, cells and terms
    of faces that other ranks have, planned once for `faces`."""
    return _ops.cell_centered_gradients(
        points,
        list(cells.values()),
        list(cells),
        *faces,
        values,
        method,
        boundary_values,
    )


def apply_mass(
    points: torch.Tensor,
    cells: torch.Tensor,
    kind: str,
    values: torch.Tensor,
    coefficients: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mass matrix of linear elements times values (N) or (N, channels), without
    the matrix; cells count with their `coefficients` (C)."""
    return _ops.apply_mass(points, cells, kind, values, coefficients)


def apply_stiffness(
    points: torch.Tensor,
    cells: torch.Tensor,
    kind: str,
    values: torch.Tensor,
    coefficients: torch.Tensor | None = None,
) -> torch.Tensor:
    """The stiffness matrix of linear elements, alike: minus the Laplacian."""
    return _ops.apply_stiffness(points, cells, kind, values, coefficients)


def cell_edges(cells: Mapping[str, torch.Tensor], points: int) -> torch.Tensor:
    """The edges of all cells, each once and in ascending order: (2, E), cut along E
    by all axes if the cells are cut. No rank holds all. `points` is their number. Not
    differentiable. Communication: each edge to the rank that its corners name."""
    return _ops.cell_edges(list(cells.values()), list(cells), points)


def cell_faces(
    cells: Mapping[str, torch.Tensor], points: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What bounds the cells, each once: the corners (F, corners), -1 behind those of
    faces with fewer, seen from outside the first cell, and the cells on either side
    (F, 2), -1 where there is no second. Cells are numbered kind after kind. Cut,
    differentiable and communicated as edges are."""
    return _ops.cell_faces(list(cells.values()), list(cells), points)


def merge_corners(corners: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mesh from cells that each have corners of their own, (C, corners, D), as STL
    files say: (points, cells). Equal corners become one point, NaN being equal to NaN;
    points stand in the order in which they come first. Cut corners give both cut by all
    axes, and no rank holds all. float32 or float64, not differentiable.
    Communication: each different corner to the rank that numbers it, and back; each
    point once to where it ends up."""
    return _ops.merge_corners(corners)
