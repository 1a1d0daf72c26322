"""Tensors that a program makes to fill them: no memory until it writes."""

from __future__ import annotations

import contextlib
import functools
import numbers
import sys
from collections.abc import Callable, Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import parameter
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from shardtensor import _C
from shardtensor.device_mesh import core_mesh, default_mesh
from shardtensor.modes import get_gradient_policy, gradient_policy

# What a factory fills its tensor with; None: the argument fill_value. An
# uninitialised tensor must be the same on all ranks, too.
_FACTORIES = {torch.zeros: 0, torch.ones: 1, torch.empty: 0, torch.full: None}
_FROM_TENSOR = {
    torch.zeros_like: 0,
    torch.ones_like: 1,
    torch.empty_like: 0,
    torch.full_like: None,
    torch.Tensor.new_zeros: 0,
    torch.Tensor.new_ones: 1,
    torch.Tensor.new_empty: 0,
    torch.Tensor.new_full: None,
}


@contextlib.contextmanager
def new_tensors_on(device_mesh: DeviceMesh | None = None) -> Iterator[None]:
    """Within it `torch.zeros`, `ones`, `full`, `empty`, their `_like` and
    `new_` forms on plain tensors, and `repeat` of a plain 0-d one, give
    ShardTensors: constants without memory, Replicate until a ShardTensor is
    written into them, whose layout they then take. For models that make a tensor
    and fill it, around forward:

        with shardtensor.new_tensors_on(mesh):
            y = model(x)

    Without it such a tensor is plain, and takes the whole value on every rank.
    The results are the same. What torch.utils.checkpoint recomputes in backward is
    recomputed within it. Also a decorator. Default: DistributedManager's mesh.
    Tensors for other devices than the mesh's stay plain, and so do those that a
    compiled function makes, one under a transform of torch.func, and this package or
    torch.distributed for its own use."""
    hold_in_checkpoints()
    with _Constants(default_mesh() if device_mesh is None else device_mesh):
        yield


def _active() -> list[_Constants]:
    """Outermost first."""
    stack = _get_current_function_mode_stack()
    return [mode for mode in stack if isinstance(mode, _Constants)]


@functools.cache
def hold_in_checkpoints() -> None:
    """Backward runs without the modes of forward, and what a checkpoint recomputes
    there would be computed otherwise: gathered."""
    from torch.utils import checkpoint

    frame, function = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction
    begin, forward = frame.__init__, function.forward

    @functools.wraps(begin)
    def begin_within(self, recompute, *args, **kwargs):
        begin(self, _within_modes(recompute), *args, **kwargs)

    @functools.wraps(forward)
    def forward_within(ctx, run, *args):
        return forward(ctx, _within_modes(run), *args)

    frame.__init__ = begin_within
    function.forward = staticmethod(forward_within)


def _within_modes(run: Callable) -> Callable:
    """`run` within the modes that are active now, and under this gradient policy."""
    modes, policy = _active(), get_gradient_policy()

    @functools.wraps(run)
    def run_within(*args, **kwargs):
        with contextlib.ExitStack() as stack:
            stack.enter_context(gradient_policy(policy))
            for mode in modes if _active() != modes else ():
                stack.enter_context(mode)
            return run(*args, **kwargs)

    return run_within


def _is_traced() -> bool:
    """A compiler and the transforms of torch.func follow plain tensors only."""
    transforms = torch._C._functorch.peek_interpreter_stack()
    return torch.compiler.is_compiling() or transforms is not None


# Where PyTorch makes the memory of what is a plain tensor already: of parameters
# and buffers of lazy modules, and of tensors that are loaded or copied.
_PLAIN_MEMORY = {
    parameter.UninitializedTensorMixin.materialize.__code__,
    parameter.UninitializedParameter.__new__.__code__,
    parameter.UninitializedBuffer.__new__.__code__,
    torch._utils._rebuild_tensor.__code__,
}
# Modules that make a rank's own: pieces, FSDP's buffers, numbers that travel.
_OF_ONE_RANK = ("shardtensor.", "torch.distributed.")


def _is_made_plain(func: Callable) -> bool:
    """Whether the factory that a mode looks at was called for a plain tensor."""
    frame = sys._getframe(2)
    while frame and frame.f_code.co_name == "__torch_function__":  # other modes
        frame = frame.f_back
    if frame is None:
        return False
    if frame.f_globals.get("__name__", "").startswith(_OF_ONE_RANK):
        return True
    return func is torch.empty and frame.f_code in _PLAIN_MEMORY


# Not a dispatch key: that would also see the tensors that PyTorch's kernels,
# autograd and compiled graphs make for themselves.
class _Constants(TorchFunctionMode):
    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self._mesh = core_mesh(mesh)
        self._device_type = mesh.device_type

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (
            (func in _FACTORIES or func in _FROM_TENSOR)
            and not _is_traced()
            and not _is_made_plain(func)
        ):
            made = self._constant(func, args, kwargs)
            if made is not None:
                return made
        elif func is torch.Tensor.repeat and self._is_number(args[0]):
            return self._repeated(*args, **kwargs)
        return func(*args, **kwargs)

    def _is_number(self, x):
        return (
            type(x) is torch.Tensor
            and x.dim() == 0
            and x.device.type == self._device_type
            and not x.requires_grad
            and not _is_traced()
        )

    def _repeated(self, x, *sizes, **named):
        with torch._C.DisableTorchFunction():  # another mode around this one
            told = x.to("meta").repeat(*sizes, **named)
            value = x.detach().clone()
        return _C.constant(value, self._mesh, list(told.shape), False)

    def _constant(self, func, args, kwargs):
        """None where the factory itself has to make the tensor."""
        device = self._device(func, args, kwargs)
        fill = _FACTORIES.get(func, _FROM_TENSOR.get(func))
        if fill is None:
            fill = kwargs.get("fill_value", args[-1] if args else None)
        if (
            device is None
            or device.type != self._device_type
            or not isinstance(fill, numbers.Number)
            or kwargs.get("out") is not None
            or kwargs.get("pin_memory")
        ):
            return None
        with torch._C.DisableTorchFunction():  # another mode around this one
            # Sizes, dtype and errors are PyTorch's.
            told = func(*args, **{**kwargs, "device": "meta"})
            if told.layout != torch.strided or not told.is_contiguous():
                return None
            value = torch.full((), fill, dtype=told.dtype, device=device)
        made = _C.constant(value, self._mesh, list(told.shape), fill == 0)
        return made.requires_grad_(told.requires_grad)

    def _device(self, func, args, kwargs):
        """None for what is made from another tensor than a plain one."""
        device = kwargs.get("device")
        if func in _FROM_TENSOR:
            like = args[0] if args else kwargs.get("input")
            if type(like) not in (torch.Tensor, torch.nn.Parameter):
                return None
            device = like.device if device is None else device
        return torch.get_default_device() if device is None else torch.device(device)
