"""shardtensor.io.write: all ranks into one file."""

import os

import files
import netCDF4
import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from ranks import partitions, ranks, shard
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor.io import boxes

PRELOAD = ("shardtensor.io", "files")

KINDS = {"npy": None, "h5": "group/t", "nc": "group/t", "zarr": "group/t"}


@pytest.fixture(params=KINDS)
def target(request, tmp_path):
    return tmp_path / f"a.{request.param}", KINDS[request.param]


def check(path, variable, whole):
    """On every rank, when all have written."""
    dist.barrier()
    torch.testing.assert_close(shardtensor.io.open(path, variable)[...], whole.cpu())
    dist.barrier()


@ranks(1, 2, 3)
def test_what_is_written_is_read(mesh, target):
    path, variable = target
    whole = torch.randn(9, 5, dtype=torch.float64)
    for sizes in partitions(9, mesh.size()):
        x = shard(whole, mesh, [Shard(0)], {0: sizes})
        shardtensor.io.write(path, x, variable, chunks=(4, 5))
        check(path, variable, whole)
        whole = whole + 1


@ranks("2x2")
def test_two_axes_replicas_and_sums(mesh, target):
    path, variable = target
    for whole, placements in (
        (torch.randn(7, 6), [Shard(1), Shard(0)]),
        (torch.randn(7, 6), [Shard(0), Shard(0)]),
        (torch.randn(7, 6), [Replicate(), Shard(1)]),
        (torch.randn(7, 6), [Partial(), Shard(1)]),
        (torch.randn(7, 6), [Replicate(), Replicate()]),
    ):
        x = shard(whole, mesh, placements)
        shardtensor.io.write(path, x, variable, chunks=(2, 4))
        check(path, variable, whole)


@ranks(1, 2, 3)
def test_a_part_of_what_is_there(mesh, target):
    """A volume that is never whole anywhere: written piece by piece."""
    path, variable = target
    whole = torch.zeros(4, 9, 5)
    shardtensor.io.create(
        path, variable, (4, 9, 5), torch.float32, mesh, chunks=(1, 4, 5)
    )
    if path.suffix == ".nc":  # where nothing is written, there is no zero
        shardtensor.io.write(path, shard(whole, mesh, [Shard(1)]), variable, index=...)
    for index in (1, (3, slice(1, 9, 2)), (slice(2), 2)):
        part = torch.randn(whole[index].shape)
        whole[index] = part
        x = shard(part, mesh, [Shard(0)])
        shardtensor.io.write(path, x, variable, index=index)
        check(path, variable, whole)
    with pytest.raises(ValueError, match=r"shape \(9, 5\), not \(4, 9, 5\)"):
        shardtensor.io.write(
            path, shard(whole[0], mesh, [Shard(0)]), variable, index=...
        )


@ranks(2)
def test_names_and_attributes_are_kept(mesh, target):
    path, variable = target
    x = shard(torch.arange(6).view(3, 2), mesh, [Shard(0)])
    for version in (2, 3) if path.suffix == ".zarr" else (None,):
        here = path.with_stem(f"v{version}")
        options = {} if version is None else {"zarr_format": version}
        dims = ("time", "x")
        told = {"units": "K", "levels": [1, 2], "names": ["low", "high"]}
        told |= {"add_offset": 0.5, "of_numpy": [1.5, 2.5], "flags": [[1, 2], [3, 4]]}
        if path.suffix == ".nc":
            del told["flags"]  # an attribute has one dim there
        given = told | {"add_offset": np.float32(0.5), "levels": np.array([1, 2])}
        given |= {"of_numpy": [np.float32(1.5), np.float64(2.5)]}
        shardtensor.io.write(here, x, variable, dims=dims, attributes=given, **options)
        dist.barrier()
        array = shardtensor.io.open(here, variable, decode=False)
        assert array.dtype == torch.int64
        if path.suffix != ".npy":
            assert array.dims == dims and array.attributes == told


