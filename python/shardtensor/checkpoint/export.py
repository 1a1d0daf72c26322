"""One file with whole tensors, for programs that know nothing of ranks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state

from shardtensor.agree import agree_everywhere, made_everywhere
from shardtensor.checkpoint.reading import bytes_of

# The names that the safetensors format has for them.
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def full_tensors(state: nn.Module | Mapping) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole value, on the host, of each tensor of a module or a state dict,
    one after the other: no rank holds more than one beside its own. All ranks go
    through all of them. Communication: one gather for each that is cut."""
    for name, value in _named(state):
        yield name, _whole(value)  # not kept here while the next one is made


def _whole(value):
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().cpu()


def export(state: nn.Module | Mapping, path: str | os.PathLike) -> None:
    """Writes them into a file of the safetensors format, which rank 0 does as they
    come. The file appears when it is complete."""
    named, header = made_everywhere(
        lambda: _named_and_header(state), lambda made: ("export", made[1])
    )
    writes = not dist.is_initialized() or dist.get_rank() == 0
    file = made_everywhere(lambda: _File(path) if writes else None)
    if file:
        file.write(header)
    for _, whole in full_tensors(dict(named)):
        if file:
            file.write_tensor(whole)
        del whole  # before the next one comes
    agree_everywhere(file.finish() if file else None)


class _File:
    """Appears under its name when it is complete. Whatever goes wrong waits for the
    end, as the other ranks do."""

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)
        self._error: Exception | None = None
        try:
            self._begun = self._path.with_name(self._path.name + ".writing")
            self._file = open(self._begun, "wb")  # noqa: SIM115
        except (OSError, ValueError) as error:
            raise self._explained(error) from error

    def write(self, data) -> None:
        self._try(lambda: self._file.write(data))

    def write_tensor(self, whole: torch.Tensor) -> None:
        if whole.numel():
            self._try(lambda: self._file.write(_bytes_of(whole)))

    def finish(self) -> Exception | None:
        self._try(self._file.flush)
        self._try(lambda: os.fsync(self._file.fileno()))
        with contextlib.suppress(OSError):  # nothing new after what went wrong
            self._file.close()
        self._try(lambda: self._begun.rename(self._path))
        return self._error

    def _try(self, step):
        if self._error is None:
            try:
                step()
            except Exception as error:  # noqa: BLE001  whatever it is, others wait
                self._error = self._explained(error)

    def _explained(self, error):
        kind = OSError if isinstance(error, OSError) else RuntimeError
        return kind(f"checkpoint: cannot write {self._path}: {error}")


def _bytes_of(whole):
    return bytes_of(whole.resolve_neg().contiguous())


def _named_and_header(state):
    named = list(_named(state))
    return named, _header(named)


def _named(state):
    """Nested dicts by dotted names; what is no tensor is left out."""
    if isinstance(state, nn.Module):
        state = dcp_state.get_model_state_dict(state)
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", inner) for name, inner in _named(value))
        elif isinstance(value, torch.Tensor):
            yield str(key), value


def _header(named):
    """The offsets follow from shapes and dtypes: no rank is asked."""
    header: dict[str, dict] = {}
    begin = 0
    for name, value in named:
        if name in header:
            raise ValueError(f"checkpoint: two tensors have the name {name}")
        if value.layout != torch.strided:
            raise TypeError(
                f"checkpoint: {name} is of {value.layout}, expected torch.strided"
            )
        if value.dtype not in _TYPES:
            raise TypeError(
                f"checkpoint: {name} is of {value.dtype}, which the format "
                "does not know"
            )
        end = begin + value.numel() * value.element_size()
        header[name] = {
            "dtype": _TYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
