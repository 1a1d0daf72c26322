"""HDF5 by h5py. Variables are named by their path: group/variable."""

from __future__ import annotations

import h5py
import numpy

from shardtensor.io.sources.source import GROUP_THERE, Box, Source, choose_variable

# What netCDF4 calls the scale of a dim that has no coordinates.
_NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
_LABELS = "DIMENSION_LABELS"


class Hdf5Source(Source):
    def __init__(self, dataset: h5py.Dataset):
        if dataset.shape is None:
            raise ValueError("it holds nothing (a null dataspace)")
        super().__init__(_attributes(dataset))
        self._dataset = dataset
        self.shape, self.dtype = dataset.shape, dataset.dtype
        self.chunks = dataset.chunks
        names = tuple(map(_dim_name, dataset.dims))
        self.dims = names if any(names) else None
        # The first that is attached, as in netCDF4.
        self._scales = {
            name: dim[0]
            for name, dim in zip(names, dataset.dims, strict=True)
            if len(dim)
        }

    def read(self, box: Box) -> numpy.ndarray:
        return numpy.asarray(self._dataset[box])

    def close(self) -> None:
        self._dataset.file.close()

    def beside(self, name: str) -> Source | None:
        found = self._scales.get(name, self._dataset.parent.get(name))
        if not isinstance(found, h5py.Dataset):
            return None
        source = Hdf5Source(found)
        named = str(source.attributes.get("NAME"))
        return None if named.startswith(_NO_VARIABLE) else source


def _attributes(dataset):
    """Without those that point to other objects, hold nothing, or name the dims."""
    found = {}
    for key, value in dataset.attrs.items():
        dtype = dataset.attrs.get_id(key).dtype
        is_object = dtype.kind == "O" and h5py.check_string_dtype(dtype) is None
        if not (is_object or isinstance(value, h5py.Empty) or key == _LABELS):
            found[key] = value
    return found


def _dim_name(dim):
    return dim.label or (dim[0].name.rsplit("/", 1)[-1] if len(dim) else None)


def _names(file):
    names = []

    def note(name, item):
        if isinstance(item, h5py.Dataset) and not item.is_scale:
            names.append(name)

    file.visititems(note)
    return names


def open_source(path: str, variable: str | None) -> Source:
    file = h5py.File(path, "r")
    if variable is not None and isinstance(file.get(variable), h5py.Dataset):
        return Hdf5Source(file[variable])
    return Hdf5Source(file[choose_variable(variable, _names(file))])


def create(path, variable, shape, dtype, chunks, dims, attributes) -> None:
    with h5py.File(path, "a") as file:
        there = file.get(variable)
        if isinstance(there, h5py.Group) and len(there):
            raise ValueError(GROUP_THERE)
        # Without a name, until all of it is accepted.
        made = file.create_dataset(None, shape, dtype, chunks=chunks)
        made.attrs.update(attributes)
        for index, name in enumerate(dims or ()):
            made.dims[index].label = name
        if there is not None:
            del file[variable]
        file[variable] = made


def write_box(path: str, variable: str, box: Box, values) -> None:
    with h5py.File(path, "r+") as file:
        file[variable][box] = values


one_writer_at_a_time = True
