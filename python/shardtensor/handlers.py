"""Python functions that stand in for operators on ShardTensors.

Function handlers see a call as it was written (torch.dot, F.conv2d, a custom
operator), above autograd; dispatch handlers see one ATen operator below
autograd, which differentiates it by its own formula. Inside its own handler a
function means the built-in behaviour again.

__torch_function__ costs 1-3 us per call, so the class has it only while
function handlers are registered.
"""

import sys
import threading
from collections.abc import Callable

import torch

from shardtensor import _C

# fn(func, types, args, kwargs) -> result
FunctionHandler = Callable[[Callable, tuple, tuple, dict], object]

tensor_class: type | None = None  # set by shard_tensor.py

_by_function: dict[Callable, FunctionHandler] = {}
_by_name: dict[str, FunctionHandler] = {}
_by_operator: dict[torch._ops.OpOverload, Callable] = {}
_by_operator_name: dict[str, Callable] = {}  # str(operator), "aten.add.Tensor"
_serving: dict[torch._ops.OpOverload, Callable] = {}  # what both come to
_names: dict[Callable, str] = {}  # str(func) is slow
_running = threading.local()


def register_function_handler(cls, func: Callable, handler: FunctionHandler) -> None:
    """`handler(func, types, args, kwargs)` serves calls of `func` that have a
    ShardTensor among their arguments. torch.add and torch.Tensor.add are two
    functions; a torch.library.custom_op is taken by its operator."""
    _by_function[_key(func)] = _callable(handler)
    _install()


def register_named_function_handler(cls, name: str, handler: FunctionHandler) -> None:
    """The same for the function whose str() is `name`: "mylib.op.default"."""
    _by_name[name] = _callable(handler)
    _install()


def register_dispatch_handler(cls, op: torch._ops.OpOverload, handler) -> None:
    """`handler(*args, **kwargs)` serves the ATen operator `op`, such as
    torch.ops.aten.add.Tensor, below autograd. One that TorchScript alone has,
    such as torch.ops.aten.add.default, is never called."""
    _serve(op, handler)
    _by_operator[op] = handler


def unregister_function_handler(cls, func: Callable) -> None:
    """`func` goes its usual way again. ValueError where it has no handler."""
    if _by_function.pop(_key(func), None) is None:
        raise ValueError(f"there is no function handler for {func}")
    _install()


def unregister_named_function_handler(cls, name: str) -> None:
    """The same by name. ValueError where that has no handler."""
    if _by_name.pop(name, None) is None:
        raise ValueError(f"there is no function handler named {name!r}")
    _install()


def unregister_dispatch_handler(cls, op: torch._ops.OpOverload) -> None:
    """`op` has its usual rule again, also where it had no handler."""
    _stop_serving(op)
    _by_operator.pop(op, None)


class Registries(type(torch.Tensor)):
    """What is registered, as dicts on the tensor's class under PhysicsNeMo's
    names. Tests copy one, register, and assign the copy back: then exactly its
    handlers are active. A dict that is changed in place is not looked at."""

    @property
    def _function_registry(cls) -> dict[Callable, FunctionHandler]:
        return _by_function

    @_function_registry.setter
    def _function_registry(cls, handlers):
        _replace(_by_function, {_key(f): _callable(h) for f, h in handlers.items()})
        _install()

    @property
    def _named_function_registry(cls) -> dict[str, FunctionHandler]:
        return _by_name

    @_named_function_registry.setter
    def _named_function_registry(cls, handlers):
        _replace(_by_name, handlers)
        _install()

    @property
    def _dispatch_registry(cls) -> dict[torch._ops.OpOverload, Callable]:
        return _by_operator

    @_dispatch_registry.setter
    def _dispatch_registry(cls, handlers):
        _replace(_by_operator, handlers)
        _serve_registered()

    @property
    def _dispatch_registry_by_name(cls) -> dict[str, Callable]:
        """By str(operator): "aten.add.Tensor"."""
        return _by_operator_name

    @_dispatch_registry_by_name.setter
    def _dispatch_registry_by_name(cls, handlers):
        _replace(_by_operator_name, handlers)
        _serve_registered()


def _serve_registered():
    """Makes exactly the registered dispatch handlers active."""
    named = {_operator(name): handler for name, handler in _by_operator_name.items()}
    wanted = {**named, **_by_operator}
    for op in [op for op in _serving if op not in wanted]:
        _stop_serving(op)
    for op, handler in wanted.items():
        if _serving.get(op) is not handler:
            _serve(op, handler)


def _serve(op, handler):
    name = _operator_name(op)
    if torch._C._dispatch_has_kernel(name):
        _C.set_handler(name, _callable(handler))
    _serving[op] = _callable(handler)
    _forget_compiled()


def _stop_serving(op):
    name = _operator_name(op)
    if torch._C._dispatch_has_kernel(name) or op not in _serving:
        _C.remove_handler(name)
    _serving.pop(op, None)
    _forget_compiled()


def _replace(registry, handlers):
    handlers = dict(handlers)
    registry.clear()
    registry.update(handlers)


def _operator(name):
    """torch.ops.aten.add.Tensor of "aten.add.Tensor"."""
    found = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _key(func):
    return getattr(func, "_opoverload", func)


def _callable(handler):
    if not callable(handler):
        raise TypeError(f"expected a function as handler, got {handler!r}")
    return handler


def _operator_name(op):
    if not isinstance(op, torch._ops.OpOverload):
        raise TypeError(
            f"expected an operator overload such as torch.ops.aten.add.Tensor, got {op}"
        )
    return op.name()


def _install():
    function = torch._C._disabled_torch_function_impl
    if _by_function or _by_name:
        function = classmethod(_torch_function)
    tensor_class.__torch_function__ = function
    _names.clear()
    _forget_compiled()


def _forget_compiled():
    """Compiled code has the old handlers built in."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def _find(func):
    handler = _by_function.get(func)
    if handler is None and _by_name:
        name = _names.get(func)
        if name is None:
            name = _names[func] = str(func)
        handler = _by_name.get(name)
    return handler


def _torch_function(cls, func, types, args=(), kwargs=None):
    kwargs = kwargs or {}
    handler = _find(func)
    running = _running.__dict__.setdefault("functions", [])
    if handler is None or func in running:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    running.append(func)
    try:
        return handler(func, types, args, kwargs)
    finally:
        running.pop()
