"""What optimizers keep, by the names of their module's parameters: the items that
torch.distributed.checkpoint.state_dict makes, without the step that it takes with an
optimizer that has taken none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._pytree import tree_map_only

from shardtensor import _C
from shardtensor.checkpoint.nested import Path, dotted, put, with_lists
from shardtensor.shard_tensor import ShardTensor


def optimizer_state(
    path: Path, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]
) -> OptimizerState:
    """Of the optimizer that stands at `path` beside one of these modules."""
    module = _module_of(optimizer, modules, dotted(path))
    if FullyShardedDataParallel.fsdp_modules(module):
        return _FlatState(path, module, optimizer)
    return OptimizerState(path, module, optimizer)


class OptimizerState:
    def __init__(self, path: Path, module: nn.Module, optimizer: torch.optim.Optimizer):
        self._path, self._module, self._optimizer = path, module, optimizer
        self._names = _names(module)

    def state_dict(self) -> dict:
        """As it is: parameters that took no step have no state."""
        return {"state": self._own_state(), "param_groups": self._groups()}

    def places(self, metadata: Metadata) -> dict:
        """Where the state that a checkpoint has goes: this optimizer's own tensors,
        new ones where it has none."""
        own, params = self._own_state(), {self._names[p]: p for p in self._own_params()}
        found: dict = {}
        for (name, *rest), stored in self._stored(metadata, "state"):
            if name in params:
                place = _place(stored, params[name], _at(own.get(name, {}), rest))
                put(found.setdefault(name, {}), tuple(rest), place)
        state = {name: with_lists(values) for name, values in found.items()}
        return {"state": state, "param_groups": self._group_places(metadata)}

    def _stored(self, metadata, what) -> Iterator[tuple[Path, object]]:
        """Where in that an item is, and what the checkpoint says of it."""
        wanted = (*self._path, what)
        for item, path in (metadata.planner_data or {}).items():
            if path[: len(wanted)] == wanted:
                yield path[len(wanted) :], metadata.state_dict_metadata[item]

    def _group_places(self, metadata):
        """The groups that the checkpoint has, with the settings of those here."""
        settings: dict = {}
        for group in self._groups():
            settings.update(group)
        found: dict = {}
        for path, stored in self._stored(metadata, "param_groups"):
            put(found, path, _setting_place(stored, _at(settings, path[1:])))
        groups = with_lists(found) or self._groups()
        return [{name: group.get(name) for name in settings} for group in groups]

    def load_state_dict(self, state: dict) -> None:
        numbers = {self._names[p]: i for i, p in enumerate(_params(self._optimizer))}
        found = state.get("state", {})
        _owner(self._optimizer).state.clear()  # of parameters without a state there
        self._optimizer.load_state_dict(
            {
                "state": {numbers[name]: values for name, values in found.items()},
                "param_groups": list(self._groups_from(state["param_groups"], numbers)),
            }
        )

    def _own_params(self):
        return list(_params(_owner(self._optimizer)))

    def _own_state(self):
        names = [self._names[p] for p in self._own_params()]
        packed = _owner(self._optimizer).state_dict()["state"]
        packed = tree_map_only(ShardTensor, _summed, packed)
        return {names[number]: values for number, values in packed.items() if values}

    def _groups(self):
        return [
            {**group, "params": [self._names[p] for p in group["params"]]}
            for group in self._optimizer.param_groups
        ]

    def _groups_from(self, stored, numbers) -> Iterator[dict]:
        """What the checkpoint says of the groups of this optimizer."""
        of_name = {name: group for group in stored for name in group["params"]}
        for index, group in enumerate(self._groups()):
            params = group["params"]
            if params:
                group = self._settings_of(params, of_name)
            elif index < len(stored):
                group = stored[index]
            yield {**group, "params": [numbers[name] for name in params]}

    def _settings_of(self, params, of_name):
        key = dotted(self._path)
        for name in params:
            if name not in of_name:
                raise ValueError(
                    f"checkpoint: no group of parameters in {key!r} has {name}, "
                    f"expected one of {sorted(of_name)}"
                )
            first, other = of_name[params[0]], of_name[name]
            for what in first:
                if what != "params" and not _equal(first[what], other[what]):
                    raise ValueError(
                        f"checkpoint: a group of {key!r} has {params[0]} and {name}, "
                        f"which were saved with {what} {first[what]} and {other[what]}"
                    )
        return of_name[params[0]]


class _FlatState(OptimizerState):
    """Parameters of FullyShardedDataParallel have no names and shapes of their own:
    PyTorch knows them."""

    def state_dict(self) -> dict:
        return dcp_state.get_optimizer_state_dict(self._module, self._optimizer)

    def places(self, metadata: Metadata) -> dict:
        return self.state_dict()

    def load_state_dict(self, state: dict) -> None:
        dcp_state.set_optimizer_state_dict(self._module, self._optimizer, state)


def _module_of(optimizer, modules, key):
    """The parameters of an optimizer have no names of their own."""
    wanted = set(_params(optimizer))
    for module in modules:
        if wanted <= set(module.parameters()):
            return module
    raise ValueError(
        f"checkpoint: no module beside the optimizer {key!r} has all its parameters; "
        "save the module in the same call"
    )


def _names(module):
    """Without those of wrappers."""
    return {
        param: next(iter(dcp_state._get_fqns(module, name)))
        for name, param in module.named_parameters()
    }


def _summed(tensor):
    """LBFGS keeps products, whose terms nobody has asked for yet."""
    return _C.redistribute(tensor, _C.spec(tensor).without_partial())


def _params(optimizer):
    return (param for group in optimizer.param_groups for param in group["params"])


def _owner(optimizer):
    """Who keeps the state of this rank's parameters: a ZeroRedundancyOptimizer has
    an optimizer for that."""
    if not hasattr(optimizer, "consolidate_state_dict"):
        return optimizer
    optimizer._check_overlap_initialized()
    return optimizer.optim


# ---- places -------------------------------------------------------------------


def _place(stored, param, held):
    """For an item: a tensor that is filled, or what another value replaces."""
    if not isinstance(stored, TensorStorageMetadata):
        return held
    size, dtype = stored.size, stored.properties.dtype
    if isinstance(held, torch.Tensor) and (held.shape, held.dtype) == (size, dtype):
        return held
    if not size:  # a number of steps
        return torch.zeros(size, dtype=dtype, device="cpu")
    if size == param.shape:
        return torch.zeros_like(param.detach(), dtype=dtype)
    return param.detach().new_zeros(size, dtype=dtype)


def _setting_place(stored, held):
    if not isinstance(stored, TensorStorageMetadata):
        return None
    device = held.device if isinstance(held, torch.Tensor) else "cpu"
    return torch.empty(stored.size, dtype=stored.properties.dtype, device=device)


def _at(values, path):
    for step in path:
        try:
            values = values[step]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _equal(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)
