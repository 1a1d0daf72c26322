"""One file with whole tensors, for programs that know nothing of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state

from shardtensor.agree import made_everywhere

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
    named = list(_named(state))
    header = made_everywhere(lambda: _header(named), lambda header: ("export", header))
    writes = not dist.is_initialized() or dist.get_rank() == 0
    file = _File(Path(path)) if writes else None
    if file:
        file.write(header)
    for _, whole in full_tensors(dict(named)):
        if file and whole.numel():
            file.write(whole.contiguous().view(-1).view(torch.uint8).numpy().data)
        del whole  # before the next one comes
    problem = [file.finish() if file else None]
    if dist.is_initialized():
        dist.broadcast_object_list(problem, 0)
    if problem[0]:
        raise OSError(f"checkpoint: cannot write {path}: {problem[0]}")


class _File:
    """Appears under its name when it is complete. Errors wait for the end, as the
    other ranks do."""

    def __init__(self, path: Path):
        self._path, self._begun = path, path.with_name(path.name + ".writing")
        self._error = self._file = None
        try:
            self._file = open(self._begun, "wb")  # noqa: SIM115
        except OSError as error:
            self._error = error

    def write(self, data) -> None:
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error

    def finish(self) -> str | None:
        if self._error is None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._begun.rename(self._path)
            except OSError as error:
                self._error = error
        if self._file is not None:
            self._file.close()
        return self._error and str(self._error)


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
