"""Modules whose parameters and buffers are ShardTensors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.agree import agree
from shardtensor.create import distribute_tensor
from shardtensor.device_mesh import default_mesh
from shardtensor.sync import is_distributed

TITLE = "distribute_module: "


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable | None = None,
    output_fn: Callable | None = None,
) -> nn.Module:
    """The module, with ShardTensors for parameters and buffers. `partition_fn(name,
    submodule, mesh)`, the same on all ranks, replaces what is cut by
    nn.Parameter(distribute_tensor(...)); what it leaves plain becomes Replicate, with
    the values of the mesh's first rank, DTensors stay. A parameter that is left plain
    and shared stays shared. `input_fn(submodule, inputs, mesh)` before forward and
    `output_fn(submodule, outputs, mesh)` after it may replace what they get.
    Gradients lie as their parameters do, complete on every rank. Raises alike on every
    rank, before anything changes, for modules and arguments that differ between
    ranks. The two may leave `submodule` out, as PyTorch's may, with its FutureWarning.
    Communication: one small reduction, and that of distribute_tensor for each tensor.
    As torch.distributed.tensor.distribute_module, whose parameters are DTensors: take
    that one before fully_shard."""
    mesh = default_mesh() if device_mesh is None else device_mesh
    problem, told = None, None
    try:
        told = _told(module, partition_fn, input_fn, output_fn)
    except (TypeError, RuntimeError, ValueError) as error:
        problem = error
    agree(mesh, problem, told, TITLE)
    placed: dict[int, tuple] = {}  # what two submodules share stays shared
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        _replicate(submodule, mesh, placed)
    if input_fn is not None:
        enter = _with_submodule("input_fn", input_fn)
        module.register_forward_pre_hook(lambda inner, x: enter(inner, x, mesh))
    if output_fn is not None:
        leave = _with_submodule("output_fn", output_fn)
        module.register_forward_hook(lambda inner, x, y: leave(inner, y, mesh))
    module._distribute_module_applied = True  # PyTorch's mark, for both functions
    return module


def _told(module, partition_fn, input_fn, output_fn):
    """What must be the same on all ranks; raises what is wrong on this one."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{TITLE}expected an nn.Module, got {type(module).__name__}")
    if getattr(module, "_distribute_module_applied", False):
        kind = type(module).__name__
        raise RuntimeError(f"{TITLE}this {kind} is distributed already")
    functions = {
        "partition_fn": partition_fn,
        "input_fn": input_fn,
        "output_fn": output_fn,
    }
    for name, function in functions.items():
        if function is not None:
            _check_arguments(name, function)
    state = [*module.named_parameters(), *module.named_buffers()]
    return (
        [name for name, function in functions.items() if function],
        [(name, tuple(x.shape), x.dtype, x.requires_grad) for name, x in state],
    )


def _takes(function, number):
    try:
        inspect.signature(function).bind(*[None] * number)
    except TypeError as error:
        return error
    return None


def _check_arguments(name, function):
    problem = _takes(function, 3)
    if name != "partition_fn" and _takes(function, 2) is None:
        return
    if problem is not None:
        first = "name, submodule" if name == "partition_fn" else "submodule, values"
        raise TypeError(
            f"{TITLE}expected three arguments of {name} ({first}, mesh): {problem}"
        ) from None


def _with_submodule(name, function):
    """PyTorch's older form of the function has no submodule."""
    if _takes(function, 3) is None:
        return function
    warnings.warn(
        f"{TITLE}{name} of two arguments (values, mesh) is deprecated in PyTorch: "
        f"take (submodule, values, mesh)",
        FutureWarning,
        stacklevel=3,
    )
    return lambda submodule, values, mesh: function(values, mesh)


def _replicate(submodule, mesh, placed):
    for key, parameter in submodule._parameters.items():
        if parameter is not None and not is_distributed(parameter):
            if id(parameter) not in placed:
                whole = distribute_tensor(parameter.detach(), mesh)
                made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                # The plain one is kept: its id is another's once it is freed.
                placed[id(parameter)] = parameter, made
            submodule._parameters[key] = placed[id(parameter)][1]
    for key, buffer in submodule._buffers.items():
        if buffer is not None and not is_distributed(buffer):
            if id(buffer) not in placed:
                placed[id(buffer)] = buffer, distribute_tensor(buffer.detach(), mesh)
            submodule._buffers[key] = placed[id(buffer)][1]
