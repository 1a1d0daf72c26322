"""Dataset, DataLoader and statistics: samples x domain."""

import files
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.io import DataLoader, Dataset, moments
from shardtensor.io import statistics as statistics_of

PRELOAD = ("shardtensor.io", "files")

VALUES = files.numbers(12, 7, 4)


def dataset(domain, folder, **options):
    path = folder / f"{dist.get_rank()}.npy"
    np.save(path, VALUES)
    array = shardtensor.io.open(path)
    return Dataset({"x": array, "y": (array, 2)}, domain, [Shard(1)], **options)


@ranks(1, 2, 3)
def test_samples_are_cut_over_the_domain(mesh, tmp_path):
    data, whole = dataset(mesh, tmp_path), torch.tensor(VALUES)
    assert len(data) == 10
    assert_close(data[3]["x"], whole[3:4])
    assert_close(data[-1]["y"], whole[11:12])
    for samples in ([0], [4, 6, 8], [5, 1, 1]):
        batch = data.batch(samples)
        assert_close(batch["x"], whole[samples])
        assert_close(batch["y"], whole[[i + 2 for i in samples]])
    doubled = dataset(mesh, tmp_path, transform=lambda batch: batch["x"] * 2)
    assert_close(doubled[1], whole[1:2] * 2)
    sizes = {1: [7] + [0] * (mesh.size() - 1)}
    assert dataset(mesh, tmp_path, sizes=sizes)[0]["x"]._spec.sizes() == sizes
    with pytest.raises(IndexError, match="sample 10 of 10"):
        data[10]
    with pytest.raises(ValueError, match="not cut along its samples"):
        Dataset({"x": data._arrays["x"]}, mesh, [Shard(0)])


def seen(loader, mesh):
    """The samples of each batch, as the first element of each tells."""
    found = []
    for batch in loader:
        first = batch["x"].full_tensor()[:, 0, 0]
        found.append((first / VALUES[0].size).long().tolist())
    return found


@ranks(2)
def test_samples_are_drawn_whatever_the_default_device(mesh, tmp_path):
    data = dataset(mesh, tmp_path)
    expected = seen(DataLoader(data, 2, shuffle=True, seed=3), mesh)
    with torch.device("meta"):
        loader = DataLoader(data, 2, shuffle=True, seed=3)
        batches = [batch["x"] for batch in loader]
    found = [(x.full_tensor()[:, 0, 0] / VALUES[0].size).long() for x in batches]
    assert [x.tolist() for x in found] == expected


@ranks(2)
def test_all_that_a_batch_needs_is_asked_for_before_any_is_awaited(mesh, tmp_path):
    path = tmp_path / f"{dist.get_rank()}.npy"
    np.save(path, VALUES)
    array = shardtensor.io.open([path, path])
    data = Dataset({"x": array, "y": (array, 2)}, mesh, [Shard(1)])
    for part in array._source._sources:
        part.read = lambda box, kept=part.read: said.append("awaited") or kept(box)
        part.begin = lambda box, kept=part.begin: said.append("asked") or kept(box)
    said = []
    assert_close(data.batch([11, 5])["y"], torch.tensor(VALUES[[1, 7]]))
    assert said == ["asked"] * 4 + ["awaited"] * 4
    said.clear()
    assert len(array[10:14]) == 4 and said == ["asked"] * 2 + ["awaited"] * 2


@ranks(1, 2)
def test_worker_processes_are_no_ranks(mesh, tmp_path):
    data = dataset(mesh, tmp_path)
    first = next(iter(torch.utils.data.DataLoader(data, batch_size=None)))
    assert_close(first["x"], torch.tensor(VALUES[:1]))
    workers = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1)
    with pytest.raises(RuntimeError, match="expected num_workers=0, or shardtensor.io"):
        next(iter(workers))


@ranks("2x2")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_data_ranks_get_different_samples_in_one_order(mesh, tmp_path, prefetch):
    data = dataset(mesh["domain_w"], tmp_path)

    def loader():
        return DataLoader(
            data, 2, mesh["domain_h"], shuffle=True, seed=3, prefetch=prefetch
        )

    one = loader()
    epochs = [seen(one, mesh) for _ in range(3)]
    again = loader()
    assert epochs == [seen(again, mesh) for _ in range(3)] and again.epoch == 3
    assert epochs[0] != epochs[1] and all(
        len(epoch) == len(one) == 2 for epoch in epochs
    )
    everyone = [None] * 4
    dist.all_gather_object(everyone, epochs)
    assert everyone[0] == everyone[1] and everyone[2] == everyone[3]
    for first, second in zip(everyone[0], everyone[2], strict=True):
        both = sum(first + second, [])
        assert len(set(both)) == len(both) == 8


