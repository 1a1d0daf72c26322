"""The files of a checkpoint: complete or not there, each item with a checksum.
What torch.distributed.checkpoint's own reader reads."""

from __future__ import annotations

import io
import os
import shutil
import zlib
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlanner
from torch.futures import Future
from torch.utils.serialization import config

WRITING = ".writing"  # a folder that a save has not finished
REPLACED = ".replaced"  # the folder that one takes the place of


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
            result.storage_data.crc32 = self.transforms.found[result.index]
        return done

    def finish(self, metadata: Metadata, results: list[list]) -> None:
        """On one rank, when all have written."""
        super().finish(metadata, results)
        old = self.folder.with_name(self.folder.name + REPLACED)
        if self.folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.folder.rename(old)
        self.path.rename(self.folder)
        _flush(self.folder.parent)
        shutil.rmtree(old, ignore_errors=True)
        if self.keep is not None:
            for number in steps(self.folder.parent)[: -self.keep]:
                shutil.rmtree(find(self.folder.parent, number))


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
        self._found[self._index] = zlib.crc32(data, self._found[self._index])
        return self._raw.write(data)

    def close(self):  # the file has more items to come
        self._raw.flush()


class Reader(FileSystemReader):
    """Compares each item's checksum, and names the file that is missing or
    damaged."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._checked: set = set()
        self._under_way = ""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except FileNotFoundError as error:
            raise OSError(f"checkpoint: {error.filename} is missing") from error
        except Exception as error:
            raise OSError(
                f"checkpoint: {self.path}/{self._under_way} is damaged: {error}"
            ) from error

    def _slice_file(self, file, sinfo):
        self._under_way = sinfo.relative_path
        stream = super()._slice_file(file, sinfo)
        place = sinfo.relative_path, sinfo.offset
        if hasattr(sinfo, "crc32") and place not in self._checked:
            self._checked.add(place)
            _check(stream, sinfo)
        return stream


def _check(stream, told):
    found = size = 0
    while block := stream.read(1 << 24):
        found = zlib.crc32(block, found)
        size += len(block)
    if size != told.length:
        raise OSError(f"it ends after {size} of {told.length} bytes of an item")
    if found != told.crc32:
        raise OSError("its checksum is not that of what was written")
    stream.seek(0)


def steps(folder: Path) -> list[int]:
    """The steps of which there is a complete checkpoint, ascending."""
    found = set()
    for path in folder.glob("step_*") if folder.exists() else ():
        number = path.name.removeprefix("step_").removesuffix(REPLACED)
        if number.isdigit() and (path / ".metadata").exists():
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
