"""Zarr stores: the same numbers and errors by tensorstore as by zarr."""

import contextlib

import files
import numcodecs
import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from ranks import assert_close, ranks
from torch.distributed.tensor import Shard
from zarr import codecs

import shardtensor

PRELOAD = ("shardtensor.io", "files")

of_each_reader = pytest.mark.parametrize("reader", files.READERS)

# What arrays are made with, and whether tensorstore knows it, format by format.
MADE = {
    2: [
        ({}, True),
        ({"dtype": ">i2", "compressors": numcodecs.Blosc(shuffle=2)}, True),
        ({"dtype": "c8", "order": "F", "compressors": None}, True),
        ({"fill_value": np.nan}, True),
        ({"fill_value": None, "dtype": "u1"}, True),
        ({"chunk_key_encoding": {"name": "v2", "separator": "/"}}, True),
        ({"compressors": numcodecs.GZip()}, False),
        ({"compressors": numcodecs.LZ4()}, False),
        ({"filters": [numcodecs.Delta("f4")]}, False),
    ],
    3: [
        ({}, True),
        ({"dtype": "?", "compressors": codecs.BloscCodec()}, True),
        ({"dtype": ">f8", "compressors": codecs.GzipCodec()}, True),
        ({"shards": (6, 8, 5), "compressors": codecs.Crc32cCodec()}, True),
        ({"filters": [codecs.TransposeCodec(order=(2, 0, 1))]}, True),
        ({"fill_value": np.nan, "dtype": "c16"}, True),
        ({"chunk_key_encoding": {"name": "v2", "separator": "."}}, True),
        ({"compressors": {"name": "numcodecs.zlib", "configuration": {}}}, False),
    ],
}
BOXES = (
    ..., 3, (slice(None), -1), (2, slice(1, 8, 3)), (slice(4, 4),),
    (slice(5, None), 2, slice(None, None, 2)), (1, 2, 3), slice(0, 7, 4),
)  # fmt: skip


@contextlib.contextmanager
def chunks_read_by_zarr():
    read = []
    kept = zarr.storage.LocalStore.get

    async def get(self, key, *args, **kwargs):
        if not key.rpartition("/")[2].startswith((".", "zarr.json")):
            read.append(key)
        return await kept(self, key, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr.storage.LocalStore, "get", get)
        yield read


def check(array, values):
    for index in BOXES:
        expected = torch.tensor(values[index], device="cpu")
        torch.testing.assert_close(array[index], expected, equal_nan=True)


@ranks(1)  # a process that others are not forked from
@of_each_reader
@pytest.mark.parametrize("version", MADE)
def test_values_are_the_same_whoever_reads(mesh, tmp_path, version, reader):
    for number, (options, is_known) in enumerate(MADE[version]):
        path = tmp_path / f"{number} %20#?.zarr"
        group = zarr.open_group(path, mode="w", zarr_format=version)
        options = {"shape": (7, 10, 5), "chunks": (3, 4, 5), "dtype": "f4"} | options
        made = group.create_array("fields/t", **options)
        values = files.numbers(7, 10, 5).astype(made.dtype.newbyteorder("="))
        made[:6] = values[:6]  # a row of chunks is missing
        values[6] = made.fill_value or 0
        with files.read_by(reader), chunks_read_by_zarr() as read:
            array = shardtensor.io.open(path, "fields/t", decode=False)
            check(array, values)
            assert bool(read) == (reader == "zarr" or not is_known), options
            made[6] = values[0]
            values[6] = values[0]
            check(array, values)


@ranks(1)
@of_each_reader
@pytest.mark.parametrize("version", MADE)
def test_metadata_and_conventions_are_those_of_zarr(mesh, tmp_path, version, reader):
    """Consolidated, and without the array's own."""
    values = files.numbers(7, 10, dtype="i2")
    path, name = files.write_zarr(tmp_path, values, version)
    packed = {"scale_factor": 0.5, "add_offset": 100.0, "_FillValue": 9}
    zarr.open(path)[name].attrs.update(packed)
    zarr.consolidate_metadata(path, zarr_format=version)
    (path / name / ("zarr.json" if version == 3 else ".zarray")).unlink()
    expected = values.astype("f4") / 2 + 100
    expected[values == 9] = np.nan
    with files.read_by(reader), chunks_read_by_zarr() as read:
        array = shardtensor.io.open(path, name)
        assert array.shape == values.shape and array.attributes["units"] == "K"
        expected = torch.from_numpy(expected)
        torch.testing.assert_close(array[...], expected, equal_nan=True)
        assert bool(read) == (reader == "zarr")


