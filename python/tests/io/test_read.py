"""shardtensor.io.open and read: each rank its box, of every format."""

import builtins
import itertools
import os
import pickle
import sys

import files
import h5py
import meshio
import netCDF4
import nibabel
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import assert_close, partitions, ranks, uneven
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor.io.boxes import chunk_sizes, selected

PRELOAD = ("shardtensor.io", "files")


@pytest.fixture(params=files.WRITERS)
def stored(request, tmp_path):
    values = files.numbers(7, 10, 5)
    return *files.WRITERS[request.param](tmp_path, values), values


# ---- one rank ---------------------------------------------------------------


def test_an_array_knows_its_file_and_indexes_like_numpy(stored):
    path, variable, values = stored
    array = shardtensor.io.open(path, variable)
    assert (array.shape, array.dtype) == (values.shape, torch.float32)
    if variable:
        assert array.attributes["units"] == "K"
        assert array.chunks == (3, 4, 5)
    for index in (
        ..., 3, (slice(None), -1), (2, slice(1, 8, 3)), (..., slice(1, 3)),
        (slice(4, 4),), (slice(5, None), 2, slice(None, None, 2)), (1, 2, 3),
    ):  # fmt: skip
        torch.testing.assert_close(array[index], torch.tensor(values[index]))


def test_indices_that_do_not_fit(tmp_path):
    array = shardtensor.io.open(*files.write_npy(tmp_path, files.numbers(4, 3)))
    for index, kind, text in (
        (4, IndexError, "index 4 is out of range for extent 4"),
        ((0, 0, 0), IndexError, "3 indices for 2 dims"),
        ((..., ...), IndexError, "one Ellipsis"),
        (slice(None, None, -1), IndexError, "a step forward"),
        ("t", TypeError, "got 't'"),
        ([0, 1], TypeError, "expected numbers, slices"),
        (np.array([0, 1]), TypeError, "expected numbers, slices"),
        (torch.tensor([0, 1]), TypeError, "expected numbers, slices"),
    ):
        with pytest.raises(kind, match=text):
            array[index]
    np.save(tmp_path / "b.npy", np.float32(1))
    with pytest.raises(TypeError, match="b.npy has no dims, and so no length"):
        len(shardtensor.io.open(tmp_path / "b.npy"))


