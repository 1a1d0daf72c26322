"""What a program hands to save and load: modules, optimizers, tensors, numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.staging import AsyncStager

from shardtensor import _C
from shardtensor.shard_tensor import ShardTensor
from shardtensor.spec import ShardTensorSpec


def stateful(state: Mapping) -> dict:
    """Modules and optimizers under the names that they have without DDP, FSDP and
    compile, so that one may load what another has saved."""
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    found = dict(state)
    for key, value in state.items():
        if isinstance(value, nn.Module):
            found[key] = _ModuleState(value)
        elif isinstance(value, torch.optim.Optimizer):
            found[key] = _OptimizerState(_module_of(value, modules, key), value)
    return found


class _ModuleState:
    def __init__(self, module: nn.Module):
        self._module = module

    def state_dict(self) -> dict:
        return dcp_state.get_model_state_dict(self._module)

    def load_state_dict(self, state: dict) -> None:
        dcp_state.set_model_state_dict(self._module, state)


class _OptimizerState:
    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer):
        self._module, self._optimizer = module, optimizer

    def state_dict(self) -> dict:
        return dcp_state.get_optimizer_state_dict(self._module, self._optimizer)

    def load_state_dict(self, state: dict) -> None:
        dcp_state.set_optimizer_state_dict(self._module, self._optimizer, state)


def is_wrapper(value: object) -> bool:
    return isinstance(value, _ModuleState | _OptimizerState)


def _module_of(optimizer, modules, key):
    """The parameters of an optimizer have no names of their own."""
    wanted = {p for group in optimizer.param_groups for p in group["params"]}
    for module in modules:
        if wanted <= set(module.parameters()):
            return module
    raise ValueError(
        f"checkpoint: no module beside the optimizer {key!r} has all its parameters; "
        "save the module in the same call"
    )


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