@ranks("2x2")
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_state_goes_on_in_the_middle_of_an_epoch(mesh, tmp_path, prefetch):
    data = dataset(mesh["domain_w"], tmp_path)
    options = {"shuffle": True, "prefetch": prefetch}
    loader = DataLoader(data, 1, mesh["domain_h"], **options)
    expected = [seen(loader, mesh) for _ in range(2)]
    loader = DataLoader(data, 1, mesh["domain_h"], **options)
    steps = iter(loader)
    for _ in range(3):
        next(steps)
    state = loader.state_dict()
    assert state == {"epoch": 0, "samples": 6, "seed": 0}
    steps.close()
    assert len(seen(loader, mesh)) == 5  # a new pass begins again
    other = DataLoader(data, 1, mesh["domain_h"], **options)
    other.load_state_dict(state)
    assert seen(other, mesh) == expected[0][3:] and seen(other, mesh) == expected[1]
    whole = DataLoader(data, 2, **options)  # the same samples on other ranks
    whole.load_state_dict(state)
    for batch, mine in zip(seen(whole, mesh), expected[0][3:], strict=True):
        assert batch[mesh.get_local_rank(0)] == mine[0]
    odd = DataLoader(data, 4, **options)
    with pytest.raises(ValueError, match="6 samples, which are no whole number"):
        odd.load_state_dict(state)


@ranks(2)
def test_pinned_memory(mesh, tmp_path):
    data = dataset(mesh, tmp_path)
    pinned, rows = [], [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]

    def pin(tensor):
        pinned.append(tensor.shape)
        return tensor + 2 * VALUES[0].size  # what is seen must come from here

    def fail(tensor):
        if dist.get_rank() == 1:
            raise RuntimeError("no memory to pin")
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", pin)
        patch.setattr(torch.accelerator, "is_available", lambda: False)
        loader = DataLoader(data, 5, pin_memory=True)
        assert seen(loader, mesh) == rows and not pinned
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        assert seen(DataLoader(data, 5), mesh) == rows and not pinned
        loader = DataLoader(data, 5, pin_memory=True)
        assert seen(loader, mesh) == [[i + 2 for i in each] for each in rows]
        mine = data[0]["x"].to_local().shape[1]
        assert pinned == [(5, mine, 4)] * 4  # of x and y
        patch.setattr(torch.Tensor, "pin_memory", fail)
        with pytest.raises(RuntimeError, match="no memory to pin .on mesh rank 1"):
            next(iter(loader))


@ranks(2)
def test_what_a_rank_cannot_read_is_everyones_error(mesh, tmp_path):
    data = dataset(mesh, tmp_path)
    loader = DataLoader(data, 1, prefetch=2)
    steps = iter(loader)
    next(steps)
    array, _ = data._arrays["x"]
    if dist.get_rank() == 1:
        array._source.read = None  # as if the disk were gone
    with pytest.raises(
        Exception, match=r"cannot read .*1.npy.*on mesh rank 1"
    ) as error:
        for _ in steps:
            pass
    assert "[" in str(error.value)
    with pytest.raises(ValueError, match="10 samples are no batch of 11"):
        DataLoader(data, 11)
    with pytest.raises(ValueError, match="a batch_size of 1 or more"):
        DataLoader(data, 0)


# ---- statistics -------------------------------------------------------------


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("kind", ["npy", "zarr3", "netcdf"])
def test_statistics_in_one_pass(mesh, tmp_path, kind):
    values = 1e6 + np.random.default_rng(0).random((9, 3, 11)).astype("float64")
    values[2, 1, :4] = np.nan
    values[:, 2] = np.nan
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    array = shardtensor.io.open(*files.WRITERS[kind](folder, values))
    kept, moments.BLOCK = moments.BLOCK, 50  # several blocks
    try:
        for keep, index in (
            ((1,), ...),
            ((), slice(1, 8, 2)),
            ((0, -1), (..., slice(2, 5))),
        ):
            found = statistics_of(array, mesh, keep=keep, index=index)
            chosen = values[index]
            over = [d for d in range(3) if d not in [k % 3 for k in keep]]
            check(found, torch.tensor(chosen), over)
    finally:
        moments.BLOCK = kept
    with pytest.raises(ValueError, match="a dim that is not kept"):
        statistics_of(array, mesh, keep=(0, 1, 2))
    with pytest.raises(IndexError, match="dim 3 of an array of 3 dims"):
        statistics_of(array, mesh, keep=(3,))