def test_chunks_go_to_one_rank_each():
    assert chunk_sizes(range(10), range(0, 10, 4), 2) == [4, 6]
    assert chunk_sizes(range(10), range(0, 10, 4), 5) == [4, 0, 4, 0, 2]
    assert chunk_sizes(range(3, 19), range(0, 20, 4), 2) == [9, 7]
    assert chunk_sizes(range(0, 20, 3), range(0, 20, 4), 2) == [3, 4]
    assert chunk_sizes(range(5), [0], 3) == [0, 5, 0]
    assert chunk_sizes(range(0), range(0, 20, 4), 2) == [0, 0]
    for rows in (range(23), range(2, 23), range(1, 23, 2), range(4, 5)):
        for pieces in range(1, 8):
            sizes = chunk_sizes(rows, range(0, 23, 4), pieces)
            assert len(sizes) == pieces and sum(sizes) == len(rows)
            cuts = np.cumsum(sizes)[:-1]
            chunks = [
                set(np.array(part) // 4) for part in np.split(np.array(rows), cuts)
            ]
            assert sum(map(len, chunks)) == len(set().union(*chunks))


def test_a_selection_says_which_dims_stay():
    rows, kept = selected((0, ..., slice(1, 9, 2)), (4, 5, 10))
    assert rows == [range(0, 1), range(0, 5), range(1, 9, 2)] and kept == [1, 2]


def as_files(folder, values):
    for write in files.WRITERS.values():
        yield write(folder, values)
    np.savetxt(folder / "a.csv", values.reshape(len(values), -1), fmt="%d")
    yield folder / "a.csv", None
    yield folder / "?.npy", None


def test_an_array_travels_to_other_processes(tmp_path):
    """As one that opens its file there."""
    values = files.numbers(7, 10, 5)
    for path, variable in as_files(tmp_path, values):
        array = shardtensor.io.open(str(path), variable)
        rows = array[3]
        text = pickle.dumps(array)
        array.close()
        assert len(text) < 1000
        assert torch.equal(pickle.loads(text)[3], rows), path


# ---- many files -----------------------------------------------------------


def test_real_fields(monkeypatch):
    import iris_sample_data

    folder = os.path.join(os.path.dirname(iris_sample_data.__file__), "sample_data")
    name = os.path.join(folder, "A1B_north_america.nc")
    array = shardtensor.io.open(name)
    assert array.shape == (240, 37, 49) and array.dims[0] == "time"
    assert array.coordinates["time"][0].calendar == "360_day"
    with netCDF4.Dataset(name) as file:
        expected = np.ma.filled(file["air_temperature"][7].astype("f4"), np.nan)
    torch.testing.assert_close(array[7], torch.tensor(expected), equal_nan=True)
    ocean = shardtensor.io.open(os.path.join(folder, "NEMO", "*_grid-T.nc"), "tos")
    assert ocean.shape == (3, 330, 360) and ocean[1].isnan().any()
    months = ocean.coordinates
    assert not months or all(len(t) in (3, 330, 360) for t in months.values())


# ---- several files ----------------------------------------------------------


def several(folder):
    whole = files.numbers(9, 4)
    for name, begin, end in (("b", 3, 4), ("a", 0, 3), ("c", 4, 9)):
        with netCDF4.Dataset(folder / f"{name}.nc", "w") as file:
            file.createDimension("time", end - begin)
            file.createDimension("x", 4)
            time = file.createVariable("time", "i4", ("time",))
            time[:] = np.arange(end - begin)
            time.units = f"days since 2015-01-{begin + 1:02}"
            t = file.createVariable(
                "t", "f4", ("time", "x"), chunksizes=(min(2, end - begin), 4)
            )
            t[:] = whole[begin:end]
    return str(folder / "?.nc"), whole


def test_files_follow_each_other(tmp_path):
    pattern, whole = several(tmp_path)
    array = shardtensor.io.open(pattern, "t")
    for index in (..., 3, slice(2, 5), slice(0, 9, 4), slice(4, 4), (slice(1, 8), 2)):
        torch.testing.assert_close(array[index], torch.tensor(whole[index]))
    days = array.coordinates["time"].astype("datetime64[D]").astype(str)
    assert list(days) == [f"2015-01-{day:02}" for day in range(1, 10)]
    assert array.chunk_sizes(0, 3) == [3, 3, 3]  # chunks: 2 1, 1, 2 2 1
    reverse = [tmp_path / "c.nc", tmp_path / "a.nc"]
    both = shardtensor.io.open(reverse, "t")[...]
    torch.testing.assert_close(
        both, torch.tensor(np.concatenate([whole[4:], whole[:3]]))
    )
    with pytest.raises(OSError, match="no file has such a name"):
        shardtensor.io.open(str(tmp_path / "*.zarr"))[...]
    files.write_npy(tmp_path, files.numbers(2, 3))
    files.np.save(tmp_path / "b.npy", files.numbers(2, 4))
    with pytest.raises(ValueError, match="only the first dim may differ"):
        len(shardtensor.io.open(str(tmp_path / "?.npy")))


def packed_months(folder):
    """As archives of packed weather come: every file has a scale of its own."""
    stored, expected = np.arange(30, dtype="i2").reshape(10, 3), []
    for name, begin, end, scale, offset, missing in (
        ("a", 0, 4, 0.5, 270.0, -9),
        ("b", 4, 5, 0.25, 100.0, 13),
        ("c", 5, 10, None, None, None),
    ):
        with netCDF4.Dataset(folder / f"{name}.nc", "w") as file:
            file.createDimension("time", end - begin)
            file.createDimension("x", 3)
            t = file.createVariable("t", "i2", ("time", "x"), fill_value=missing)
            t.set_auto_maskandscale(False)
            t[:] = stored[begin:end]
            t.units = "K"
            if scale:
                t.scale_factor, t.add_offset = scale, offset
        values = stored[begin:end].astype("f4") * (scale or 1) + (offset or 0)
        values[stored[begin:end] == missing] = np.nan
        expected.append(values)
    return str(folder / "?.nc"), torch.from_numpy(np.concatenate(expected)), stored


@ranks(1, 2, 3)
def test_each_file_has_its_own_scale_and_missing_value(mesh, tmp_path):
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    pattern, expected, stored = packed_months(folder)
    array = shardtensor.io.open(pattern)
    assert array.dtype == torch.float32 and array.attributes == {"units": "K"}
    assert_close(array.read(..., mesh, [Shard(0)]), expected)
    for index in (3, 4, slice(2, 9, 2), slice(6, 9), slice(4, 4)):
        torch.testing.assert_close(array[index], expected[index], equal_nan=True)
    raw = shardtensor.io.open(pattern, decode=False)[...]
    assert torch.equal(raw, torch.from_numpy(stored))


# ---- several ranks ----------------------------------------------------------


@ranks(1, 2, 3)
def test_every_rank_reads_its_box(mesh, stored):
    path, variable, values = stored
    array, whole = shardtensor.io.open(path, variable), torch.tensor(values)
    for sizes in partitions(10, mesh.size(), repeated=False):
        x = array.read(..., mesh, [Shard(1)], sizes={1: sizes})
        assert_close(x, whole)
    x = array.read((slice(1, 7, 2), ..., 2), mesh, [Shard(0)])
    assert_close(x, whole[1:7:2, :, 2])
    assert_close(array.read(3, mesh, [Replicate()]), whole[3])
    assert array.read(3, mesh).placements == (Replicate(),)
    assert_close(array.read(3, mesh), whole[3])
    assert_close(array.read(3, mesh, [Shard(0)], sizes="chunks"), whole[3])


@ranks("2x2")
def test_boxes_of_two_axes(mesh, stored):
    path, variable, values = stored
    array, whole = shardtensor.io.open(path, variable), torch.tensor(values)
    for placements in (
        [Shard(1), Shard(0)],
        [Shard(1), Shard(1)],
        [Replicate(), Shard(2)],
    ):
        assert_close(array.read(..., mesh, placements), whole)
        assert_close(
            array.read(slice(1, 6), mesh, placements, sizes="chunks"), whole[1:6]
        )


@ranks(1, 2, 3, "2x2")
def test_ghost_rows_are_those_of_halo_exchange(mesh, tmp_path):
    whole = files.numbers(9, 10)
    path = tmp_path / f"{dist.get_rank()}.npy"
    np.save(path, whole)
    array = shardtensor.io.open(path)
    placements = [Shard(0), Shard(1)][: mesh.ndim]
    ranks = mesh.size(0)
    cuts = [uneven(9, ranks), [9] + [0] * (ranks - 1), [0] * (ranks - 1) + [9]]
    cuts += [[4, 0, 5]] if ranks == 3 else []
    for sizes, halo in itertools.product(cuts, (1, (0, 2), {0: (1, 0)})):
        x, ghosts = array.read(..., mesh, placements, sizes={0: sizes}, halo=halo)
        assert_close(x, torch.tensor(whole))
        torch.testing.assert_close(ghosts, shardtensor.halo_exchange(x, halo))
        assert_close(shardtensor.halo_trim(ghosts, x, halo), torch.tensor(whole))
        piece = x.to_local()
        assert piece.untyped_storage().data_ptr() == ghosts.untyped_storage().data_ptr()
    for index in (slice(4, 4), (..., slice(4, 4)), slice(8, None)):
        for cut in (placements, [Shard(1), Shard(0)][: mesh.ndim]):
            x, ghosts = array.read(index, mesh, cut, halo=2)
            torch.testing.assert_close(ghosts, shardtensor.halo_exchange(x, 2))
    with pytest.raises(ValueError, match="halo: -1 rows of dim 0 of 2"):
        array.read(..., mesh, placements, halo={0: -1})


@ranks(1, 2, 3)
def test_meshes_come_from_one_rank(mesh, tmp_path):
    values = files.numbers(7, dtype="float64")
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    path, name = files.write_mesh(folder, values)
    array = shardtensor.io.open(path, name)
    assert_close(array.read(..., mesh, [Shard(0)]), torch.tensor(values))
    cells = shardtensor.io.open(path, "cells/line")
    np.save(folder / "a.npy", cells[...].numpy())
    alike = shardtensor.io.open(folder / "a.npy")
    for sizes in partitions(5, mesh.size(), repeated=False):
        options = {"sizes": {0: sizes}, "halo": 1}
        x, ghosts = cells.read(slice(1, 6), mesh, [Shard(0)], **options)
        assert_close(x, cells[1:6])
        torch.testing.assert_close(ghosts, shardtensor.halo_exchange(x, 1))
        _, others = alike.read(slice(1, 6), mesh, [Shard(0)], **options)
        assert torch.equal(others, ghosts)


@ranks(1, 2, 3)
@pytest.mark.parametrize("ending", ["vtu", "obj", "stl"])
def test_points_and_cells_of_a_surface_come_by_rows(mesh, ending, tmp_path):
    points = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1.0]])
    faces = np.array([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]])
    # Two groups of one kind.
    blocks = [("triangle", faces[:3]), ("triangle", faces[3:])]
    path = tmp_path / f"{dist.get_rank()}.{ending}"
    options = {"binary": True} if ending == "stl" else {}
    meshio.Mesh(points, blocks).write(path, **options)
    corners = shardtensor.io.open(path, "points").read(..., mesh, [Shard(0)])
    cells = shardtensor.io.open(path, "cells/triangle").read(..., mesh, [Shard(0)])
    assert corners.placements == cells.placements == (Shard(0),)
    found = corners.full_tensor().double()[cells.full_tensor().long()]
    torch.testing.assert_close(found, torch.tensor(points[faces]))


