"""Many values, one all-reduce: for logging, not for gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardtensor import _C, _ops
from shardtensor.agree import agree_on_call

# With the library's names.
_OPS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
)


class FusedWork:
    """What fused_all_reduce(async_op=True) gives beside its result."""

    def __init__(self, work: dist.Work | None = None, finish: Callable = lambda: None):
        self._work = work
        self._finish = finish

    def wait(self) -> bool:
        """Returns once the result's tensors hold the reduced values."""
        if self._work is not None:
            self._work.wait()
            self._finish()
            self._work = None
        return True

    def is_completed(self) -> bool:
        """Whether wait() would return at once."""
        return self._work is None or self._work.is_completed()


def fused_all_reduce(
    tensors: Any,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    buffer_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    async_op: bool = False,
) -> Any:
    """Every tensor of a container reduced over the ranks, by one message. A
    tensor gives a tensor, a mapping a dict in its own order, another sequence a
    list, a TensorDict a TensorDict, in any nest; leaves keep shape, dtype and
    device, and share nothing with the inputs. A ShardTensor or DTensor gives a plain
    tensor: its whole value is what each rank has, which costs what full_tensor()
    does for each. Ranks may insert keys in any order. `op`: SUM, AVG, MAX or MIN.

    The values travel in one buffer of `buffer_dtype` (default: the leaves'
    promoted dtype, floats as fp32 at least, averages of integers as int64; integers
    beside floats need it said), on `device` (default: the first leaf's). Averages of
    integers are rounded towards zero, one of booleans is whether all are true. With
    `async_op` the result is (container, work): the tensors hold this rank's values
    until work.wait(), then the reduced ones. Ranks whose containers differ all raise.
    Not differentiable.

        fused_all_reduce({"loss": loss, "error": error}, op=dist.ReduceOp.AVG)
    """
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    ranks = 1 if group is None else group.size()
    told, problem = "", None
    found: list[torch.Tensor] = []
    leaves: dict[tuple, torch.Tensor] = {}
    cut: dict[tuple, Any] = {}
    try:
        reduce = _name(op)
        result = _copy(tensors, leaves, cut)
        found = list(leaves.values())
        if buffer_dtype is None and not torch.compiler.is_compiling():
            buffer_dtype = _C.fused_dtype(found, reduce)
        told = _told(reduce + ", async" * async_op, leaves, cut, buffer_dtype)
        place = _place(found, device)
    except Exception as error:  # noqa: BLE001  whatever it is, others wait
        problem = error
    if ranks > 1:
        buffer = None if problem else torch.empty(0, device=place)
        agree_on_call(group, told, problem, buffer)
    elif problem:
        raise problem
    for path, x in cut.items():
        leaves[path].copy_(x.full_tensor())
    if ranks == 1 or not found:
        return (result, FusedWork()) if async_op else result
    if async_op:
        return result, _start(found, op, group, buffer_dtype, place)
    reduced = _ops.fused_all_reduce(
        found, reduce, group.group_name, buffer_dtype=buffer_dtype, device=place
    )
    for leaf, value in zip(found, reduced, strict=True):
        leaf.copy_(value)
    return result


def _place(leaves, device):
    try:
        first = leaves[0].device if leaves else torch.device("cpu")
        place = first if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"fused_all_reduce: device: {error}") from None
    if place.type == "meta" and not torch.compiler.is_compiling():
        raise ValueError("fused_all_reduce: device: expected one with memory, got meta")
    return place


def _start(leaves, op, group, dtype, device):
    """The same, on its way."""
    averages = _is(op, dist.ReduceOp.AVG)
    reduce = "sum" if averages else _name(op)
    dtype = dtype or _C.fused_dtype(leaves, _name(op))
    buffer = _C.fuse(leaves, dtype, device)
    wire, sent = _C.to_wire(buffer, reduce)
    how = next(known for known, name in _OPS if name == sent)
    work = dist.all_reduce(wire, how, group, async_op=True)

    def finish():
        total = _C.from_wire(wire, buffer, reduce)
        total = _C.average(total, group.size()) if averages else total
        for leaf, value in zip(leaves, _C.split_like(total, leaves), strict=True):
            leaf.copy_(value)

    return FusedWork(work, finish)


def _told(how, leaves, cut, dtype):
    """What all ranks must have alike."""
    shapes = [
        f"{'.'.join(map(str, path))} {list(x.shape)}"
        + (f" of a {type(cut[path]).__name__}" if path in cut else "")
        for path, x in leaves.items()
    ]
    return f"fused_all_reduce ({how}) as {dtype}: {'; '.join(shapes)}"


def _name(op):
    for known, name in _OPS:
        if _is(op, known):
            return name
    raise ValueError(f"fused_all_reduce: op: expected SUM, AVG, MAX or MIN, got {op}")


def _is(op, known):
    # torch.compile cannot look into the values, which most often are these.
    return op is known or (not torch.compiler.is_compiling() and op == known)


def _copy(value, leaves, cut, path=()):
    """`value` with each tensor cloned; the clones in `leaves`, by their path, in an
    order that all ranks agree on: mappings by key. Of what lies on several ranks, in
    `cut`, memory for the whole."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):
            cut[path] = value.detach()
            options = {"dtype": value.dtype, "device": value.device}
            leaves[path] = torch.empty(value.shape, **options)
            return leaves[path]
        if value.layout != torch.strided:
            raise TypeError(
                "fused_all_reduce: expected strided tensors, got one of layout "
                f"{value.layout}"
            )
        leaves[path] = value.detach().clone(memory_format=torch.contiguous_format)
        return leaves[path]
    if _is_tensordict(value):
        made = {
            key: _copy(value[key], leaves, cut, (*path, key))
            for key in sorted(value.keys())
        }
        made = {key: made[key] for key in value.keys()}  # noqa: SIM118
        kind = sys.modules["tensordict"].TensorDict
        return kind(made, batch_size=value.batch_size, device=value.device)
    if isinstance(value, Mapping):
        made = {
            key: _copy(value[key], leaves, cut, (*path, key)) for key in sorted(value)
        }
        return {key: made[key] for key in value}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_copy(entry, leaves, cut, (*path, i)) for i, entry in enumerate(value)]
    raise TypeError(
        "fused_all_reduce: expected tensors, mappings, sequences or TensorDicts, got "
        f"a {type(value).__name__}"
    )


def _is_tensordict(value):
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(value, tensordict.TensorDictBase)
