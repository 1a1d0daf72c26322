"""Unstructured meshes by meshio, which reads a file as a whole: one rank does, and
sends each rank its rows. Variables: points, cells/<kind>, point_data/<name>,
cell_data/<name>/<kind>."""

from __future__ import annotations

import meshio
import numpy

from shardtensor.io.sources.source import Box, Source, choose_variable


class MeshSource(Source):
    whole = True

    def __init__(self, values: numpy.ndarray):
        super().__init__({})
        self._values = values
        self.shape, self.dtype = values.shape, values.dtype

    def read(self, box: Box) -> numpy.ndarray:
        return numpy.array(self._values[box])


def open_source(path: str, variable: str | None) -> Source:
    variables = _variables(meshio.read(path))
    return MeshSource(variables[choose_variable(variable, list(variables))])


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