# ---- errors -----------------------------------------------------------------


def failing(array, mesh, *args, **kwargs):
    with pytest.raises(builtins.Exception) as caught:
        array.read(..., mesh, [Shard(0)], *args, **kwargs)
    return f"{caught.type.__name__}: {caught.value}"


@ranks(1, 2, 3)
def test_an_error_of_one_rank_is_everyones(mesh, tmp_path):
    last = mesh.size() - 1
    path = tmp_path / "a.npy"
    mine = path if dist.get_rank() != last else tmp_path / "missing.npy"
    if dist.get_rank() == 0:
        np.save(path, files.numbers(6, 2))
    dist.barrier()
    text = failing(shardtensor.io.open(mine), mesh)
    assert text.startswith("OSError: shardtensor.io: cannot open ")
    assert "missing.npy[...]: " in text and "No such file" in text
    assert mesh.size() == 1 or text.endswith(f"(on mesh rank {last})")
    with pytest.raises(OSError, match="missing.npy"):
        shardtensor.io.open(mine, mesh=mesh)


@ranks(2)
def test_damaged_files_and_wrong_names_say_what_and_where(mesh, tmp_path):
    values = files.numbers(40, 30)
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    path, name = files.write_hdf5(folder, values)
    text = failing(shardtensor.io.open(path, "fields/u"), mesh)
    assert text.startswith("ValueError: shardtensor.io: cannot open")
    assert "variable fields/u[...]: there is no such variable; the file has" in text
    assert "fields/other, fields/t" in text
    text = failing(shardtensor.io.open(path), mesh)
    assert "several variables, name one of fields/other, fields/t" in text
    cut = folder / "cut.h5"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "cut.h5 variable fields/t[...]: " in failing(
        shardtensor.io.open(cut, name), mesh
    )

    np.save(folder / "b.npy", np.array(["words"] * 4))
    text = failing(shardtensor.io.open(folder / "b.npy"), mesh)
    assert "TypeError" in text and "expected numbers, the file holds <U5" in text
    (folder / "a.dat").write_text("1 2 3")
    text = failing(shardtensor.io.open(folder / "a.dat"), mesh)
    assert "unknown kind of file; expected one of .h5" in text


