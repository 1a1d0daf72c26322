"""A tensor that torch.save wrote, seen where it lies in a mapped file."""

from __future__ import annotations

import io
import pickle

import torch


class MappedStream(io.RawIOBase):
    """Reads a piece of memory without a copy of it."""

    def __init__(self, data: memoryview):
        self.data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self.data))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer) -> int:
        found = self.data[self._at : self._at + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def mapped_tensor(stream: io.RawIOBase) -> torch.Tensor:
    """What torch.load(stream) gives, for a dense tensor in mapped memory without
    reading it: only valid as long as the memory is."""
    layout = None
    if isinstance(stream, MappedStream):
        reader = torch._C.PyTorchFileReader(stream)
        layout = _layout(reader.get_record("data.pkl"))
    if layout is None:
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)
    dtype, key, elements, offset, size, stride = layout
    if elements == 0:
        return torch.empty_strided(size, stride, dtype=dtype)
    begin = reader.get_record_offset(f"data/{key}")
    found = stream.data[begin : begin + elements * dtype.itemsize]
    flat = torch.frombuffer(found, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).as_strided(size, stride, offset)


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


def _rebuilt(storage, offset, size, stride, *_):
    dtype, key, elements = storage
    return dtype, key, elements, offset, size, stride


def _layout(pickled):
    try:
        found = _Layout(io.BytesIO(pickled)).load()
    except (pickle.UnpicklingError, TypeError, ValueError):
        return None
    return found if isinstance(found, tuple) and len(found) == 6 else None
