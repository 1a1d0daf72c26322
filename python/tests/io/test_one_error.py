"""What one rank is told wrongly is one error on all ranks, and nobody waits."""

import functools

import files
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks, shard
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor import io

PRELOAD = ("shardtensor.io", "files")


class Sweep:
    """Each call with what is right on all ranks but the last."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.is_wrong = mesh.get_rank() == mesh.size() - 1

    def __call__(self, call, right, wrong, text):
        for each in wrong:
            said = "nothing"
            try:
                call(each if self.is_wrong else right)
            except Exception as error:  # noqa: BLE001
                # Files are named as each rank has them.
                named = "told different things" in str(error)
                said = type(error).__name__, named or str(error)
                assert text in str(error), (each, error)
            told = [None] * self.mesh.size()
            dist.all_gather_object(told, said)
            assert told[0] != "nothing" and told == told[:1] * len(told), (each, told)


DIFFERENT = "ranks were told different things"


def stored(folder, mesh):
    path = folder / "a.npy"
    if mesh.get_rank() == 0:
        np.save(path, files.numbers(6, 4))
        np.save(folder / "complex.npy", np.zeros((6, 4), "c8"))
        np.save(folder / "other.npy", files.numbers(6, 5))
        (folder / "a.csv").write_text("1 2\n3 4\n")
        (folder / "rows.csv").write_text("1 2\n3 4\nwords\n")
    dist.barrier()
    return path


@ranks(2, 3, timeout=60)
def test_open(mesh, tmp_path):
    path, sweep = stored(tmp_path, mesh), Sweep(mesh)
    paths = (None, 5, b"a.npy", {}, [b"a.npy"], [None], iter([]))
    line = "is another one on some rank"
    for right, of_rows in ((path, DIFFERENT), (tmp_path / "a.csv", line)):
        for call in (
            lambda path: io.open(path, mesh=mesh),
            lambda path: io.open(path).read(..., mesh, [Shard(0)]),
            lambda path: io.Dataset({"x": io.open(path)}, mesh, [Shard(1)]),
            lambda path: io.statistics(io.open(path), mesh),
        ):
            sweep(call, right, paths, "expected a path or a list of paths, got")
            sweep(call, right, [[], "*.none"], "no file has such a name")
            sweep(call, right, [tmp_path / "no.npy", tmp_path / "no.csv"], "No such")
            sweep(call, right, [tmp_path / "rows.csv"], of_rows)
            sweep(call, right, [tmp_path / "other.npy"], DIFFERENT)
        for variable, text in ((3, "the name of a variable"), ("t", "no variables")):
            sweep(lambda v, p=right: io.open(p, v, mesh=mesh), None, [variable], text)


@ranks(2, 3, timeout=60)
def test_read(mesh, tmp_path):
    path, sweep = stored(tmp_path, mesh), Sweep(mesh)

    def read(**options):
        told = {"index": ..., "mesh": mesh, "placements": [Shard(0)], **options}
        return io.open(path).read(**told)

    array = np.array([0, 1])
    for index, text in (
        (7, "index 7 is out of range"), ("t", "got 't'"), (array, "in an index, got"),
        (torch.tensor([0, 1]), "in an index, got"), ([0], "in an index, got [0]"),
        (True, "got True"), (1.0, "got 1.0"), ((0, 0, 0), "3 indices"), (0, DIFFERENT),
        (slice(1, 3), DIFFERENT), ((..., ...), "one Ellipsis"),
    ):  # fmt: skip
        sweep(lambda i: read(index=i), ..., [index], text)
    for placements, text in (
        ([Shard(1)], DIFFERENT), ([Replicate()], DIFFERENT), ([Shard(5)], "dim=5"),
        ([Partial()], "expected Shard and Replicate"), (3, "got 3"), (["x"], "'x'"),
        ([Shard(0)] * 2, "expected one placement for each"),
    ):  # fmt: skip
        sweep(lambda p: read(placements=p), [Shard(0)], [placements], text)
    whole = {0: [6] + [0] * (mesh.size() - 1)}
    for sizes, text in (
        (whole, DIFFERENT), ("even", "'even'"), ({0: [9] * 9}, "make_spec"),
        ({5: [1]}, "5"), (7, ""), ({0: ["a"] * mesh.size()}, ""),
    ):  # fmt: skip
        sweep(lambda s: read(sizes=s), None, [sizes], text)
    for halo, text in (
        (None, DIFFERENT), (2, DIFFERENT), (-1, "halo: -1"), ({7: 1}, "halo: 1 rows"),
        ("x", "halo: expected"), ((1, 2, 3), "halo: expected"), (1.5, "halo: expected"),
        ((1, None), "halo: expected"), ({"x": 1}, "halo: expected"),
    ):  # fmt: skip
        sweep(lambda h: read(halo=h), 1, [halo], text)
    sweep(lambda d: io.open(path, dtype=d, mesh=mesh), None, [torch.half], DIFFERENT)


@ranks(2, 3, timeout=60)
def test_write(mesh, tmp_path):
    path, sweep = stored(tmp_path, mesh), Sweep(mesh)
    x = shard(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])
    new = tmp_path / "new.zarr"
    paths = (None, 5, b"a.npy", [path])
    for index in (None, ...):
        for wrong, text in (
            (paths, "expected a path, got"),
            (["a.foo"], "unknown kind"),
        ):
            sweep(lambda p, i=index: io.write(p, x, index=i), path, wrong, text)
    sweep(lambda i: io.write(path, x, index=i), ..., [None], "")
    sweep(lambda i: io.write(path, x, index=i), ..., [0, slice(1)], "shape (6, 4), not")
    sweep(lambda v: io.write(path, x, v, index=...), None, ["t"], "no variables")
    sweep(lambda o: io.write(path, x, index=..., **o), {}, [{"chunks": 2}], "belong to")
    with pytest.raises(TypeError, match="write: expected a ShardTensor, got Tensor"):
        io.write(path, torch.zeros(2))

    def create(path=new, variable="t", shape=(6, 4), dtype=torch.float32, **options):
        io.create(path, variable, shape, dtype, mesh, **options)

    sweep(lambda p: create(path=p), new, paths, "expected a path, got")
    sweep(lambda s: create(shape=s), (6, 4), [None, 3, (6,), (6, 5)], "")
    sweep(lambda d: create(dtype=d), torch.float32, [torch.half], DIFFERENT)
    sweep(lambda c: create(chunks=c), (2, 4), [3, "ab", (2, 2)], "")


@ranks("2x2", timeout=60)
def test_loaders_of_data_ranks(mesh, tmp_path):
    """What one is told is compared with other data ranks, too."""
    path, sweep = stored(tmp_path, mesh), Sweep(mesh)
    data = io.Dataset({"x": io.open(path)}, mesh["domain_w"], [Shard(1)])
    over = mesh["domain_h"]
    for name, right, wrong, text in (
        ("seed", 0, 2, DIFFERENT), ("shuffle", False, True, DIFFERENT),
        ("batch_size", 1, 2, DIFFERENT), ("batch_size", 1, None, ""),
        ("batch_size", 1, 9, "6 samples are no batch of 9 for each of 2 ranks"),
        ("prefetch", 2, -1, "a prefetch of 0 or more, got 1 and -1"),
    ):  # fmt: skip
        call = functools.partial(io.DataLoader, data, data_mesh=over)
        sweep(lambda x, n=name, f=call: f(**{n: x}), right, [wrong], text)
    shorter = io.Dataset({"x": (io.open(path), 1)}, mesh["domain_w"], [Shard(1)])
    two = functools.partial(io.Dataset, mesh=mesh["domain_w"], placements=[Shard(1)])
    mine = shorter if mesh.get_local_rank(0) else two({"x": io.open(path)})
    with pytest.raises(ValueError, match=DIFFERENT):
        io.DataLoader(mine, 1, over)

    loader, state = io.DataLoader(data, 1, over), {"epoch": 0, "samples": 2, "seed": 0}
    wrong = [{**state, "epoch": 1}, {**state, "samples": 4}, {**state, "seed": 1}]
    sweep(loader.load_state_dict, state, wrong, DIFFERENT)
    sweep(loader.load_state_dict, state, [{**state, "samples": 3}], "3 samples, which")
    sweep(loader.load_state_dict, state, [{}, None], "")
    loader.load_state_dict(state)
    assert len(list(loader)) == 2 and len(loader) == 3


@ranks(2, 3, timeout=60)
def test_samples_and_statistics(mesh, tmp_path):
    path, sweep = stored(tmp_path, mesh), Sweep(mesh)
    x = io.open(path)

    def dataset(arrays, placements=None, **options):
        placements = [Shard(1)] if placements is None else placements
        return io.Dataset(arrays, mesh, placements, **options)

    for arrays, text in (
        (None, ""), ({"x": path}, "expected an Array"), ({"x": (x,)}, "an Array"),
        ({}, "expected one array or more"), ({"y": x}, DIFFERENT), ([x], ""),
        ({"x": (x, 9)}, "shifts of 0 or more"), ({"x": (x, 1)}, DIFFERENT),
        ({"x": x, "y": io.open(tmp_path / "a.csv")}, DIFFERENT),
    ):  # fmt: skip
        sweep(dataset, {"x": x}, [arrays], text)
    for placements, text in (
        ([Shard(0)], "along its samples"), ([Shard(-2)], "along its samples"), (3, ""),
        ([Replicate()], DIFFERENT), ([], "expected one placement"),
    ):  # fmt: skip
        sweep(lambda p: dataset({"x": x}, p), [Shard(1)], [placements], text)
    sweep(lambda s: dataset({"x": x}, sizes=s), None, [{1: [4]}], DIFFERENT)
    data = dataset({"x": x})
    sweep(lambda i: data[i], 0, [77, -7], "of 6")
    sweep(lambda i: data[i], 0, ["x", None, 1.5], "")
    sweep(data.batch, [0, 1], [[1, 0], [0]], DIFFERENT)
    sweep(data.batch, [0, 1], [[], None, 3, [9], [-7], ["x"]], "")
    assert torch.equal(data.batch([-1, 0])["x"].full_tensor().cpu(), x[...][[5, 0]])
    with pytest.raises(ValueError, match="Dataset: a batch of no samples"):
        data.batch([])
    sweep(lambda size: io.DataLoader(data, size), 1, [0, "x", None, 9], "")
    sweep(lambda seed: io.DataLoader(data, seed=seed), 1, [2], DIFFERENT)

    statistics = shardtensor.io.statistics
    sweep(lambda a: statistics(a, mesh), x, [None, path], "expected an Array, got")
    for keep, text in (
        (0, "keep: expected dims, got 0"), ((0, -2), "each dim once"), (("x",), ""),
        ((5,), "dim 5 of an array of 2 dims"), ((0, 1), "not kept"), ((1,), DIFFERENT),
    ):  # fmt: skip
        sweep(lambda k: statistics(x, mesh, keep=k), (), [keep], text)
    sweep(lambda i: statistics(x, mesh, index=i), ..., ["x", 9, 1], "")
    sweep(
        lambda a: statistics(a, mesh), x, [io.open(tmp_path / "complex.npy")],
        "statistics: expected real numbers, got torch.complex64",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"statistics: nothing in shape \[0, 4\]"):
        statistics(x, mesh, index=slice(0))
    nobody = statistics(x, mesh, keep=(0,), index=slice(0))
    assert nobody.count.shape == nobody.mean.shape == (0,)