@ranks(1, 2)
def test_packed_numbers(mesh, tmp_path):
    """As the variable packs them: a reader sees the values."""
    whole = torch.arange(12.0).view(6, 2) / 4 + 280
    whole[3, 1] = torch.nan
    told = {"scale_factor": 0.25, "add_offset": 280.0, "_FillValue": -1}
    for name in ("a.nc", "a.zarr"):
        path, shape = tmp_path / name, (6, 2)
        shardtensor.io.create(path, "t", shape, torch.int16, mesh, attributes=told)
        x = shard(whole, mesh, [Shard(0)])
        shardtensor.io.write(path, x, "t", index=...)
        dist.barrier()
        stored = shardtensor.io.open(path, "t", decode=False)[...]
        assert stored.dtype == torch.int16 and stored[3, 1] == -1 and stored[5, 0] == 10
        torch.testing.assert_close(
            shardtensor.io.open(path, "t")[...], whole.cpu(), equal_nan=True
        )
        dist.barrier()
        with pytest.raises(ValueError, match="beyond what int16 holds"):
            shardtensor.io.write(path, x + 1e6, "t", index=...)
    path = tmp_path / "b.npy"
    shardtensor.io.create(path, None, (6, 2), torch.int16, mesh)
    with pytest.raises(TypeError, match="float32 cannot be written as int16"):
        shardtensor.io.write(path, x, index=...)


@ranks(1, 2)
def test_numbers_that_float64_has_not_are_written_as_they_are(mesh, tmp_path):
    """Where a fill value alone tells what is missing."""
    whole = torch.tensor([2**53 + 1, -(2**63), 2**63 - 1, 5])
    for name in ("a.nc", "a.zarr", "a.h5"):
        path = tmp_path / name
        told = {"_FillValue": -1}
        shardtensor.io.create(path, "t", (4,), torch.int64, mesh, attributes=told)
        for values in (whole, whole.flip(0)):
            x = shard(values, mesh, [Shard(0)])
            shardtensor.io.write(path, x, "t", index=...)
            dist.barrier()
            stored = shardtensor.io.open(path, "t", decode=False)[...]
            assert torch.equal(stored, values.cpu())
            dist.barrier()
        for wrong in (2.0**63, -torch.inf):
            x = shard(torch.full((4,), wrong).double(), mesh, [Shard(0)])
            with pytest.raises(ValueError, match="beyond what int64 holds"):
                shardtensor.io.write(path, x, "t", index=...)
        with pytest.raises(TypeError, match="complex64 cannot be written as int64"):
            shardtensor.io.write(path, x.to(torch.complex64), "t", index=...)


@ranks(1, 2)
def test_numbers_that_the_file_does_not_hold_are_an_error(mesh, target):
    """Beyond its integers, or missing where nothing can stand for it."""
    path, variable = target
    beyond = f"cannot write .*{path.name}.*: a value beyond what int8 holds"
    shardtensor.io.create(path, variable, (4,), torch.int8, mesh)
    for wrong in ([1, 300, -129, 5], [0, 0, 0, 128], [-129, 0, 0, 0]):
        x = shard(torch.tensor(wrong), mesh, [Shard(0)])
        with pytest.raises(ValueError, match=beyond) as caught:
            shardtensor.io.write(path, x, variable, index=...)
        assert "scale" not in str(caught.value)
    x = shard(torch.tensor([127, -128, 0, 5]), mesh, [Shard(0)])
    shardtensor.io.write(path, x, variable, index=...)
    check(path, variable, torch.tensor([127, -128, 0, 5], dtype=torch.int8))
    if path.suffix == ".npy":
        return
    nothing = shard(torch.tensor([0, 1, 2, torch.nan]), mesh, [Shard(0)])
    for missing in (torch.nan, 1e20):
        told = {"missing_value": missing, "scale_factor": 0.5}
        name = f"{variable}_{missing}"
        shardtensor.io.create(path, name, (4,), torch.int16, mesh, attributes=told)
        with pytest.raises(ValueError, match="a NaN, for which the file has no"):
            shardtensor.io.write(path, nothing, name, index=...)
        with pytest.raises(ValueError, match="beyond what int16 holds with this scale"):
            shardtensor.io.write(path, x + 1e6, name, index=...)


