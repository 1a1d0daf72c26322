"""The files of a checkpoint: complete or not there, each item with a checksum.
What torch.distributed.checkpoint's own reader reads."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlanner,
)
from torch.futures import Future
from torch.utils.serialization import config

from shardtensor import _C
from shardtensor.checkpoint.reading import Item, read_tensor

WRITING = ".writing"  # a folder that a save has not finished
REPLACED = ".replaced"  # the folder that one takes the place of
REMOVED = ".removed"  # one that nobody keeps
METADATA = ".metadata"  # DCP's name for what makes a checkpoint complete
_MARK = b"crc32c: "


class Writer(FileSystemWriter):
    """Writes into a folder beside `folder` and renames it when all ranks are done,
    so that a job killed at any moment leaves what was there before."""

    def __init__(self, folder: Path, keep: int | None = None):
        self.folder = folder
        self.keep = keep
        super().__init__(folder.with_name(folder.name + WRITING))
        self.transforms = _Checksums()

    def prepare_global_plan(self, plans):
        """On one rank, before any rank writes."""
        shutil.rmtree(self.path, ignore_errors=True)  # of a job that was killed
        self.path.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner: SavePlanner) -> Future[list]:
        with config.patch("save.compute_crc32", False):  # ours is of all bytes
            done = super().write_data(plan, planner)
        for result in done.value():
            # A field more than DCP's own reader looks at.
            result.storage_data.crc32c = self.transforms.found[result.index]
        return done

    def finish(self, metadata: Metadata, results: list[list]) -> None:
        """On one rank, when all have written."""
        super().finish(metadata, results)
        _seal(self.path / METADATA)
        old = self.folder.with_name(self.folder.name + REPLACED)
        if self.folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.folder.rename(old)
        self.path.rename(self.folder)
        _flush(self.folder.parent)
        shutil.rmtree(old, ignore_errors=True)
        if self.keep is not None:
            self._remove_others(self.keep - 1)

    def _remove_others(self, kept: int) -> None:
        """All but the newest; this one stays, after which steps may have been more."""
        parent = self.folder.parent
        found = [find(parent, number) for number in steps(parent)]
        others = [path for path in found if path != self.folder]
        for path in others[: max(len(others) - kept, 0)]:
            _remove(path)
        for path in parent.glob(f"step_*{REMOVED}"):  # those of killed jobs, too
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """By its name first: a job killed here leaves nothing half there."""
    shutil.rmtree(path.with_name(path.name + REPLACED), ignore_errors=True)
    removed = path.with_name(path.name + REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)


class _Checksums:
    """Counts what is written of each item; in the place of DCP's compression."""

    def __init__(self):
        self.found: dict = {}

    def transform_save_stream(self, write_item, raw_stream):
        stream = _Counted(raw_stream, write_item.index, self.found)
        return stream, []


class _Counted(io.RawIOBase):
    def __init__(self, raw, index, found):
        self._raw, self._index, self._found = raw, index, found
        found[index] = 0

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self._found[self._index] = _C.crc32c(data, self._found[self._index])
        return self._raw.write(data)

    def close(self):  # the file has more items to come
        self._raw.flush()


class Reader(FileSystemReader):
    """Compares each item's checksum, and names the file that is missing or
    damaged. What is wanted of a tensor goes to its place by piece, see reading.py."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:  # without DCP's ways to other files
        if self._metadata is None:
            self._metadata = self._read_metadata()
        return self._metadata

    def _read_metadata(self):
        path = Path(self.path) / METADATA
        try:
            _check_seal(path)
            return super().read_metadata()
        except FileNotFoundError as error:
            raise OSError(f"checkpoint: {path} is missing") from error
        except Exception as error:
            raise OSError(f"checkpoint: {path} is damaged: {error}") from error

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            path = self.storage_data[item.storage_index].relative_path
            wanted.setdefault(path, []).append(item)
        for name, items in wanted.items():
            path = Path(self.path) / name
            try:
                with open(path, "rb", buffering=0) as file:
                    self._read_file(file, items, planner)
            except FileNotFoundError as error:
                raise OSError(f"checkpoint: {path} is missing") from error
            except Exception as error:
                raise OSError(f"checkpoint: {path} is damaged: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, file, items, planner):
        checked = set()
        for item in items:
            told = self.storage_data[item.storage_index]
            stream = Item(file, told.offset, told.length)
            try:
                self._read_item(item, told, stream, planner)
            finally:  # a wrong checksum explains whatever else went wrong
                if told.offset not in checked:
                    _check(stream, told)
                    checked.add(told.offset)

    def _read_item(self, item, told, stream, planner):
        if item.type == LoadItemType.BYTE_IO:
            _check(stream, told)  # before it is unpickled
            stream = self._changed_back(item, told, stream)
            planner.load_bytes(item, io.BytesIO(stream.read()))
            return
        target = planner.resolve_tensor(item).detach()
        stream = self._changed_back(item, told, stream)
        read_tensor(stream, target, item.storage_offsets, item.lengths)
        planner.commit_tensor(item, target)

    def _changed_back(self, item, told, stream):
        """Of what another program has compressed."""
        changes = getattr(told, "transform_descriptors", None)
        if not changes:
            return stream
        return self.transforms.transform_load_stream(
            item, changes, io.BytesIO(stream.read())
        )


def _seal(path: Path) -> None:
    """Adds a checksum, behind what DCP's own reader looks at."""
    with open(path, "r+b") as file:
        file.write(_MARK + _sum(file.read()))
        file.flush()
        os.fsync(file.fileno())


def _check_seal(path: Path) -> None:
    """DCP itself writes none."""
    data = path.read_bytes()
    at = len(data) - len(_MARK) - 4
    if at > 0 and data[at:-4] == _MARK and data[-4:] != _sum(data[:at]):
        raise OSError(_OTHER_SUM)


def _sum(data: bytes) -> bytes:
    return _C.crc32c(data).to_bytes(4, "little")


_OTHER_SUM = "its checksum is not that of what was written"


def _check(item, told):
    if hasattr(told, "crc32c") and item.crc32c() != told.crc32c:
        raise OSError(_OTHER_SUM)


def steps(folder: Path) -> list[int]:
    """The steps whose save has finished, ascending. Their folders have that name then,
    whatever has got lost of them since."""
    found = set()
    for path in folder.glob("step_*") if folder.exists() else ():
        number = path.name.removeprefix("step_").removesuffix(REPLACED)
        if number.isdigit() and path.is_dir():
            found.add(int(number))
    return sorted(found)


def folder_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08}"


def find(folder: Path, step: int) -> Path:
    """Of a save that was killed while it took the place of another, that one."""
    path = folder_of(folder, step)
    return path if path.exists() else path.with_name(path.name + REPLACED)


def _flush(folder):
    """The new names, too, are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
