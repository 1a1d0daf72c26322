"""Checkpoints that any number of ranks can load, by torch.distributed.checkpoint.

checkpoint.save({"model": model, "optimizer": optimizer}, "run", step=100)
step = checkpoint.load({"model": model, "optimizer": optimizer}, "run")
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import MutableMapping
from concurrent.futures import Future, wait
from pathlib import Path

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardtensor.agree import made_everywhere, missing_ranks_named
from shardtensor.checkpoint import files
from shardtensor.checkpoint.export import export, full_tensors
from shardtensor.checkpoint.state import Staged, Stager, State
from shardtensor.device_mesh import on_forget

__all__ = [
    "Stager",
    "async_save",
    "export",
    "full_tensors",
    "load",
    "save",
    "steps",
]

Folder = str | os.PathLike
_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
_under_way: list[Future] = []  # the last async_save


def save(
    state: MutableMapping, folder: Folder, step: int, *, keep: int | None = None
) -> None:
    """Writes `folder`/step_<step>: modules (plain, DDP, FSDP), their optimizers,
    ShardTensors and DTensors in any layout, whatever has state_dict() and
    load_state_dict(), all of them in nested dicts, lists and tuples, too, and values
    that torch.save takes, which must be the same on all ranks. Every rank writes its
    own pieces; all ranks take part. An async_save under way is waited for.

    A checkpoint appears when it is complete: whenever the job is killed, those
    before it can be loaded. `keep` of them stay then, this one and those of the
    highest steps. `step`, `keep` and the keys are compared between ranks."""
    writer, items = made_everywhere(
        lambda: (_writer(folder, step, keep), State(state).items()),
        lambda _: ("save", step, keep, _keys(state)),
    )
    wait(_under_way)
    with _explained(), missing_ranks_named():
        dcp.save(items, storage_writer=writer)


def async_save(
    state: MutableMapping, folder: Folder, step: int, *, keep: int | None = None
) -> Future:
    """The same beside the training, of a copy that is made before it returns.
    result() of what it returns waits for the end, and raises what went wrong. An
    earlier one is waited for: two would mix their messages. Communication: on a
    group of its own, of gloo."""
    writer, copied = made_everywhere(
        lambda: (_writer(folder, step, keep), Stager().stage(State(state).items())),
        lambda _: ("async_save", step, keep, _keys(state)),
    )
    wait(_under_way)
    group = _own_group()
    running = dcp.async_save(
        copied, storage_writer=writer, async_stager=Staged(), process_group=group
    )
    _under_way[:] = [running]
    return _explained_later(running, group)


def load(
    state: MutableMapping,
    folder: Folder,
    step: int | None = None,
    *,
    missing_ok: bool = False,
) -> int | None:
    """Reads a checkpoint, the newest by default, into what `state` holds, in place,
    and returns its step; numbers and tuples in `state` are replaced, an empty dict gets
    all that was saved there, tensors whole on the host. Sizes and names must be those
    that were saved, layouts, wrappers, meshes, the number of ranks and dtypes need
    not; but what was complex is refused where `state` is real. A missing or damaged
    file is an error on all ranks that names it, after which `state` holds parts of what
    was read. An async_save under way is waited for.
    `missing_ok`: None where there is no such checkpoint, for a job that goes on
    where there is one; rank 0 says so for all."""
    told = lambda _: ("load", step, missing_ok, _keys(state))  # noqa: E731
    step, found = _steps_on_rank_0(folder, step, told)
    if not found or step not in (None, *found):
        if missing_ok:
            return None
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"checkpoint: {wanted} in {folder}, there are {found}")
    step = found[-1] if step is None else step
    reader = files.Reader(files.find(Path(folder), step))
    wrapped, places = made_everywhere(lambda: _places(state, reader))
    with _explained(), missing_ranks_named():
        dcp.load(places, storage_reader=reader)
    made_everywhere(lambda: wrapped.take(places))
    return step


def steps(folder: Folder) -> list[int]:
    """The steps of the complete checkpoints in `folder`, ascending, as this rank sees
    them: on a shared disk others may not yet, so what all ranks do must not depend on
    it (`load` with missing_ok does not). No communication."""
    return files.steps(Path(folder))


def _writer(folder, step, keep):
    step, keep = _whole_number("step", step), _whole_number("number to keep", keep)
    if step < 0:
        raise ValueError(f"checkpoint: expected a step of 0 or more, got {step}")
    if keep is not None and keep < 1:
        raise ValueError(f"checkpoint: expected to keep 1 or more, got {keep}")
    return files.Writer(files.folder_of(Path(folder), step), keep)


def _keys(state):
    return sorted(map(str, state))


def _whole_number(what, value):
    try:
        return value if value is None else operator.index(value)
    except TypeError:
        wanted = f"expected an integer as the {what}, got {value!r}"
        raise TypeError(f"checkpoint: {wanted}") from None


def _places(state, reader):
    wrapped = State(state)
    return wrapped, wrapped.places(reader.read_metadata())


def _steps_on_rank_0(folder, step, told):
    """The step that is asked for, and those there are: other nodes may see another
    state of a shared disk."""
    reads = not dist.is_initialized() or dist.get_rank() == 0
    wait(_under_way)
    asked, there = made_everywhere(
        lambda: (_whole_number("step", step), steps(folder) if reads else None), told
    )
    found = [there]
    if dist.is_initialized():
        dist.broadcast_object_list(found, 0)
    return asked, found[0]


@contextlib.contextmanager
def _explained():
    """What the first of the ranks that failed has said; DCP's error is none that
    `except Exception` sees."""
    try:
        yield
    except CheckpointException as error:
        rank, failure = min(error.failures.items(), key=lambda item: item[0])
        inner = failure[0] if isinstance(failure, tuple) else failure
        raise _kind(inner)(f"{inner} (on rank {rank})") from error
    except RuntimeError as error:  # of the process group: others are in the one above
        rank = dist.get_rank() if dist.is_initialized() else 0
        lost = f"checkpoint: rank {rank} does not reach the others: {error}"
        raise RuntimeError(lost) from error


def _kind(error):
    kinds = (kind for kind in (OSError, ValueError) if isinstance(error, kind))
    return next(kinds, RuntimeError)


def _explained_later(running: Future, group) -> Future:
    explained: Future = Future()

    def settle(_):
        try:
            with _explained(), missing_ranks_named(group):
                explained.set_result(running.result())
        except Exception as error:  # noqa: BLE001  whatever it is, result() raises it
            explained.set_exception(error)

    running.add_done_callback(settle)
    return explained


def _own_group():
    """Messages of a save must not meet those of the training."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo")
    return _groups[world]


@on_forget
def _forget_groups():
    _groups.clear()
    _under_way.clear()  # what comes after a save holds its group