def cut_short(folder):
    """A file of each format that says where it ends."""
    values = files.numbers(40, 30)
    for name in ("npy", "hdf5", "netcdf", "classic netcdf"):
        if name == "classic netcdf":
            path, variable = folder / "classic.nc", "t"
            with netCDF4.Dataset(path, "w", format="NETCDF3_CLASSIC") as file:
                file.createDimension("y", 40)
                file.createDimension("x", 30)
                file.createVariable("t", "f4", ("y", "x"))[:] = values
        else:
            path, variable = files.WRITERS[name](folder, values)
        os.truncate(path, os.path.getsize(path) * 2 // 3)
        yield path, variable


@ranks(1, 2)
def test_files_that_cannot_be_opened_say_what_was_wanted(mesh, tmp_path):
    cases = [(tmp_path / "none.zarr", "t"), (tmp_path / "none.csv", None)]
    told = [[*cases, *cut_short(tmp_path)] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    wanted = slice(2, 30, 3), ..., 4
    for path, variable in told[0]:
        array = shardtensor.io.open(path, variable)
        title = f"shardtensor.io: cannot open {path}"
        title += f" variable {variable}" if variable else ""
        for read in (lambda a: a.read(wanted, mesh, [Shard(0)]), lambda a: a[wanted]):
            with pytest.raises((OSError, ValueError), match="cannot open") as caught:
                read(array)
            assert f"{title}[2:30:3, ..., 4]: " in str(caught.value), caught.value
        with pytest.raises((OSError, ValueError), match="cannot open") as caught:
            shardtensor.io.open(path, variable, mesh=mesh)
        assert f"{title}: " in str(caught.value)
    with pytest.raises(OSError, match=r"none.zarr\[1:, :5, ::2\]: "):
        shardtensor.io.open(tmp_path / "none.zarr")[1:, :5, ::2]


@ranks(1, 2)
def test_what_is_damaged_inside_is_an_error_where_it_is_read(mesh, tmp_path):
    """Volumes that are cut short, chunks whose checksum is another one; what is whole
    is read."""
    values = files.numbers(4, 5, 60)
    volumes = [tmp_path / "a.nii", tmp_path / "a.nii.gz"]
    chunked = tmp_path / "a.h5"
    if dist.get_rank() == 0:
        for path in volumes:
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path)
            os.truncate(path, os.path.getsize(path) * 2 // 3)
        with h5py.File(chunked, "w") as file:
            made = file.create_dataset(
                "t", data=values, chunks=(4, 5, 20), fletcher32=True
            )
            at = made.id.get_chunk_info(2).byte_offset + 7
        data = bytearray(chunked.read_bytes())
        data[at] ^= 1
        chunked.write_bytes(data)
    dist.barrier()
    for path in (*volumes, chunked):
        array = shardtensor.io.open(path)
        assert array.shape == values.shape
        with pytest.raises(OSError, match=rf"cannot read .*{path.name}.*\["):
            array.read(..., mesh, [Shard(2)])
        with pytest.raises(OSError, match=rf"cannot read .*{path.name}.*\["):
            array[..., -1]
        assert_close(
            array.read((..., 5), mesh, [Shard(0)]), torch.tensor(values)[..., 5]
        )


@ranks(1, 2)
def test_complex_numbers_become_no_real_ones(mesh, tmp_path):
    path = tmp_path / f"{dist.get_rank()}.npy"
    np.save(path, np.full((4, 3), 1 + 2j, "c8"))
    told = "expected a complex dtype for torch.complex64, got torch.float32"
    array = shardtensor.io.open(path, dtype=torch.float32)
    for read in (lambda: array.read(..., mesh, [Shard(0)]), lambda: array[0]):
        with pytest.raises(TypeError, match=f"npy.*: {told}"):
            read()
    with pytest.raises(TypeError, match=f"npy: {told}"):
        shardtensor.io.open(path, dtype=torch.float32, mesh=mesh)
    wide = shardtensor.io.open(path, dtype=torch.complex128)[...]
    assert wide.dtype == torch.complex128 and (wide == 1 + 2j).all()


@ranks(2)
def test_ranks_that_ask_for_different_things(mesh, tmp_path):
    path = tmp_path / f"{dist.get_rank()}.npy"
    np.save(path, files.numbers(6 + dist.get_rank(), 2))
    text = failing(shardtensor.io.open(path), mesh)
    file = f"{tmp_path}/{dist.get_rank()}.npy"
    title = f"ValueError: shardtensor.io: cannot read {file}: "
    assert text.startswith(f"{title}ranks were told different things")
    assert "mesh ranks [0]: (torch.Size([6, 2])" in text
    same = shardtensor.io.open(path)
    with pytest.raises(ValueError, match="expected Shard and Replicate, got"):
        same.read(slice(0, 4), mesh, [shardtensor.Partial()])
    with pytest.raises(ValueError, match="or \"chunks\", got 'even'"):
        same.read(slice(0, 4), mesh, [Shard(0)], sizes="even")


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    path, name = files.write_hdf5(tmp_path, files.numbers(3))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"pip install 'shardtensor\[io\]'") as caught:
        len(shardtensor.io.open(path, name))
    assert "h5py is not installed" in str(caught.value) and "a.h5" in str(caught.value)