@ranks(1, 2)
def test_what_cannot_be_made_leaves_what_is_there(mesh, tmp_path):
    """The variable of this name, and others, which a group holds."""
    whole = torch.arange(12.0).view(4, 3)
    x = shard(whole, mesh, [Shard(0)])
    for name in ("a.h5", "a.zarr", "a.nc"):
        path = tmp_path / name
        for variable in ("g/t", "u"):
            shardtensor.io.write(path, x, variable)
        wrong = [("g", {}), ("u/v", {})]
        if name != "a.nc":  # which takes a variable as it is
            wrong += [("g/t", {"chunks": (2, 2, 2)}), ("u", {"chunks": (2, 2, 2)})]
            wrong += [("u", {"attributes": {"a": {1, 2}}}), ("u", {"attributes": 3})]
        wrong += [(None, {})] if name == "a.zarr" else []
        wrong += [("u", {"dims": ["x"]})] if name == "a.zarr" else []
        for variable, options in wrong:
            with pytest.raises((OSError, TypeError, ValueError), match="cannot create"):
                shardtensor.io.write(path, x * 2, variable, **options)
        if name != "a.nc":
            told = "a group stands there, of which nothing would be left"
            with pytest.raises(ValueError, match=f"{name} variable g: {told}"):
                shardtensor.io.write(path, x * 2, "g")
        for variable in ("g/t", "u"):
            check(path, variable, whole)
    folder = tmp_path / "mine.zarr"
    if dist.get_rank() == 0:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "notes").write_text("mine")
    dist.barrier()
    with pytest.raises(ValueError, match="mine.zarr: a folder stands there"):
        shardtensor.io.write(folder, x)
    assert (folder / "deep" / "notes").read_text() == "mine"
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "empty.zarr").mkdir()
        zarr.open_group(tmp_path / "group.zarr", mode="w").create_group("g")
    dist.barrier()
    shardtensor.io.write(tmp_path / "empty.zarr", x)
    check(tmp_path / "empty.zarr", None, whole)
    shardtensor.io.write(tmp_path / "group.zarr", x, "g")
    check(tmp_path / "group.zarr", "g", whole)


@ranks(1, 2)
def test_an_array_that_is_open_stays_what_it_was(mesh, tmp_path):
    whole = torch.arange(40_000.0).view(200, 200)
    (tmp_path / "real.npy").write_bytes(b"")
    path, linked = tmp_path / "real.npy", tmp_path / f"{dist.get_rank()}.npy"
    linked.symlink_to(path)
    link = tmp_path / "0.npy"
    dist.barrier()
    x = shard(whole, mesh, [Shard(0)])
    shardtensor.io.write(link, x)
    dist.barrier()
    array = shardtensor.io.open(path, mesh=mesh)
    shardtensor.io.write(link, shard(whole[:2] + 1, mesh, [Shard(0)]))
    dist.barrier()
    assert torch.equal(array[...], whole.cpu())
    assert link.is_symlink()
    with pytest.raises((TypeError, ValueError), match="cannot create .*real.npy"):
        shardtensor.io.create(path, None, (2, -5), torch.float32, mesh)
    check(path, None, whole[:2] + 1)
    names = {f"{rank}.npy" for rank in range(mesh.size())} | {"real.npy"}
    assert set(os.listdir(tmp_path)) == names


