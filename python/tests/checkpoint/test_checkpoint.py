"""Checkpoints: written on some ranks, loaded on others, whole or not there."""

import io
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from oracle import Repeated
from ranks import assert_close, from_spec, ranks, run, run_isolated, shard, uneven
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute_dtensor

import shardtensor
from shardtensor import _C, checkpoint
from shardtensor.checkpoint import files
from shardtensor.checkpoint.reading import BLOCK, Item, read_tensor

PRELOAD = ("shardtensor.checkpoint", "torch._inductor.compile_fx")

WHOLE = {
    "rows": torch.arange(33.0).reshape(11, 3),
    "columns": torch.arange(60).reshape(4, 15),
    "repeated": torch.arange(24.0).reshape(12, 2),
    "scalar": torch.tensor(3.5),
    "nothing": torch.empty(0, 4),
    "few": torch.arange(2.0).bfloat16(),
}


def tensors(mesh, fill=True, flip=False):
    """Cut in every way; `flip` reverses uneven cuts."""
    first, last = Shard(0), Shard(1)
    if mesh.ndim == 2:
        spread = {"rows": [Shard(0), Shard(1)], "columns": [Shard(1), Shard(1)]}
    else:
        spread = {"rows": [Shard(0)], "columns": [Shard(1)]}
    other = [Replicate()] * (mesh.ndim - 1)
    step = -1 if flip else 1
    cuts = {
        "rows": {0: uneven(11, mesh.size(0))[::step]},
        "columns": {1: [0, *uneven(15, mesh.size() - 1)]} if mesh.size() > 1 else {},
        "repeated": {0: Repeated(uneven(4, mesh.size(0))[::step], 3)},
    }
    result = {}
    for name, whole in WHOLE.items():
        placements = spread.get(name) or [first if whole.dim() else Replicate(), *other]
        if name == "few" and flip:
            placements = [*other, first]
        value = whole if fill else torch.zeros_like(whole)
        result[name] = shard(value, mesh, placements, cuts.get(name))
    dtensor = WHOLE["rows"] if fill else torch.zeros(11, 3)
    result["dtensor"] = distribute_dtensor(dtensor, mesh, [last, *other])
    result["plain"] = WHOLE["rows"].clone() if fill else torch.zeros(11, 3)
    return result


def save_tensors(mesh, folder):
    checkpoint.save({"fields": tensors(mesh), "epoch": 7}, folder, 3)
    checkpoint.save({"fields": tensors(mesh), "epoch": 8}, folder, 12)


def load_tensors(mesh, folder):
    for flip in (False, True):
        state = {"fields": tensors(mesh, fill=False, flip=flip), "epoch": 0}
        assert checkpoint.load(state, folder) == 12 and state["epoch"] == 8
        for name, whole in WHOLE.items():
            assert_close(state["fields"][name], whole, what=name)
        assert torch.equal(state["fields"]["dtensor"].full_tensor(), WHOLE["rows"])
        assert torch.equal(state["fields"]["plain"], WHOLE["rows"])


@pytest.mark.parametrize("to", [1, 2, 3, 6, "2x2"])
@pytest.mark.parametrize("saved_on", [4, "2x2"])
def test_any_number_of_ranks_loads_it(tmp_path_factory, saved_on, to):
    folder = _saved(tmp_path_factory, saved_on)
    assert checkpoint.steps(folder) == [3, 12]
    run(to, load_tensors, folder)


_folders = {}


def _saved(factory, on):
    if on not in _folders:
        _folders[on] = factory.mktemp("saved")
        run(on, save_tensors, _folders[on])
    return _folders[on]


