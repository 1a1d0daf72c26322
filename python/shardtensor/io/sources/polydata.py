"""VTK's surfaces (PolyData), which pyvista reads as a whole. Of their cells those of
fixed size: vertices, lines of two points, triangles, quads."""

from __future__ import annotations

import re

import numpy

from shardtensor.io.sources.vtk_cells import KINDS

_DATASET = re.compile(rb"^\s*DATASET\s+POLYDATA\b", re.IGNORECASE | re.MULTILINE)
_HEAD = 1024  # bytes of a file that hold its first lines


def is_polydata(path: str) -> bool:
    if path.lower().endswith(".vtp"):
        return True
    if not path.lower().endswith(".vtk"):
        return False
    with open(path, "rb") as file:
        return _DATASET.search(file.read(_HEAD)) is not None


def variables(path: str) -> dict[str, numpy.ndarray]:
    pyvista = _pyvista()
    mesh = pyvista.read(path)
    if not isinstance(mesh, pyvista.PolyData):
        raise ValueError(f"expected PolyData, got {type(mesh).__name__}")
    grid = mesh.cast_to_unstructured_grid()
    begins = pyvista.convert_array(grid.GetCells().GetOffsetsArray())
    found = {"points": numpy.asarray(grid.points)}
    for name, values in grid.point_data.items():
        found[f"point_data/{name}"] = numpy.asarray(values)
    for kind, (kind_name, corners) in KINDS.items():
        rows = numpy.flatnonzero(grid.celltypes == kind)
        if not len(rows):
            continue
        places = begins[rows][:, None] + numpy.arange(corners)
        found[f"cells/{kind_name}"] = grid.cell_connectivity[places]
        for name, values in grid.cell_data.items():
            found[f"cell_data/{name}/{kind_name}"] = numpy.asarray(values)[rows]
    return found


def _pyvista():
    try:
        import pyvista
    except ImportError as error:
        raise ImportError(
            "pyvista is not installed, and surfaces of VTK's (PolyData) need it: "
            "pip install 'shardtensor[polydata]'"
        ) from error
    return pyvista