@ranks(1, 2)
def test_statistics_of_packed_numbers_are_those_of_float64(mesh, tmp_path):
    numbers = torch.tensor([0, 1, 2, 100, 250], dtype=torch.float64)
    path = tmp_path / "a.zarr"
    told = {"scale_factor": 1.0, "add_offset": 1577836800.0}
    shardtensor.io.create(path, "t", (5,), torch.int16, mesh, attributes=told)
    x = shard(numbers + told["add_offset"], mesh, [Shard(0)])
    shardtensor.io.write(path, x, "t", index=...)
    dist.barrier()
    assert shardtensor.io.open(path, "t", decode=False)[...].tolist() == [
        0, 1, 2, 100, 250
    ]  # fmt: skip
    for dtype in (None, torch.float32, torch.float64):
        found = statistics_of(shardtensor.io.open(path, "t", dtype=dtype), mesh)
        assert found.mean == 1577836800 + 70.6 and found.min == 1577836800
        torch.testing.assert_close(found.std.cpu(), numbers.std(correction=0).cpu())
    whole = statistics_of(shardtensor.io.open(path, "t", dtype=torch.int64), mesh)
    assert whole.max == 1577837050


@ranks(1, 2, 3, 4)
def test_infinities_are_those_of_one_device(mesh, tmp_path):
    """Wherever they are cut, on ranks without rows, too."""
    inf, path = torch.inf, tmp_path / f"{dist.get_rank()}.npy"
    for values in ([1, inf, 2], [inf, inf, 1, inf], [-inf, 1], [-inf, 2, inf], [inf]):
        np.save(path, np.array([values, [7] * len(values)]))
        found = statistics_of(shardtensor.io.open(path), mesh, keep=(0,))
        x = torch.tensor([values, [7] * len(values)], dtype=torch.float64)
        for mine, expected in (
            (found.mean, x.mean(1)),
            (found.std, x.std(1, correction=0)),
            (found.min, x.amin(1)),
            (found.max, x.amax(1)),
        ):
            torch.testing.assert_close(mine, expected, equal_nan=True)


@ranks(2, 3)
def test_a_file_without_chunks_is_shared_evenly(mesh, tmp_path):
    """Whatever its dims; no rank reads it all."""
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    np.save(folder / "a.npy", VALUES)
    np.save(folder / "b.npy", VALUES)
    for path, rows in ((folder / "a.npy", 12), (str(folder / "?.npy"), 24)):
        array, read = shardtensor.io.open(path), []
        source = array._source

        def note(box, wide, kept=source.begin_values, read=read):
            read.append(box)
            return kept(box, wide)

        source.begin_values = note
        assert statistics_of(array, mesh).count == rows * 28
        assert sum(part.stop - part.start for part, *_ in read) == rows / mesh.size()
        assert max(array.chunk_sizes(0, 5)) <= -(-rows // 5)
        cut = array.read(..., mesh, [Shard(1)], sizes="chunks")
        assert max(cut._spec.sizes()[1]) <= 4


def check(found, x, over):
    there = ~x.isnan()
    count = there.sum(over)
    close = torch.testing.assert_close
    close(found.count, count)
    close(found.mean, x.nanmean(over), equal_nan=True, rtol=1e-14, atol=0)
    spread = (x - x.nanmean(over, keepdim=True)).square().nanmean(over).sqrt()
    close(found.std, spread, equal_nan=True, rtol=1e-9, atol=1e-12)
    low = torch.where(there, x, torch.inf).amin(over)
    high = torch.where(there, x, -torch.inf).amax(over)
    nothing = torch.where(count == 0, torch.nan, 0.0)
    close(found.min, low + nothing, equal_nan=True)
    close(found.max, high + nothing, equal_nan=True)
