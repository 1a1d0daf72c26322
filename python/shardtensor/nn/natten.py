"""Programs that call NATTEN on ShardTensors."""

import functools
import importlib.util
import inspect
from types import ModuleType

import torch

from shardtensor.nn.neighborhood import neighborhood_attention
from shardtensor.shard_tensor import ShardTensor

NAMES = ("na1d", "na2d", "na3d", "neighborhood_attention_generic")
TAKEN = ("kernel_size", "dilation", "stride", "is_causal", "scale")
# What changes results; other parameters say how a kernel works.
NOT_TAKEN = ("rpb", "additional_keys", "additional_values", "return_lse")


def register_natten(module: ModuleType) -> None:
    """From now on `na1d`, `na2d` and `na3d` of `module` called with ShardTensors are
    neighborhood_attention; parameters go by the names that each function has for
    them. For functions that ask `__torch_function__`, as PhysicsNeMo's do, this
    registers a function handler. NATTEN's own don't ask: in that module, and in
    `functional` and `modules` below it, they are replaced by functions that look
    first, and with them what they and NATTEN's modules call.

        import natten
        shardtensor.nn.functional.register_natten(natten)
    """
    is_natten = module.__name__.partition(".")[0] == "natten"
    below = ("functional", "modules") if is_natten else ()
    for place in (module, *(getattr(module, name, None) for name in below)):
        for name in NAMES:
            function = getattr(place, name, None)
            if function is None:
                continue
            if is_natten:
                setattr(place, name, _looking_first(function))
            else:
                ShardTensor.register_function_handler(function, _handler)


def _handler(function, types, args, kwargs):
    return _attend(function, args, kwargs)


def _looking_first(function):
    @functools.wraps(function)
    def attend(*args, **kwargs):
        if any(isinstance(x, ShardTensor) for x in (*args, *kwargs.values())):
            return _attend(function, args, kwargs)
        return function(*args, **kwargs)

    return attend


def _attend(function, args, kwargs):
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    for name in NOT_TAKEN:
        if given.get(name) is not None and given[name] is not False:
            raise NotImplementedError(
                f"{function.__name__}: {name} does not work on ShardTensors"
            )
    query, key, value = list(given.values())[:3]
    taken = {name: given[name] for name in TAKEN if given.get(name) is not None}
    return neighborhood_attention(query, key, value, **taken)


# ---- NATTEN's kernels on pieces ----------------------------------------------

_library = torch.library.Library("shardtensor", "IMPL")


def use_natten_kernels(key: str) -> None:
    """From now on NATTEN attends to the pieces on devices of a dispatch key."""
    _library.impl("_natten_attention", _attention, key)
    _library.impl("_natten_attention_backward", _attention_backward, key)


def _attention(query, key, value, kernel, dilation, stride, causal, scale):
    from natten.functional import neighborhood_attention_generic

    options = [tuple(x) for x in (kernel, stride, dilation, causal)]
    try:
        out = neighborhood_attention_generic(
            query, key, value, *options, scale=scale, return_lse=True
        )
    except NotImplementedError:  # no kernel of NATTEN's for such tensors
        return []
    return list(out)


def _attention_backward(grad, *inputs):
    operands = [x.detach().requires_grad_() for x in inputs[:3]]
    with torch.enable_grad():
        attended = _attention(*operands, *inputs[3:])
    if not attended:
        return []
    return list(torch.autograd.grad(attended[0], operands, grad))


if importlib.util.find_spec("natten"):
    use_natten_kernels("CUDA")