@ranks(1, 2)
def test_dims_of_netcdf_have_one_size(mesh, tmp_path):
    path = tmp_path / "a.nc"
    shardtensor.io.create(path, "a", (4,), torch.float32, mesh, dims=["x"])
    if dist.get_rank() == 0:
        with netCDF4.Dataset(path, "a") as file:
            file.createDimension("time", None)
            file.createGroup("g").createDimension("x", 6)
    dist.barrier()
    for variable, shape, dims, told in (
        ("b", (6,), ["x"], "dim x has size 4 in the file; expected 6"),
        ("g/b", (4,), ["x"], "dim x has size 6 in the file; expected 4"),
        ("g/h/b", (4,), ["x"], "dim x has size 6 in the file; expected 4"),
        ("b", (5, 4), ["time", "x"], "dim time has size 0 in the file; expected 5"),
        ("b", (4, 4), ["x"], "expected a name for each of 2 dims, got .*'x'"),
        ("a", (3,), None, r"it has shape \(4,\) already, which a NetCDF file cannot"),
    ):
        with pytest.raises(ValueError, match=f"cannot create .*{variable}: {told}"):
            shardtensor.io.create(path, variable, shape, torch.float32, mesh, dims=dims)
    for variable, shape in (("b", (4, 2)), ("g/b", (6, 2)), ("g/h/c", (6, 2))):
        whole = torch.ones(shape)
        x = shard(whole, mesh, [Shard(0)])
        shardtensor.io.write(path, x, variable, dims=["x", "y"])
        check(path, variable, whole)


@ranks(3)
def test_every_chunk_has_one_writer(mesh, tmp_path):
    """And so has every shard, a file of several chunks."""
    whole = torch.randn(10, 4)
    x = shard(whole, mesh, [Shard(0)], {0: [3, 3, 4]})
    kept = zarr.storage.LocalStore.set
    for name, layout in (
        ("a.zarr", {"chunks": (4, 4)}),
        ("b.zarr", {"chunks": (2, 1), "shards": (4, 4)}),
    ):
        path, writes = tmp_path / name, []
        if dist.get_rank() == 0:
            zarr.create_array(path, shape=(10, 4), dtype="f4", **layout)
        dist.barrier()

        async def note(self, key, *args, writes=writes, **kwargs):
            writes.append(key)
            return await kept(self, key, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zarr.storage.LocalStore, "set", note)
            shardtensor.io.write(path, x, index=...)
        assert {*writes} == {f"c/{dist.get_rank()}/0"}
        check(path, None, whole)


@ranks(1, 2)
def test_what_cannot_be_written_is_one_error(mesh, tmp_path):
    x = shard(torch.zeros(4, 2), mesh, [Shard(0)])
    for name, kind, text in (
        ("a.nii", ValueError, "read only; expected Zarr, HDF5, NetCDF or .npy"),
        ("no/such/folder/a.npy", OSError, "cannot create .*a.npy: .*No such file"),
    ):
        with pytest.raises(kind, match=text):
            shardtensor.io.write(tmp_path / name, x)
    with pytest.raises(OSError, match="cannot write .*b.npy: .*No such file"):
        shardtensor.io.write(tmp_path / "b.npy", x, index=...)
    with pytest.raises(TypeError, match="write: chunks belong to a new variable"):
        shardtensor.io.write(tmp_path / "b.npy", x, index=..., chunks=(1, 1))
    path = tmp_path / "c.npy"
    if dist.get_rank() == 0:
        np.save(path, files.numbers(4, 2))
    dist.barrier()
    last = mesh.size() - 1
    mine = path if dist.get_rank() < last else os.fspath(tmp_path / "missing.npy")
    with pytest.raises(OSError, match="cannot write .*missing.npy"):
        shardtensor.io.write(mine, x, index=...)
    kept = boxes.own_rows
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(OSError, match="cannot write .*c.npy: no memory"),
    ):

        def failing(spec):
            if dist.get_rank() == last:
                raise MemoryError("no memory")
            return kept(spec)

        patch.setattr(boxes, "own_rows", failing)
        shardtensor.io.write(path, x, index=...)
