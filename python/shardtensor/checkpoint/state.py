"""What a program hands to save and load: modules, optimizers, tensors, numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.stateful import Stateful

from shardtensor import _C
from shardtensor.checkpoint import nested
from shardtensor.checkpoint.optimizers import OptimizerState, optimizer_state
from shardtensor.shard_tensor import ShardTensor
from shardtensor.spec import ShardTensorSpec


class State:
    """Modules and optimizers, at any depth, under the names that they have without
    DDP, FSDP and compile, so that one may load what another has saved."""

    def __init__(self, state: MutableMapping):
        found = dict(nested.find_parts(state))
        modules = [value for value in found.values() if isinstance(value, nn.Module)]
        self._state = state
        # In one order on all ranks, for a part may communicate.
        self._parts = {
            path: _part(path, found[path], modules) for path in sorted(found, key=str)
        }
        self._held: dict[nested.Path, object] = {}

    def items(self) -> dict:
        """What is saved."""
        made = {path: part.state_dict() for path, part in self._parts.items()}
        return nested.opened(self._state, made, {})

    def places(self, metadata: Metadata) -> dict:
        """What is filled from a checkpoint."""
        parts = self._parts.items()
        self._held = {path: part.places(metadata) for path, part in parts}
        found = nested.opened(self._state, self._held, self._stored(metadata))
        _refuse_real_for_complex(found, metadata)
        _give_memory(found)
        return found

    def _stored(self, metadata):
        """What a checkpoint has beside optimizers, which know what they want of it."""
        paths = (metadata.planner_data or {}).items()
        optimizers = [
            path
            for path, part in self._parts.items()
            if isinstance(part, OptimizerState)
        ]
        return {
            path: metadata.state_dict_metadata[item]
            for item, path in paths
            if not any(path[: len(of)] == of for of in optimizers)
        }

    def take(self, filled: dict) -> None:
        """Every part on every rank, for one may communicate; then what went wrong
        first."""
        problem = None
        for path, part in self._parts.items():
            try:
                values = nested.closed(self._held[path], nested.at(filled, path))
                part.load_state_dict(values)
            except Exception as error:  # noqa: BLE001  whatever it is, others wait
                problem = problem or error
        if problem:
            raise problem
        nested.closed(self._state, filled, self._parts)


def _part(path, value, modules):
    if isinstance(value, nn.Module):
        return _ModuleState(value)
    if isinstance(value, torch.optim.Optimizer):
        return optimizer_state(path, value, modules)
    return _OwnState(value)


def _refuse_real_for_complex(places, metadata):
    for name, place in flatten_state_dict(places)[0].items():
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            continue
        dtype, is_tensor = stored.properties.dtype, isinstance(place, torch.Tensor)
        if is_tensor and dtype.is_complex and not place.is_complex():
            raise ValueError(
                f"checkpoint: {name} was saved as {dtype}, expected a complex tensor "
                f"to load it into, got one of {place.dtype}"
            )


def _give_memory(places):
    """A constant is one number; it gets memory by being written, on all ranks alike."""
    for place in flatten_state_dict(places)[0].values():
        if isinstance(place, ShardTensor) and all(
            placement.is_replicate() for placement in place.placements
        ):
            local = _C.local(place)
            steps = zip(local.shape, local.stride(), strict=True)
            if any(extent > 1 and not step for extent, step in steps):
                with torch.no_grad():
                    place.copy_(place.clone())


class _OwnState:
    """Of what has state_dict() and load_state_dict()."""

    def __init__(self, value: Stateful):
        self._value = value

    def state_dict(self) -> dict:
        return self._value.state_dict()

    def places(self, metadata: Metadata) -> dict:
        return self.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self._value.load_state_dict(state)


class _ModuleState(_OwnState):
    def state_dict(self) -> dict:
        return dcp_state.get_model_state_dict(self._value)

    def load_state_dict(self, state: dict) -> None:
        dcp_state.set_model_state_dict(self._value, state)


class Stager(AsyncStager):
    """Copies everything to the host, for a save that runs beside the training."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict) -> dict:
        with torch.no_grad():
            return _copy(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing: stage() returns when all is copied."""

    def close(self) -> None:
        """Nothing is kept."""


class Staged(Stager):
    """For what is a copy already."""

    def stage(self, state_dict: dict) -> dict:
        return state_dict


def _copy(value):
    if isinstance(value, ShardTensor):
        local = _C.local(value).detach().to("cpu", copy=True)
        return ShardTensor.from_spec(local, ShardTensorSpec(_C.spec(value)))
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    return copy.deepcopy(value)
