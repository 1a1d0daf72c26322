"""Checkpoints of jobs that are killed, of files that are damaged, of wrong calls."""

import os
import signal
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import rig
import torch
import torch.distributed as dist
from ranks import assert_close, ranks, run_isolated, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardtensor import checkpoint
from shardtensor.checkpoint import files

PRELOAD = ("shardtensor.checkpoint",)


def save_and_die(folder, point, victim=0, save=checkpoint.save):
    """The job is killed at some point of its second save."""
    mesh = init_device_mesh(rig.DEVICE, (2,))
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
    mesh = init_device_mesh(rig.DEVICE, (1,))
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

    def text(x=x):
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
    last_column = shard(torch.rand(400, 5), mesh, [Shard(1)], {1: (4, 1)})
    for at in (9, len(data) // 2, len(data) - 99, len(data) - 9):
        change(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert f"{file} is damaged: its checksum is not" in text()
        assert f"{file} is damaged: its checksum is not" in text(last_column)
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
    with pytest.raises(TypeError, match="an integer as the step, got 4.0"):
        checkpoint.load({"x": x}, tmp_path, 4.0)
    with pytest.raises(TypeError, match="an integer as the number to keep, got 1.5"):
        checkpoint.save({"x": x}, tmp_path, 4, keep=1.5)
    checkpoint.save({"x": x}, tmp_path, torch.tensor(4), keep=1)
    assert checkpoint.load({"x": x}, tmp_path, torch.tensor(4)) == 4
    wave = shard(torch.ones(4) * 1j, mesh, [Shard(0)])
    checkpoint.save({"waves": [wave]}, tmp_path, 5)
    with pytest.raises(ValueError, match="waves.0 was saved as .*64, expected a compl"):
        checkpoint.load({"waves": [x]}, tmp_path)
    with pytest.raises(ValueError, match="'a.b' must differ as text, got .1, '1'."):
        checkpoint.save({"a": {"b": {1: x, "1": x}}}, tmp_path, 6)


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


def export_to_a_broken_disk(state, path):
    with mock.patch.object(os, "fsync", side_effect=ArithmeticError("no disk")):
        checkpoint.export(state, path)


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
            lambda: beside({"x": x}, tmp_path, 1.0),
            TypeError,
            "checkpoint: expected an integer as the step, got 1.0",
        ),
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
            lambda: save(None if last else {"x": x}, tmp_path, 1),
            TypeError,
            "'NoneType' object is not iterable" + mine,
        ),
        (
            lambda: checkpoint.load(None if last else {"x": x}, tmp_path),
            TypeError,
            "'NoneType' object is not iterable" + mine,
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
        (
            lambda: checkpoint.export({"x.y": x, "x": {"y": x}}, tmp_path / "a"),
            ValueError,
            "two tensors have the name x.y",
        ),
        (
            lambda: checkpoint.export({"x": torch.eye(3).to_sparse()}, tmp_path / "a"),
            TypeError,
            "x is of torch.sparse_coo, expected torch.strided",
        ),
        (lambda: checkpoint.export({"x": x}, None), TypeError, "NoneType.*on rank 0"),
        (lambda: checkpoint.export({"x": x}, ""), RuntimeError, "cannot write ."),
        (
            lambda: checkpoint.export({"x": x}, tmp_path / "no" / "a"),
            OSError,
            "cannot write .*no/a: .*No such file.*on rank 0",
        ),
        (
            lambda: export_to_a_broken_disk({"x": x, "y": x}, tmp_path / "a"),
            RuntimeError,
            "cannot write .*a: no disk.*on rank 0",
        ),
    ):
        with pytest.raises(kind, match=text) as caught:
            call()
        texts = [None, None]
        dist.all_gather_object(texts, (caught.typename, str(caught.value)))
        assert texts[0] == texts[1]
    assert checkpoint.steps(tmp_path) == [0]


class Together:
    """Loads with all ranks."""

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        dist.barrier()


class Refused(Together):
    def load_state_dict(self, state):
        if dist.get_rank() == 1:
            raise ValueError("not that")


@ranks(2, timeout=60)
def test_what_loads_with_all_ranks_waits_for_none(mesh, tmp_path):
    """Whatever another part has raised before it, on one rank."""
    checkpoint.save({"a": Together(), "b": Together()}, tmp_path, 1)
    with pytest.raises(ValueError, match="not that .on rank 1."):
        checkpoint.load({"a": Refused(), "b": Together()}, tmp_path)
    order = ("a", "b") if dist.get_rank() else ("b", "a")
    parts = {"a": Together(), "b": Refused()}
    with pytest.raises(ValueError, match="not that .on rank 1."):
        checkpoint.load({key: parts[key] for key in order}, tmp_path)


@ranks(2, timeout=60)
def test_a_job_goes_on_where_rank_0_sees_a_checkpoint(mesh, tmp_path):
    """Of a disk that shows other nodes another state."""
    state = {"x": shard(torch.zeros(4), mesh, [Shard(0)])}
    if dist.get_rank() == 1:
        (tmp_path / "1" / "step_00000007").mkdir(parents=True)
    here = tmp_path / str(dist.get_rank())
    assert checkpoint.steps(here) == [7][: dist.get_rank()]
    assert checkpoint.load(state, here, missing_ok=True) is None
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        checkpoint.load(state, here)
    checkpoint.save(state, tmp_path, 5)
    assert checkpoint.load(state, tmp_path, 4, missing_ok=True) is None
    assert checkpoint.load(state, tmp_path, missing_ok=True) == 5
    with pytest.raises(ValueError, match="told different things"):
        checkpoint.load(state, tmp_path, missing_ok=dist.get_rank() == 1)


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
def test_a_save_waits_for_the_one_beside_the_training(mesh, tmp_path):
    """And so does a load: they would write and read each other's files."""
    for value in range(6):
        x = shard(torch.full((400, 500), float(value)), mesh, [Shard(0)])
        running = checkpoint.async_save({"x": x}, tmp_path, 1)
        if value % 2:
            checkpoint.save({"x": x + 100}, tmp_path, 1)
        found = x * 0
        checkpoint.load({"x": found}, tmp_path)
        assert_close(found, torch.full((400, 500), value + 100.0 * (value % 2)))
        running.result()


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
