"""Unstructured meshes. Variables: points, cells/<kind>, point_data/<name>,
cell_data/<name>/<kind>; of STL also corners, (facets, 3, 3), and the normals as
cell_data/facet_normals/triangle. What is not read by piece meshio (VTK's PolyData:
pyvista) reads as a whole: one rank does, and sends each rank its rows. Values are
meshio's either way."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy

from shardtensor.io.sources import obj, polydata, stl, vtk_legacy, vtu
from shardtensor.io.sources.source import Box, Source, choose_variable
from shardtensor.io.sources.stored_bytes import File
from shardtensor.io.sources.vtk_cells import Unsupported, VtkMesh


class MeshSource(Source):
    """A variable that the first rank reads, with the whole file."""

    whole, counted = True, False

    def __init__(self, path: str, variable: str | None):
        super().__init__({})
        self._path, self._variable = path, variable

    @functools.cached_property
    def _values(self) -> numpy.ndarray:
        if polydata.is_polydata(self._path):
            variables = polydata.variables(self._path)
        else:
            variables = _variables(_read(self._path))
        if _ending(self._path) == "obj":
            obj.check_whole(variables)
        return variables[choose_variable(self._variable, list(variables))]

    def count(self, part: int, parts: int) -> tuple | None:
        return (self._values.shape, self._values.dtype) if part == 0 else None

    def found(self, counts: Sequence) -> None:
        self.shape, self.dtype = counts[0]
        self.counted = True

    def read(self, box: Box) -> numpy.ndarray:
        return numpy.array(self._values[box])


def open_source(path: str, variable: str | None) -> Source:
    whole = functools.partial(MeshSource, path, variable)
    ending = _ending(path)
    file = File(path)
    if ending == "obj":
        return obj.ObjSource(file, variable, whole)
    if ending == "stl":
        if variable in (stl.CORNERS, stl.NORMALS):
            return stl.open_facets(file, variable)
        return whole()
    if ending == "vtp":
        return whole()
    try:
        mesh = (vtu if ending == "vtu" else vtk_legacy).open_mesh(file)
        return _chosen(mesh, variable)
    except Unsupported:
        return whole()


def _ending(path):
    return path.lower().rsplit(".", 1)[-1]


def _chosen(mesh: VtkMesh, variable):
    source = mesh.source(variable) if variable else None
    return source or mesh.source(choose_variable(variable, mesh.names()))


def _read(path):
    try:
        import meshio
    except ImportError as error:
        raise ImportError(
            "meshio is not installed, and this mesh needs it: "
            "pip install 'shardtensor[io]'"
        ) from error
    try:
        return meshio.read(path)
    except SystemExit as error:  # so it ends where no reader succeeds
        raise ValueError("meshio cannot read it") from error


def _variables(mesh):
    """Blocks of one kind of cells follow each other, as OBJ's groups do."""
    found = {"points": [mesh.points]}
    for block in mesh.cells:
        found.setdefault(f"cells/{block.type}", []).append(block.data)
    for name, values in mesh.point_data.items():
        found[f"point_data/{name}"] = [values]
    for name, blocks in mesh.cell_data.items():
        for block, values in zip(mesh.cells, blocks, strict=True):
            found.setdefault(f"cell_data/{name}/{block.type}", []).append(values)
    return {name: numpy.concatenate(parts) for name, parts in found.items()}