def given():
    """Bytes that the system has given to this process."""
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar: "))


@ranks(2)
@of_each_reader
def test_chunks_are_read_once(mesh, tmp_path, reader):
    path = tmp_path / f"{dist.get_rank()}.zarr"
    values = files.numbers(10, 1 << 16)
    chunk = 4 * values[0].nbytes
    zarr.create_array(path, data=values, chunks=(4, 1 << 16), compressors=None)
    with files.read_by(reader):
        array = shardtensor.io.open(path)
        assert array[0, 0] == 0  # opens it
        before = given()
        x = array.read(..., mesh, [Shard(0)], sizes="chunks")
        read = given() - before
    assert x._spec.sizes() == {0: [4, 6]}
    assert_close(x, torch.tensor(values))
    chunks = 1 + dist.get_rank()
    assert abs(read - chunks * chunk) < chunk / 4


@ranks(2)
@of_each_reader
def test_a_loader_reads_ahead(mesh, tmp_path, reader):
    values = files.numbers(12, 7, 4)
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    with files.read_by(reader):
        array = shardtensor.io.open(*files.write_zarr(folder, values))
        data = shardtensor.io.Dataset({"x": array, "y": (array, 1)}, mesh, [Shard(1)])
        for prefetch in (0, 3):
            loader = shardtensor.io.DataLoader(data, 2, shuffle=True, prefetch=prefetch)
            for batch in loader:
                samples = (batch["x"].full_tensor()[:, 0, 0] / 28).long()
                assert_close(batch["x"], torch.tensor(values)[samples])
                assert_close(batch["y"], torch.tensor(values)[samples + 1])


class Rows(torch.utils.data.Dataset):
    def __init__(self, array):
        self.array = array

    def __len__(self):
        return len(self.array)

    def __getitem__(self, row):
        return self.array[row]


@ranks(1)
@of_each_reader
def test_processes_forked_from_one_that_has_read(mesh, tmp_path, reader):
    """tensorstore would abort them: its threads are not there."""
    values = files.numbers(7, 10)
    with files.read_by(reader):
        array = shardtensor.io.open(*files.write_zarr(tmp_path, values))
        assert array[0, 0] == 0
        options = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 60}
        for kind in (array, shardtensor.io.open(array.path, array.variable)):
            rows = list(torch.utils.data.DataLoader(Rows(kind), None, **options))
            assert torch.equal(torch.stack(rows), torch.from_numpy(values))
        assert torch.equal(array[...], torch.from_numpy(values))


def damaged(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@ranks(2)
@of_each_reader
def test_damaged_chunks_are_errors_that_say_where(mesh, tmp_path, reader):
    """Of one kind, whoever reads and whatever is wrong."""
    cases = [
        (2, {"compressors": numcodecs.Zstd()}, lambda data: data[:-3]),
        (2, {"compressors": None}, lambda data: data + b"abc"),
        *((2, {"compressors": c}, lambda data: data[:-3])
          for c in (numcodecs.Zlib(), numcodecs.GZip(), numcodecs.BZ2())),
        (3, {}, lambda data: data[:-3]),
        (3, {"compressors": None}, lambda data: data[:-3]),
        (3, {"compressors": codecs.GzipCodec()}, lambda data: data[:-3]),
        (3, {"compressors": codecs.Crc32cCodec()}, damaged),
        (3, {"compressors": codecs.ZstdCodec(checksum=True)}, damaged),
    ]  # fmt: skip
    values = files.numbers(40, 30)
    for number, (version, options, damage) in enumerate(cases):
        path = tmp_path / f"{dist.get_rank()}-{number}.zarr"
        group = zarr.open_group(path, mode="w", zarr_format=version)
        made = group.create_array(
            "t", shape=(40, 30), chunks=(3, 4), dtype="f4", **options
        )
        made[:] = values
        chunk = path / "t" / ("c/13/2" if version == 3 else "13.2")  # of rank 1's rows
        chunk.write_bytes(damage(chunk.read_bytes()))
        failing = pytest.raises(OSError, match=f"1-{number}.zarr variable t")
        with files.read_by(reader), failing as error:
            shardtensor.io.open(path, "t").read(..., mesh, [Shard(0)])
        said = f"cannot read {tmp_path}/1-{number}.zarr variable t[20:40, 0:30]: "
        assert f"shardtensor.io: {said}" in str(error.value), options
        assert str(error.value).endswith("(on mesh rank 1)")