@ranks(2)
def test_dcp_itself_saves_and_loads(mesh, tmp_path):
    """No file of ours is needed to read a checkpoint, nor to write one."""
    dcp.save(tensors(mesh), checkpoint_id=tmp_path / "theirs")
    state = tensors(mesh, fill=False, flip=True)
    dcp.load(state, checkpoint_id=tmp_path / "theirs")
    assert_close(state["rows"], WHOLE["rows"])
    checkpoint.save(tensors(mesh), tmp_path, 1)
    state = tensors(mesh, fill=False)
    dcp.load(state, checkpoint_id=tmp_path / "step_00000001")
    assert_close(state["columns"], WHOLE["columns"])
    beside, rows = {"checkpoint_id": tmp_path / "beside"}, {"rows": state["rows"] * 0}
    with pytest.raises(NotImplementedError, match=r"checkpoint.Stager\(\) for dcp.asy"):
        dcp.async_save(tensors(mesh), **beside)
    dcp.async_save(tensors(mesh), async_stager=checkpoint.Stager(), **beside).result()
    dcp.load(rows, **beside)
    assert_close(rows["rows"], WHOLE["rows"])
    with pytest.raises(ValueError, match="sum: sum is a sum that is still to be made"):
        term = from_spec(torch.ones(3), shardtensor.make_spec(mesh, (3,), [Partial()]))
        checkpoint.save({"sum: sum": term}, tmp_path, 2)


def test_tensors_of_any_kind_are_read_into_their_place(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    long = torch.arange(2.0 * 3 * 300_000).reshape(2, 3, 300_000)  # rows beyond a block
    for x in (
        base, base.t(), base[1:3], base.bool(), base.bfloat16(), base[:0], base.int(),
        base.to(torch.complex64), base.to(torch.uint16), base.to(torch.float8_e5m2),
        torch.tensor(2.5), long, long.to(torch.float64),
    ):  # fmt: skip
        for lead in (0, 3):  # an item begins anywhere
            file = io.BytesIO(b"." * lead)
            file.seek(lead)
            torch.save(x, file)
            data = file.getvalue()
            for begins, ends in boxes(x):
                found = read_back(tmp_path, data, lead, begins, ends, x.dtype)
                box = x[tuple(map(slice, begins, ends))]
                wide = torch.complex128 if x.is_complex() else torch.float64
                assert torch.equal(found.to(wide), box.to(wide))
    with pytest.raises(RuntimeError):
        read_back(tmp_path, bytes(len(data)), 0, (0,), (1,), x.dtype)


def boxes(x):
    """All of it, and some of each dim."""
    yield (0,) * x.dim(), tuple(x.shape)
    if x.numel() > 1:
        yield (1,) * x.dim(), tuple(x.shape)
        yield (0, *(1 for _ in x.shape[1:])), (2, *(n - 1 for n in x.shape[1:]))


def read_back(folder, data, lead, begins, ends, dtype):
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    (folder / "file").write_bytes(data)
    with open(folder / "file", "rb", buffering=0) as file:
        for target in (torch.empty(lengths, dtype=dtype), strided(lengths, dtype)):
            read_tensor(Item(file, lead, len(data) - lead), target, begins, lengths)
    other = torch.empty(lengths, dtype=torch.float64)
    if not dtype.is_complex:
        with open(folder / "file", "rb", buffering=0) as file:
            read_tensor(Item(file, lead, len(data) - lead), other, begins, lengths)
        assert torch.equal(other, target.double())
    return target


def strided(lengths, dtype):
    return torch.empty([*lengths, 2], dtype=dtype)[..., 1]


def test_a_file_cut_short_while_it_is_read_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(bytes(3 * BLOCK))
    with open(tmp_path / "file", "rb", buffering=0) as file:
        item = Item(file, 5, 3 * BLOCK - 5)
        item.crc32c()
        os.truncate(tmp_path / "file", BLOCK)
        with pytest.raises(OSError, match=f"it ends after {BLOCK - 5} of "):
            item.crc32c()
        with pytest.raises(OSError, match="it ends after"):
            item.fill(memoryview(bytearray(9)), BLOCK)


def test_checksums_are_castagnolis():
    assert _C.crc32c(b"123456789") == 0xE3069283
    data = bytes(range(256)) * 3
    for cut in (0, 1, 7, 8, 500, 768):
        assert _C.crc32c(data[cut:], _C.crc32c(data[:cut])) == _C.crc32c(data)


# ---- training ---------------------------------------------------------------


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.PReLU(4))


