"""A tensor that torch.save wrote into a part of a file, read into its place by piece.

Nothing is mapped: a disk that fails, or a file that somebody cuts short, is an
error where it is read and not the end of the process."""

from __future__ import annotations

import io
import os
import pickle

import torch

from shardtensor import _C

BLOCK = 1 << 20  # bytes that are read at once, which stay in a processor's cache


class Item(io.RawIOBase):
    """The bytes [begin, begin + length) of a file."""

    def __init__(self, file: io.FileIO, begin: int, length: int):
        self._file, self._begin, self.length = file, begin, length
        self._at = 0
        self._summed = self._sum = 0  # bytes from the front, and their checksum

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer) -> int:
        count = min(len(buffer), max(0, self.length - self._at))
        self._read(memoryview(buffer)[:count], self._at)
        self._at += count
        return count

    def fill(self, buffer: memoryview, at: int) -> None:
        """The buffer with what stands at `at`. Fills that ascend add to the checksum
        as they go, while a processor's cache has each block."""
        if at < self._summed:
            self._read(buffer, at)
            return
        self._sum_up_to(at)
        for first in range(0, len(buffer), BLOCK):
            self._read_and_sum(buffer[first : first + BLOCK])

    def crc32c(self) -> int:
        """Of all of it; reads what fill has not."""
        self._sum_up_to(self.length)
        return self._sum

    def _sum_up_to(self, end):
        block = memoryview(bytearray(min(BLOCK, end - self._summed)))
        while self._summed < end:
            self._read_and_sum(block[: end - self._summed])

    def _read_and_sum(self, block):
        self._read(block, self._summed)
        self._sum = _C.crc32c(block, self._sum)
        self._summed += len(block)

    def _read(self, buffer, at):
        done = 0
        while done < len(buffer):
            begin = self._begin + at + done
            count = os.preadv(self._file.fileno(), [buffer[done:]], begin)
            if count == 0:
                raise OSError(
                    f"it ends after {at + done} of {self.length} bytes of an item"
                )
            done += count


def read_tensor(
    stream: io.RawIOBase,
    target: torch.Tensor,
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
) -> None:
    """Copies the box at `offsets` of the tensor in `stream` into `target`. Whether the
    bytes are those that were written is for the caller to ask, before or after."""
    found = None
    if isinstance(stream, Item):
        reader = torch._C.PyTorchFileReader(stream)
        found = _layout(reader.get_record("data.pkl"))
    if found is None:
        stream.seek(0)
        whole = torch.load(stream, map_location="cpu", weights_only=True)
        target.copy_(_box(whole, offsets, lengths))
        return
    dtype, key, elements, offset, size, stride = found
    at = reader.get_record_offset(f"data/{key}") if elements else 0
    if elements and torch.empty(size, device="meta").stride() == stride:
        start = at + offset * dtype.itemsize
        scratch = torch.empty(BLOCK, dtype=torch.uint8, device="cpu")
        _read_rows(stream, start, target, dtype, tuple(size), offsets, lengths, scratch)
        return
    bytes_of_all = elements * dtype.itemsize
    memory = torch.empty(bytes_of_all, dtype=torch.uint8, device="cpu")
    stream.fill(memoryview(memory.numpy()), at)
    whole = memory.view(dtype).as_strided(size, stride, offset)
    target.copy_(_box(whole, offsets, lengths))


def _box(tensor, offsets, lengths):
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _read_rows(item, at, target, dtype, size, offsets, lengths, scratch):
    """The box of a tensor of this size that begins at `at`, row after row."""
    if not size:
        size, offsets, lengths, target = (1,), (0,), (1,), target.reshape(1)
    if 0 in lengths:
        return
    row = torch.Size(size[1:]).numel() * dtype.itemsize
    at += offsets[0] * row
    inner = size[1:], offsets[1:], lengths[1:]
    if tuple(lengths[1:]) == tuple(size[1:]) and _lies_so(target, dtype):
        item.fill(bytes_of(target), at)
    elif row > len(scratch):
        for i in range(lengths[0]):
            _read_rows(item, at + i * row, target[i], dtype, *inner, scratch)
    else:
        step = len(scratch) // row
        for first in range(0, lengths[0], step):
            count = min(step, lengths[0] - first)
            part = scratch[: count * row]
            item.fill(memoryview(part.numpy()), at + first * row)
            rows = part.view(dtype).view(count, *size[1:])
            box = _box(rows, (0, *offsets[1:]), (count, *lengths[1:]))
            target[first : first + count].copy_(box)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor on the host. A single element has any stride, which
    view(-1) keeps."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def _lies_so(target, dtype):
    """Whether the file's bytes are the target's."""
    if target.is_conj() or target.is_neg():
        return False
    return target.dtype == dtype and target.is_cpu and target.is_contiguous()


class _Layout(pickle.Unpickler):
    """Understands one plain tensor and nothing else."""

    def persistent_load(self, told):
        _, kind, key, _, elements = told
        return kind, key, elements

    def find_class(self, module, name):
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        kind = getattr(torch, name, None) if module == "torch" else None
        if isinstance(kind, type) and issubclass(kind, torch.storage._LegacyStorage):
            return kind._dtype
        raise pickle.UnpicklingError(f"{module}.{name}")


def _rebuilt(storage, offset, size, stride, requires_grad, hooks, bits=None):
    if bits:  # conjugate or negative: the bytes are those of another tensor
        raise pickle.UnpicklingError(str(bits))
    dtype, key, elements = storage
    return dtype, key, elements, offset, size, stride


def _layout(pickled):
    try:
        found = _Layout(io.BytesIO(pickled)).load()
    except (pickle.UnpicklingError, TypeError, ValueError):
        return None
    return found if isinstance(found, tuple) and len(found) == 6 else None
