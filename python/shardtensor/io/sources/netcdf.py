"""NetCDF 3 and 4 by netCDF4. Variables are named by their path: group/variable."""

from __future__ import annotations

import os
import threading

import netCDF4
import numpy

from shardtensor.io.sources.netcdf_classic import Lengths
from shardtensor.io.sources.source import Box, Source, choose_variable

# The library under netCDF4 takes one thread at a time.
_LOCK = threading.RLock()


class NetcdfSource(Source):
    """Closes its file with itself: netCDF4's groups refer to each other, and nobody
    can write the file before the collector of cycles comes by."""

    def __init__(
        self,
        file: netCDF4.Dataset,
        name: str,
        lengths: Lengths | None,
        owns: bool = False,
    ):
        self._file, self._owns, self._lengths = file, owns, lengths
        if lengths:
            lengths.check(name)
        variable = _variables(file)[name]
        super().__init__({key: variable.getncattr(key) for key in variable.ncattrs()})
        variable.set_auto_maskandscale(False)
        variable.set_auto_chartostring(False)
        self._name, self._variable = name, variable
        is_ragged = isinstance(variable.datatype, netCDF4.VLType)
        self.dtype = numpy.dtype(object if is_ragged else variable.dtype)
        self.shape = tuple(variable.shape)
        self.dims = tuple(variable.dimensions)
        chunking = variable.chunking()
        self.chunks = tuple(chunking) if isinstance(chunking, list) else None

    def read(self, box: Box) -> numpy.ndarray:
        with _LOCK:
            return numpy.asarray(self._variable[box])

    def close(self) -> None:
        with _LOCK:
            if self._owns and self._file.isopen():
                self._file.close()

    __del__ = close

    def beside(self, name: str) -> Source | None:
        """In the same group or one around it."""
        known = _variables(self._file)
        groups = self._name.split("/")[:-1]
        for depth in range(len(groups), -1, -1):
            path = "/".join([*groups[:depth], name])
            if path in known:
                return NetcdfSource(self._file, path, self._lengths)
        return None


def _variables(group, prefix=""):
    found = {prefix + name: each for name, each in group.variables.items()}
    for name, inner in group.groups.items():
        found.update(_variables(inner, f"{prefix}{name}/"))
    return found


def _data(variables):
    """Without coordinates and the bounds of their cells."""
    told = set()
    for each in variables.values():
        told.update(each.dimensions)
        for key in ("bounds", "coordinates", "grid_mapping", "cell_measures"):
            told.update(str(getattr(each, key, "")).split())
    return [
        name
        for name, each in variables.items()
        if name.rsplit("/", 1)[-1] not in told and each.ndim > 0
    ]


def open_source(path: str, variable: str | None) -> Source:
    with _LOCK:
        file = netCDF4.Dataset(path)
        lengths = _lengths(file, path)
        variables = _variables(file)
        names = list(variables) if variable else _data(variables)
        name = choose_variable(variable, names)
        return NetcdfSource(file, name, lengths, owns=True)


def _lengths(file, path):
    """HDF5 looks at its own, and there may be no file at a path (an address)."""
    is_classic = file.data_model.startswith("NETCDF3") and os.path.isfile(path)
    return Lengths(path, list(file.variables)) if is_classic else None


def create(path, variable, shape, dtype, chunks, dims, attributes) -> None:
    dims = dims or [f"{variable.replace('/', '_')}_{i}" for i in range(len(shape))]
    with _LOCK, netCDF4.Dataset(path, "a") as file:
        group, _, name = variable.rpartition("/")
        there = _variables(file).get(variable.strip("/"))
        if there is not None:
            if tuple(there.shape) != tuple(shape):
                raise ValueError(
                    f"it has shape {there.shape} already, which a NetCDF file cannot "
                    f"change; expected {tuple(shape)}"
                )
            return
        missing = _missing_dims(file, group, dims, shape)
        where = file.createGroup(group) if group else file
        for dim, extent in missing.items():
            where.createDimension(dim, extent)
        made = where.createVariable(
            name, dtype, dims, chunksizes=chunks,
            fill_value=attributes.get("_FillValue"),
        )  # fmt: skip
        told = {k: v for k, v in attributes.items() if k != "_FillValue"}
        made.setncatts(told)


def _missing_dims(file, group, dims, shape):
    """Those that neither the group nor one around it has."""
    if len(dims) != len(shape):
        raise ValueError(f"expected a name for each of {len(shape)} dims, got {dims}")
    known = {dim: len(each) for dim, each in file.dimensions.items()}
    where = file
    for name in filter(None, group.split("/")):
        where = where.groups.get(name) if where is not None else None
        if where is not None:
            known |= {dim: len(each) for dim, each in where.dimensions.items()}
    for dim, extent in zip(dims, shape, strict=True):
        if known.get(dim, extent) != extent:
            raise ValueError(
                f"dim {dim} has size {known[dim]} in the file; expected {extent}"
            )
    return {d: n for d, n in zip(dims, shape, strict=True) if d not in known}


def write_box(path: str, variable: str, box: Box, values) -> None:
    with _LOCK, netCDF4.Dataset(path, "r+") as file:
        target = file[variable]
        target.set_auto_maskandscale(False)
        target[box] = values


one_writer_at_a_time = True
