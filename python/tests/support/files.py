"""Files of every format with the same numbers."""

import contextlib
import sys

import h5py
import meshio
import netCDF4
import nibabel
import numpy as np
import pytest
import zarr


def numbers(*shape, dtype="float32"):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def write_npy(folder, values):
    np.save(folder / "a.npy", values)
    return folder / "a.npy", None


def write_hdf5(folder, values):
    with h5py.File(folder / "a.h5", "w") as file:
        made = file.create_dataset("fields/t", data=values, chunks=_chunks(values))
        made.attrs["units"] = "K"
        file["fields/other"] = values * 2
    return folder / "a.h5", "fields/t"


def write_netcdf(folder, values):
    with netCDF4.Dataset(folder / "a.nc", "w") as file:
        group = file.createGroup("fields")
        names = [f"d{i}" for i in range(values.ndim)]
        for name, extent in zip(names, values.shape, strict=True):
            file.createDimension(name, extent)
        made = group.createVariable(
            "t", values.dtype, names, chunksizes=_chunks(values)
        )
        made[:] = values
        made.units = "K"
    return folder / "a.nc", "fields/t"


def write_zarr(folder, values, zarr_format=3):
    path = folder / f"a{zarr_format}.zarr"
    zarr.open_group(path, mode="w", zarr_format=zarr_format)
    made = zarr.create_array(
        path, name="fields/t", shape=values.shape, dtype=values.dtype,
        chunks=_chunks(values), zarr_format=zarr_format, attributes={"units": "K"},
    )  # fmt: skip
    made[:] = values
    return path, "fields/t"


def write_zarr2(folder, values):
    return write_zarr(folder, values, 2)


def write_nifti(folder, values):
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / "a.nii")
    return folder / "a.nii", None


def write_mesh(folder, values):
    points = np.random.default_rng(0).random((len(values), 3))
    cells = [("line", [[i, i + 1] for i in range(len(values) - 1)])]
    data = {"t": values}
    meshio.Mesh(points, cells, point_data=data).write(folder / "a.vtu")
    return folder / "a.vtu", "point_data/t"


READERS = ("tensorstore", "zarr")  # of Zarr stores


@contextlib.contextmanager
def read_by(reader):
    """As if tensorstore were not installed, where it is zarr."""
    with pytest.MonkeyPatch.context() as patch:
        if reader == "zarr":
            patch.setitem(sys.modules, "tensorstore", None)
        yield


def _chunks(values):
    return tuple(min(extent, 3 + i) for i, extent in enumerate(values.shape))


WRITERS = {
    "npy": write_npy,
    "hdf5": write_hdf5,
    "netcdf": write_netcdf,
    "zarr2": write_zarr2,
    "zarr3": write_zarr,
    "nifti": write_nifti,
}