def train(model, optimizer, x, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def wrapped(mesh, how):
    """A model whose samples are cut over the mesh."""
    model = net()
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif how == "fsdp":
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_and_save(mesh, how, folder):
    model, optimizer = wrapped(mesh, how)
    x = shard(torch.randn(2, 3, 8, 5), mesh, [Shard(2)])
    with shardtensor.gradient_policy("coalesced" if how == "plain" else "deferred"):
        train(model, optimizer, x, 2)
        state = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": _schedule(optimizer),
        }
        future = checkpoint.async_save(state, folder, 2, keep=1)
        train(model, optimizer, x, 2)  # beside it: what is saved is a copy
        future.result()
    return full(model)


def load_and_train(mesh, how, folder):
    model, optimizer = wrapped(mesh, how)
    scheduler = _schedule(optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    assert checkpoint.load(state, folder) == 2 and state["model"] is model
    assert scheduler.last_epoch == 5
    x = shard(torch.randn(2, 3, 8, 5), mesh, [Shard(2)])
    with shardtensor.gradient_policy("coalesced" if how == "plain" else "deferred"):
        train(model, optimizer, x, 2)
    return full(model)


def _schedule(optimizer):
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    scheduler.last_epoch = 5
    return scheduler


def full(model):
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).tolist()
        for p in model.parameters()
    ]


@pytest.mark.parametrize("to", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("how", ["plain", "ddp", "fsdp"])
def test_training_goes_on_in_another_wrapper_on_other_ranks(tmp_path, how, to):
    expected = run(2, train_and_save, how, tmp_path)[0]
    for found in run(3, load_and_train, to, tmp_path):
        for p, q in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(p), torch.tensor(q))


# ---- one file -----------------------------------------------------------------


@ranks(1, 2, "2x2")
def test_whole_tensors_stream_into_one_file(mesh, tmp_path):
    state = {"fields": tensors(mesh), "model": net().state_dict(), "epoch": 3}
    for name, whole in checkpoint.full_tensors(state["fields"]):
        assert torch.equal(whole, WHOLE.get(name, WHOLE["rows"])), name
    path = tmp_path / "all.safetensors"
    checkpoint.export(state, path)
    dist.barrier()
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    assert size % 8 == 0 and "model.1.running_mean" in header
    for name, whole in WHOLE.items():
        told = header[f"fields.{name}"]
        begin, end = told["data_offsets"]
        assert told["shape"] == list(whole.shape)
        found = torch.frombuffer(bytearray(body[begin:end] or b" "), dtype=torch.uint8)
        expected = whole.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(found[: expected.numel()], expected), name
    assert max(told["data_offsets"][1] for told in header.values()) == len(body)
    with pytest.raises(OSError, match="cannot write .*no/a: .*No such file"):
        checkpoint.export(state["fields"], tmp_path / "no" / "a")
    with pytest.raises(TypeError, match="x is of torch.complex64, which the format"):
        checkpoint.export({"x": torch.zeros(1, dtype=torch.complex64)}, path)


@ranks(2)
def test_a_rank_holds_one_whole_tensor_at_a_time(mesh, tmp_path):
    def export(rows):
        whole = torch.ones(rows, 1 << 20)
        fields = {str(i): shard(whole, mesh, [Shard(0)]) for i in range(4)}
        del whole
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        checkpoint.export(fields, tmp_path / "a.safetensors")
        return resident("VmHWM") - before

    export(2)
    assert 30 < export(8) < 60  # MiB; a tensor has 32


def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


# ---- what goes wrong --------------------------------------------------------


