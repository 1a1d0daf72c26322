"""Zarr stores, format 2 and 3. Variables are named by their path in the store."""

from __future__ import annotations

import base64
import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy
import zarr

from shardtensor.io.sources import background
from shardtensor.io.sources.source import GROUP_THERE, Box, Source, choose_variable

_DIMS = "_ARRAY_DIMENSIONS"  # format 2 has no other place for names of dims
_METADATA = ("zarr.json", ".zgroup", ".zattrs", ".zmetadata")


class ZarrSource(Source):
    def __init__(self, array: zarr.Array, group: zarr.Group | None):
        attributes = dict(array.attrs)
        names = attributes.pop(_DIMS, None)
        version = array.metadata.zarr_format
        if version == 3:
            names = array.metadata.dimension_names
        elif names is not None and array.fill_value is not None:
            # Programs that name dims keep CF's fill value here.
            attributes.setdefault("_FillValue", array.fill_value)
        if isinstance(attributes.get("_FillValue"), str) and array.dtype.kind == "f":
            attributes["_FillValue"] = _decoded(attributes["_FillValue"])
        super().__init__(attributes)
        self._array, self._group = array, group
        self.shape, self.dtype, self.chunks = array.shape, array.dtype, array.chunks
        if array.shards is not None:
            self.chunks = array.shards  # a file each
        self.dims = tuple(n or None for n in names) if names and any(names) else None

    def read(self, box: Box) -> numpy.ndarray:
        return numpy.asarray(self._array[box])

    def begin(self, box: Box) -> Callable[[], numpy.ndarray]:
        store = self._store if background.is_possible() else None
        begun = super().begin(box) if store is None else store[box].read().result
        return functools.partial(_wait, begun)

    @functools.cached_property
    def _store(self):
        return background.open_array(self._array)

    def beside(self, name: str) -> Source | None:
        found = self._group.get(name) if self._group is not None else None
        return ZarrSource(found, self._group) if isinstance(found, zarr.Array) else None


def _wait(begun):
    """With one kind of error, whatever reads: the box is there, the file is damaged."""
    try:
        return begun()
    except ValueError as error:
        raise OSError(str(error)) from error


def _decoded(text):
    """A fill value in JSON: the name of a number ("NaN"), or xarray's form. Another
    text is none."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        (number,) = numpy.frombuffer(base64.b64decode(text, validate=True), "<f8")
        return float(number)
    except ValueError:
        return text


def _names(group):
    members = group.members(max_depth=None)
    names = [name for name, item in members if isinstance(item, zarr.Array)]
    arrays = dict(members)
    dims = {dim for n in names for dim in ZarrSource(arrays[n], None).dims or ()}
    data = [name for name in names if name.rsplit("/", 1)[-1] not in dims]
    return names, data


def open_source(path: str, variable: str | None) -> Source:
    if not os.path.exists(path):
        raise FileNotFoundError("there is no such store")
    root = zarr.open(Path(path), mode="r")
    if isinstance(root, zarr.Array):
        if variable is not None:
            raise ValueError("the store is one array and has no variables")
        return ZarrSource(root, None)
    names, data = _names(root)
    chosen = choose_variable(variable, names if variable else data)
    group, _, _ = chosen.rpartition("/")
    return ZarrSource(root[chosen], root[group] if group else root)


def create(
    path, variable, shape, dtype, chunks, dims, attributes, zarr_format=3
) -> None:
    options = {"dimension_names": dims} if zarr_format == 3 else {}
    if zarr_format == 2:
        # A fill value of format 2 would be taken for CF's.
        options["fill_value"] = None
        attributes = {**attributes, **({_DIMS: list(dims)} if dims else {})}
    make = functools.partial(
        zarr.create_array, name=variable, shape=shape, dtype=dtype,
        chunks=chunks or "auto", attributes=_as_json(attributes), overwrite=True,
        zarr_format=zarr_format, **options,
    )  # fmt: skip
    make(zarr.storage.MemoryStore())  # what is refused must not delete what is there
    _check_place(Path(path, (variable or "").strip("/")))
    if variable is not None:
        zarr.open_group(Path(path), mode="a", zarr_format=zarr_format)
    make(Path(path))


def _as_json(value):
    """NumPy's numbers and arrays as JSON has them."""
    if isinstance(value, dict):
        return {key: _as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return value.tolist() if isinstance(value, numpy.generic | numpy.ndarray) else value


def _check_place(folder):
    """An array is replaced, with all that is in its folder."""
    if not folder.is_dir() or {*os.listdir(folder)} <= {*_METADATA}:
        return
    try:
        there = zarr.open(folder, mode="r")
    except FileNotFoundError:
        raise ValueError(
            "a folder stands there that is no array, of which nothing would be left"
        ) from None
    if isinstance(there, zarr.Group):
        raise ValueError(GROUP_THERE)


def write_box(path: str, variable: str | None, box: Box, values) -> None:
    root = zarr.open(Path(path), mode="r+")
    target = root if variable is None else root[variable]
    target[box] = values


one_writer_at_a_time = False  # chunks are files
