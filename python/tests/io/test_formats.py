"""What formats allow beside arrays of numbers with attributes."""

import base64
import gc
import re
import sys

import h5py
import netCDF4
import numpy as np
import pytest
import torch
import zarr

import shardtensor


def values(path, variable):
    return shardtensor.io.open(path, variable)[...]


def test_hdf5_datasets_of_no_dims_and_attributes_of_nothing(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["scalar"] = np.float32(3)
        file["packed"] = np.int16(3)
        file["packed"].attrs["scale_factor"] = 0.5
        for name in ("scalar", "packed"):
            file[name].attrs["_FillValue"] = np.float32(3)
            file[name].attrs["comment"] = h5py.Empty("S1")
        file["nothing"] = h5py.Empty("f4")
    assert values(path, "scalar").isnan() and values(path, "packed").isnan()
    assert values(path, "packed").dtype == torch.float32
    attributes = shardtensor.io.open(path, "packed").attributes
    assert attributes == {"scale_factor": 0.5, "_FillValue": 3.0}
    with pytest.raises(
        ValueError, match=r"cannot open .*nothing\[...\]: it holds nothing"
    ):
        values(path, "nothing")


def test_a_dim_of_netcdf_without_coordinates_read_by_h5py(tmp_path):
    path = tmp_path / "a.h5"
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("t", 3)
        file.createDimension("x", 2)
        file.createVariable("t", "f8", ("t",))[:] = [1, 2, 3]
        file.createVariable("v", "f4", ("t", "x"))[:] = 1
    array = shardtensor.io.open(path)
    assert array.dims == ("t", "x") and list(array.coordinates) == ["t"]


CLASSIC = ("NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA")
LAYOUTS = {
    "of fixed size": {"a": ("i2", "yx"), "b": ("f8", ""), "c": ("S1", "x")},
    "one of records": {"a": ("f4", "y"), "b": ("i2", "tx")},
    "several of records": {"a": ("i1", "tx"), "b": ("f4", "y"), "c": ("i2", "tyx")},
}


def classic(path, form, variables):
    with netCDF4.Dataset(path, "w", format=form) as file:
        file.title = "odd"
        for name, extent in {"t": None, "x": 3, "y": 5}.items():
            file.createDimension(name, extent)
        for name, (kind, dims) in variables.items():
            shape = [{"t": 4, "x": 3, "y": 5}[dim] for dim in dims]
            made = file.createVariable(name, kind, tuple(dims))
            made.units = "K"
            made[...] = np.full(shape, b"w" if kind == "S1" else 7, kind)
    return {n: shape for n, shape in variables.items() if shape[0] != "S1"}


@pytest.mark.parametrize("form", CLASSIC)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_in_a_classic_netcdf_is_no_zeros(tmp_path, layout, form):
    path = tmp_path / "a.nc"
    numbers = classic(path, form, LAYOUTS[layout])
    data, told = path.read_bytes(), []
    for size in range(len(data), 100, -1):
        path.write_bytes(data[:size])
        for name in numbers:
            try:
                assert (values(path, name) == 7).all(), (size, name)
            except OSError as error:
                assert size < len(data)
                told.append(str(error))
    end = "byte [0-9]+, within [abc], which by its header ends at byte [0-9]+$"
    assert re.search(f"a.nc variable [abc]\\[...\\]: the file ends at {end}", told[0])
    in_header = [re.search("ends at byte [0-9]+, in its header", t) for t in told]
    assert any(in_header) == form.endswith("DATA")  # the library itself says of others
    assert len(told) > 100


@pytest.mark.parametrize("version", [2, 3])
def test_fill_values_as_text_in_zarr(tmp_path, version):
    path = tmp_path / "a.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=version)
    in_xarray = base64.b64encode(np.float64(2)).decode()
    for kind in ("f4", "i2", str):
        for fill in ("", "N/A", "NaN", "AAAA", in_xarray):
            name = f"{np.dtype(kind).kind}_{fill.replace('/', '')}"
            made = group.create_array(name, shape=(3,), dtype=kind, chunks=(3,))
            made[:] = np.array([1, 2, 3]).astype(kind)
            made.attrs["_FillValue"] = fill
    for fill in ("", "NA", "NaN", "AAAA", in_xarray):
        stored = torch.tensor([1, 2, 3])
        expected = stored.float()
        if fill == in_xarray:
            expected[1] = torch.nan
        found = values(path, f"f_{fill}")
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert torch.equal(values(path, f"i_{fill}").short(), stored.short())
        with pytest.raises(TypeError, match="expected numbers, the file holds"):
            values(path, f"{np.dtype(str).kind}_{fill}")


def test_numbers_that_pytorch_has_not(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(2, np.longdouble))
    with pytest.raises(TypeError, match="a.npy: expected numbers of PyTorch's, got"):
        len(shardtensor.io.open(tmp_path / "a.npy"))
    path = tmp_path / "a.nc"
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("x", 3)
        ragged = file.createVLType("i4", "ragged")
        file.createVariable("v", ragged, ("x",))
    with pytest.raises(TypeError, match="cannot open .*expected numbers, the file"):
        len(shardtensor.io.open(path, "v"))


@pytest.mark.parametrize("ending", ["obj", "vtu", "csv"])
def test_a_file_that_is_not_there_is_one_error(tmp_path, monkeypatch, ending):
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with pytest.raises(OSError, match="cannot open .*No such file"):
        len(shardtensor.io.open(tmp_path / f"a.{ending}"))
    gc.collect()
    assert not ignored
