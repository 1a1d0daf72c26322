"""What a program hands to save and load: modules, optimizers, tensors, numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.stateful import Stateful

from shardtensor import _C
from shardtensor.checkpoint.optimizers import OptimizerState, optimizer_state
from shardtensor.shard_tensor import ShardTensor
from shardtensor.spec import ShardTensorSpec


class State:
    """Modules and optimizers under the names that they have without DDP, FSDP and
    compile, so that one may load what another has saved."""

    def __init__(self, state: MutableMapping):
        modules = [value for value in state.values() if isinstance(value, nn.Module)]
        self._state = state
        self._parts: dict[str, Stateful] = {}
        for key, value in state.items():
            if isinstance(value, nn.Module):
                self._parts[key] = _ModuleState(value)
            elif isinstance(value, torch.optim.Optimizer):
                self._parts[key] = optimizer_state(key, value, modules)
            elif isinstance(value, Stateful):
                self._parts[key] = value

    def items(self) -> dict:
        """What is saved."""
        found = {key: part.state_dict() for key, part in self._parts.items()}
        return {**self._state, **found}

    def places(self, metadata: Metadata) -> dict:
        """What is filled from a checkpoint."""
        return {**self._state, **{k: self._places(k, metadata) for k in self._parts}}

    def _places(self, key, metadata):
        part = self._parts[key]
        if isinstance(part, OptimizerState):
            return part.places(metadata)
        return part.state_dict()

    def take(self, filled: dict) -> None:
        """Every part on every rank, for one may communicate; then what went wrong
        first."""
        problem = None
        for key in sorted(filled):
            try:
                self._take(key, filled[key])
            except Exception as error:  # noqa: BLE001  whatever it is, others wait
                problem = problem or error
        if problem:
            raise problem

    def _take(self, key, value):
        if key in self._parts:
            self._parts[key].load_state_dict(value)
        else:
            self._state[key] = value


class _ModuleState:
    def __init__(self, module: nn.Module):
        self._module = module

    def state_dict(self) -> dict:
        return dcp_state.get_model_state_dict(self._module)

    def load_state_dict(self, state: dict) -> None:
        dcp_state.set_model_state_dict(self._module, state)


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
