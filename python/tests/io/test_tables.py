"""Edge lists and other tables: text, .npy, HDF5 and Zarr, each rank its rows."""

import os

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from ranks import assert_close, partitions, ranks, shard
from torch.distributed.tensor import Shard

import shardtensor

PRELOAD = ("shardtensor.io", "h5py", "zarr")


def edges(count=50, nodes=20):
    return np.random.default_rng(0).integers(0, nodes, (count, 2))


def write_text(path, values, separator, head=()):
    rows = [separator.join(map(repr, row)) for row in values.tolist()]
    path.write_text("\n".join([*head, *rows]))


TEXTS = {
    "csv": (".csv", ",", ["source,target"]),
    "space": (".txt", " ", ["# nodes 20", "", "% more"]),
    "tabs": (".tsv", "\t", ["index\ttarget"]),
    "edges": (".edges", ", ", []),
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("kind", TEXTS)
def test_rows_of_text(mesh, kind, tmp_path, monkeypatch):
    from shardtensor.io.sources import lines

    monkeypatch.setattr(lines, "BLOCK", 40)
    ending, separator, head = TEXTS[kind]
    for values, dtype in ((edges(), torch.int64), (edges() / 8, torch.float64)):
        path = tmp_path / f"a{values.dtype}{ending}"
        if dist.get_rank() == 0:
            write_text(path, values, separator, head)
        dist.barrier()
        array = shardtensor.io.open(path)
        for sizes in partitions(len(values), mesh.size(), repeated=False):
            x = array.read(..., mesh, [Shard(0)], sizes={0: sizes})
            assert x.dtype == dtype
            assert_close(x, torch.from_numpy(values))
        assert_close(array.read((slice(3, 40, 4), 1), mesh, [Shard(0)]),
                     torch.from_numpy(values[3:40:4, 1]))  # fmt: skip
        alone = shardtensor.io.open(path)
        assert torch.equal(alone[5:9], torch.from_numpy(values[5:9]))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(
    "text",
    [
        "1.5,-2e-3\r\nnan,inf\r\n+7,0.1\r\n",
        "1,2\n3,4\n9223372036854775807,-9223372036854775808\n",
        "# a head\n1,2 # first\n3,4# 5,6\n#7,8\n9,10\t#\n",
    ],
)
def test_numbers_are_those_of_numpy(text, encoding, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(text, encoding)
    found = shardtensor.io.open(path)[...]
    kind = found.numpy().dtype
    expected = np.loadtxt(path, kind, delimiter=",", encoding=encoding)
    torch.testing.assert_close(found, torch.from_numpy(expected), equal_nan=True)


NAN, INF = np.nan, np.inf
FIELDS = {
    "a,b,c\n1,,3\n,5,6\n7,8,\n,,\n": (
        [[1, NAN, 3], [NAN, 5, 6], [7, 8, NAN], [NAN] * 3]
    ),
    "1;2.5; \n;;3\r\n ;nan;\t": [[1, 2.5, NAN], [NAN, NAN, 3], [NAN] * 3],
    ",a,b\n0,1, 2\n1,, 4\n": [[0, 1, 2], [1, NAN, 4]],
    "\n# 1,,2\n%,,\n3 4,,5\n, 6, ,7 # 8\n": [[3, 4, NAN, 5], [NAN, 6, NAN, 7]],
    "1,2\n3\t, 4\n": [[1, 2], [3, 4]],
    "INF,1\n2,-NaN\n": [[INF, 1], [2, NAN]],
    "nAn,1\n2,Infinity\n": [[NAN, 1], [2, INF]],
    "infinity,-inf\nNAN,NaN\n": [[INF, -INF], [NAN, NAN]],
    "-Nan,1\n,\n": [[NAN, 1], [NAN, NAN]],
    "+INF,\n2,3\n": [[INF, NAN], [2, 3]],
    "inflow,nano\n1,2\n": [[1, 2]],
}


@ranks(1, 2, 3)
def test_empty_fields_and_names_of_numbers(mesh, tmp_path, monkeypatch):
    from shardtensor.io.sources import lines

    monkeypatch.setattr(lines, "BLOCK", 5)
    of_tabs = {"a\tb\n1\t\n\t2\n 3 \t4\n": [[1, NAN], [NAN, 2], [3, 4]]}
    of_space = {"1\t\t2\n3 \t4\n": [[1, 2], [3, 4]]}
    for ending, texts in (("csv", FIELDS), ("tsv", of_tabs), ("txt", of_space)):
        for number, (text, rows) in enumerate(texts.items()):
            path = tmp_path / f"{number}.{ending}"
            if dist.get_rank() == 0:
                path.write_bytes(text.encode())
            dist.barrier()
            array = shardtensor.io.open(path)
            is_whole = np.isfinite(rows).all()
            assert array.dtype == (torch.int64 if is_whole else torch.float64)
            x = array.read(..., mesh, [Shard(0)])
            assert_close(x, torch.tensor(rows, dtype=array.dtype))


@ranks(2, 3)
def test_an_edge_list_becomes_a_graph(mesh, tmp_path):
    """Of every format; no rank has more than its part."""
    values = edges()
    if dist.get_rank() == 0:
        write_text(tmp_path / "a.csv", values, ",")
        np.save(tmp_path / "a.npy", values.T)
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["edges"] = values.T
        store = zarr.create_array(
            tmp_path / "a.zarr", shape=(2, 50), chunks=(2, 7), dtype="i8"
        )
        store[:] = values.T
    dist.barrier()
    read = {
        name: shardtensor.io.open(tmp_path / name).read(..., mesh, [Shard(1)])
        for name in ("a.npy", "a.h5", "a.zarr")
    }
    read["a.csv"] = shardtensor.io.open(tmp_path / "a.csv").read(
        ..., mesh, [Shard(0)]
    ).t()  # fmt: skip
    torch.manual_seed(0)
    x = torch.randn(20, 3, dtype=torch.float64)
    whole = torch.from_numpy(values.T).to(x.device)
    expected = torch.zeros_like(x).index_add(0, whole[1], x[whole[0]])
    for edge_index in read.values():
        assert_close(edge_index, whole)
        assert edge_index.to_local().shape[1] < 50
        nodes = shard(x, mesh, [Shard(0)])
        source, target = edge_index
        sums = torch.zeros_like(nodes).index_add(0, target, nodes[source])
        assert_close(sums, expected)


@ranks(1, 2, 4)
def test_a_rank_counts_and_reads_its_share(mesh, tmp_path, monkeypatch):
    from mesh_files import bytes_of

    from shardtensor.io.sources import lines

    monkeypatch.setattr(lines, "BLOCK", 10_000)
    path = tmp_path / "a.csv"
    if dist.get_rank() == 0:
        write_text(path, edges(60_000, 10**6), ",")
    dist.barrier()
    array, size = shardtensor.io.open(path), os.path.getsize(path)
    opened, _ = bytes_of(lambda: array._agree_to_open(mesh))
    read, x = bytes_of(lambda: array.read(..., mesh, [Shard(0)]))
    few = 60_000
    for share in (opened, read):
        assert 0.98 * size / mesh.size() <= share <= 1.04 * size / mesh.size() + few
    assert x.shape == (60_000, 2)


@ranks(2)
def test_tables_that_are_none_are_an_error_on_both_ranks(mesh, tmp_path):
    for text, message in (
        ("1 2\n3\n4 5\n", "rows of 1 and of 2 numbers"),
        ("a b\n", "no row of numbers"),
        ("1 2\nsix seven\n3 4\n", "a line after the first is no row of numbers"),
        ("a,b\nm,s\n3,4\n", "a line after the first is no row of numbers"),
        ("NA,1\n2,3\n", "NA"),
        ("1,2\n,\n,b\n", "a line after the first is no row of numbers"),
        ("1,2\n3,4,\n", "rows of 2 and of 3 numbers"),
        ("1 2\n3 4x\n", "4x"),
        ("1.5 2\n3 -\n", "-"),
        (
            "1 2\n3 9223372036854775808",
            "9223372036854775808 .* int64, in the line '3 92",
        ),
        ("-9223372036854775809 2", "-9223372036854775809 is beyond int64"),
    ):
        path = tmp_path / "a.txt"
        if dist.get_rank() == 0:
            path.write_text(text)
        dist.barrier()
        with pytest.raises(ValueError, match=message) as caught:
            shardtensor.io.open(path).read(..., mesh, [Shard(0)])
        texts = [None] * 2
        dist.all_gather_object(texts, str(caught.value))
        assert texts[0] == texts[1] and str(path) in texts[0], texts
        dist.barrier()
    with pytest.raises(ValueError, match="a table has no variables"):
        shardtensor.io.open(path, "x").read(..., mesh, [Shard(0)])
