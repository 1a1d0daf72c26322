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
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        yield name, whole.detach().cpu()


def export(state: nn.Module | Mapping, path: str | os.PathLike) -> None:
    """Writes them into a file of the safetensors format, which rank 0 does as they
    come. The file appears when it is complete."""
    named = list(_named(state))
    path = Path(path)
    begun = path.with_name(path.name + ".writing")
    writes = not dist.is_initialized() or dist.get_rank() == 0
    with open(begun if writes else os.devnull, "wb") as file:
        header = json.dumps(_header(named)).encode()
        header += b" " * (-len(header) % 8)
        file.write(len(header).to_bytes(8, "little") + header)
        for _, whole in full_tensors(dict(named)):
            if writes and whole.numel():
                data = whole.contiguous().view(-1).view(torch.uint8).numpy()
                file.write(data.data)
        file.flush()
        if writes:
            os.fsync(file.fileno())
            begun.rename(path)


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
    header, begin = {}, 0
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
    return header