def save_and_die(folder, point, victim=0, save=checkpoint.save):
    """The job is killed at some point of its second save."""
    mesh = init_device_mesh("cpu", (2,))
    x = shard(torch.arange(6.0), mesh, [Shard(0)])
    checkpoint.save({"x": x, "step": 1}, folder, 1)
    calls = {"count": 0}

    def die(frame, event, argument):
        """At the n-th call of a function that a save makes."""
        if event == "call" and "checkpoint" in frame.f_code.co_filename:
            calls["count"] += 1
            if dist.get_rank() == victim and calls["count"] == point:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(die)
    sys.setprofile(die)
    save({"x": x + 1, "step": 2}, folder, 1 if point % 2 else 2)
    sys.setprofile(None)
    threading.setprofile(None)
    return calls["count"]


def save_beside(*args):
    checkpoint.async_save(*args).result()


def load_after(folder):
    mesh = init_device_mesh("cpu", (1,))
    state = {"x": shard(torch.zeros(6), mesh, [Shard(0)]), "step": 0}
    step = checkpoint.load(state, folder)
    assert_close(state["x"], torch.arange(6.0) + state["step"] - 1)
    checkpoint.save(state, folder, 5)  # what was left is in nobody's way
    return step, state["step"]


@pytest.mark.parametrize(
    "victim, save",
    [
        (0, checkpoint.save),
        pytest.param(1, checkpoint.save, marks=pytest.mark.tail),
        pytest.param(0, save_beside, marks=pytest.mark.tail),
        pytest.param(1, save_beside, marks=pytest.mark.tail),
    ],
    ids=["first", "last", "first beside", "last beside"],
)
def test_a_killed_job_leaves_a_checkpoint(tmp_path, victim, save):
    whole = run_isolated(2, save_and_die, tmp_path, 0, victim, save)[victim].value
    assert whole > 100
    seen = set()
    for point in (1, whole // 3, whole // 2, whole * 3 // 4, whole - 9, whole - 2):
        folder = tmp_path / str(point)
        job = (save_and_die, folder, point, victim, save)
        outcomes = run_isolated(2, *job, group_timeout=3.0)
        assert outcomes[victim].kind == "died", outcomes
        (outcome,) = run_isolated(1, load_after, folder)
        assert outcome.kind == "ok", outcome.text
        seen.add(outcome.value[1])
    assert seen == {1, 2} if victim == 0 else seen <= {1, 2}


@ranks(2)
def test_a_missing_or_damaged_file_is_named(mesh, tmp_path):
    x = shard(torch.rand(400, 5), mesh, [Shard(0)])
    checkpoint.save({"x": x}, tmp_path, 0)
    file = tmp_path / "step_00000000" / "__1_0.distcp"

    def text():
        dist.barrier()
        with pytest.raises(OSError) as caught:
            checkpoint.load({"x": x}, tmp_path)
        dist.barrier()
        return str(caught.value)

    def change(data):
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(data)

    data = file.read_bytes()
    middle = len(data) // 2
    change(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    assert f"{file} is damaged: its checksum is not" in text()
    change(data[:-100])
    assert f"{file} is damaged: it ends after" in text()
    if dist.get_rank() == 0:
        file.unlink()
    assert text() == f"checkpoint: {file} is missing (on rank 1)"
    file = file.with_name(".metadata")
    data = file.read_bytes()
    change(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    assert f"{file} is damaged: its checksum is not" in text()
    for part in (data[: len(data) // 2], b""):
        change(part)
        assert f"{file} is damaged: " in text()
    checkpoint.save({"x": x}, tmp_path, 1)
    file = tmp_path / "step_00000001" / ".metadata"
    if dist.get_rank() == 0:
        file.unlink()  # and no older step is loaded in its place
    assert text() == f"checkpoint: {file} is missing"


@ranks(1, 2)
def test_a_removal_that_was_interrupted_leaves_nothing(mesh, tmp_path):
    x = shard(torch.arange(4.0), mesh, [Shard(0)])
    for step in (1, 2, 3):
        checkpoint.save({"x": x + step}, tmp_path, step)
    half = ".metadata", "__0_0.distcp"

    def remove_one_file(path, ignore_errors=False):
        """And then the job is killed."""
        if path.name.endswith(files.WRITING):
            whole(path, ignore_errors)
        for name in half:
            if (Path(path) / name).exists():
                (Path(path) / name).unlink()
                return

    def others(name):
        return [path.name for path in tmp_path.iterdir() if name in path.name]

    whole = files.shutil.rmtree
    for step in (4, 5):
        files.shutil.rmtree = remove_one_file
        try:
            checkpoint.save({"x": x + step}, tmp_path, step, keep=2)
        finally:
            files.shutil.rmtree = whole
        dist.barrier()
        assert checkpoint.steps(tmp_path) == [step - 1, step] and others("removed")
        found = shard(torch.zeros(4), mesh, [Shard(0)])
        assert checkpoint.load({"x": found}, tmp_path) == step
        assert_close(found, torch.arange(4.0) + step)
        dist.barrier()
    checkpoint.save({"x": x}, tmp_path, 6, keep=1)
    dist.barrier()
    assert others("") == ["step_00000006"]


@ranks(1, 2)
def test_what_is_not_there_and_what_does_not_fit(mesh, tmp_path):
    x = shard(torch.zeros(4), mesh, [Shard(0)])
    with pytest.raises(FileNotFoundError, match="no checkpoint in .*there are \\[\\]"):
        checkpoint.load({"x": x}, tmp_path)
    for step in (1, 2, 3):
        checkpoint.save({"x": x}, tmp_path, step, keep=2)
    with pytest.raises(FileNotFoundError, match=r"of step 1 in .*there are \[2, 3\]"):
        checkpoint.load({"x": x}, tmp_path, 1)
    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: y"):
        checkpoint.load({"y": x}, tmp_path)
    with pytest.raises(ValueError, match="Size mismatch .* for x"):
        checkpoint.load({"x": shard(torch.zeros(5), mesh, [Shard(0)])}, tmp_path)
    for arguments in ((-1,), (1, 0)):
        with pytest.raises(ValueError, match="checkpoint: expected"):
            checkpoint.save({}, tmp_path, arguments[0], keep=(*arguments, None)[1])


class Unsaved:
    """Has state_dict() and load_state_dict(), which raise on the last rank."""

    def state_dict(self):
        if dist.get_rank():
            raise AttributeError("no state here")
        return {"n": 1}

    def load_state_dict(self, state):
        raise ArithmeticError(f"no {state} here")


class Unloaded(Unsaved):
    def state_dict(self):
        return {"n": 1}


@ranks(2)
def test_what_is_wrong_on_one_rank_is_one_error_on_all(mesh, tmp_path):
    last = dist.get_rank() == 1
    x = shard(torch.ones(4), mesh, [Shard(0)])
    alone = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    dtype = torch.complex64 if last else torch.float32
    numbers = {"x": x, "z": torch.ones(2, dtype=dtype)}
    save, beside = checkpoint.save, checkpoint.async_save
    save({"x": x, "other": Unloaded()}, tmp_path, 0)
    mine, told = " .on rank 1.$", "were told different things\n"
    for call, kind, text in (
        (lambda: save({"x": x}, tmp_path, -last), ValueError, "got -1" + mine),
        (
            lambda: save({"x": x}, tmp_path, 1, keep=1 - last),
            ValueError,
            "got 0" + mine,
        ),
        (
            lambda: beside({"x": x}, tmp_path, 1, keep=1 - last),
            ValueError,
            "expected to keep 1 or more, got 0" + mine,
        ),
        (
            lambda: save({"x": x, "y": alone if last else 1}, tmp_path, 1),
            ValueError,
            "no module beside the optimizer 'y'.*" + mine,
        ),
        (
            lambda: save({"x": Unsaved()}, tmp_path, 1),
            RuntimeError,
            "no state here" + mine,
        ),
        (
            lambda: beside({"x": Unsaved()}, tmp_path, 1),
            RuntimeError,
            "no state here" + mine,
        ),
        (
            lambda: beside({"x": (n for n in "x") if last else 1}, tmp_path, 1),
            TypeError,
            "cannot pickle 'generator' object" + mine,
        ),
        (lambda: save({"x": x}, tmp_path, 1 + last), ValueError, told + "ranks .0.: "),
        (lambda: save({"x" + "y" * last: x}, tmp_path, 1), ValueError, told),
        (lambda: checkpoint.load({"x": x}, tmp_path, int(last)), ValueError, told),
        (
            lambda: checkpoint.load({"x": x, "other": Unsaved()}, tmp_path),
            RuntimeError,
            "no state here" + mine,
        ),
        (
            lambda: checkpoint.load({"x": x, "other": Unloaded()}, tmp_path),
            RuntimeError,
            "no {'n': 1} here",
        ),
        (
            lambda: checkpoint.export(numbers, tmp_path / "a"),
            TypeError,
            "z is of torch.complex64, .*" + mine,
        ),
        (lambda: checkpoint.export({"x": x[last:]}, tmp_path / "a"), ValueError, told),
    ):
        with pytest.raises(kind, match=text) as caught:
            call()
        texts = [None, None]
        dist.all_gather_object(texts, (caught.typename, str(caught.value)))
        assert texts[0] == texts[1]
    assert checkpoint.steps(tmp_path) == [0]


@ranks(1, 2)
def test_what_was_just_saved_is_kept(mesh, tmp_path):
    """Also by a job that went back to an earlier step."""
    x = shard(torch.zeros(4), mesh, [Shard(0)])
    for step in (10, 20, 30):
        checkpoint.save({"x": x}, tmp_path, step)
    for step, keep, expected in ((5, 3, [5, 20, 30]), (15, 2, [15, 30]), (2, 1, [2])):
        checkpoint.save({"x": x + step}, tmp_path, step, keep=keep)
        dist.barrier()
        assert checkpoint.steps(tmp_path) == expected
        dist.barrier()
    assert checkpoint.load({"x": x}, tmp_path) == 2
    assert_close(x, torch.full((4,), 2.0))


@ranks(1, 2)
def test_saves_beside_the_training_come_one_after_the_other(mesh, tmp_path):
    x = shard(torch.arange(4.0), mesh, [Shard(0)])
    running = [
        checkpoint.async_save({"x": x + step}, tmp_path, step) for step in range(6)
    ]
    for future in running:
        future.result()
    dist.barrier()
    assert checkpoint.steps(tmp_path) == list(range(6))
    for step in range(6):
        assert checkpoint.load({"x": x}, tmp_path, step) == step
        assert_close(x, torch.arange(4.0) + step)


@ranks(1, 2)
def test_a_save_beside_the_training_says_what_went_wrong(mesh, tmp_path):
    x = shard(torch.zeros(4), mesh, [Shard(0)])
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory.* \\(on rank 0\\)"):
        checkpoint.save({"x": x}, tmp_path / "file", 1)
    future = checkpoint.async_save({"x": x}, tmp_path / "file", 1)
    with pytest.raises(OSError, match="Not a directory.* \\(on rank 0\\)"):
        future.result()
    checkpoint.async_save({"x": x}, tmp_path, 1).result()


# ---- torch.save -------------------------------------------------------------


def save_pieces(mesh, folder):
    x = shard(torch.arange(8.0), mesh, [Shard(0)])
    torch.save(x, folder / f"{dist.get_rank()}.pt")


def load_piece_of(mesh, folder, shift):
    rank = (dist.get_rank() + shift) % 2
    with pytest.raises(RuntimeError) as caught:
        torch.load(folder / f"{rank}.pt")
    return str(caught.value)


def test_torch_load_elsewhere_says_what_to_use(tmp_path):
    run(2, save_pieces, tmp_path)
    for ranks_there, shift in ((1, 0), (1, 1), (2, 1)):
        for text in run(ranks_there, load_piece_of, tmp_path, shift):
            assert "use shardtensor.checkpoint" in text, text
