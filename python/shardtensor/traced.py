"""Making a ShardTensor inside a function that torch.compile traces.

Layouts are objects of the core's, which no graph can hold: the graph has the layout's
number instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C
from shardtensor.compile import as_written, order_communication
from shardtensor.infer import infer_layout
from shardtensor.placements import check_placements
from shardtensor.spec import ShardTensorSpec

if TYPE_CHECKING:
    from shardtensor.placements import Placements

_layouts: list[_C.ShardSpec] = []
_known: dict[_C.ShardSpec, int] = {}


def is_tracing() -> bool:
    """Whether dynamo follows this call, which it does with Python's own means."""
    return torch.compiler.is_dynamo_compiling()


def is_known_alone(sharding_shapes: object, placements: Placements | None) -> bool:
    """Whether a rank knows the layout without asking the others. A compiler must not
    ask: it would keep an answer that is another one in the next call."""
    if sharding_shapes != "infer" or placements is None:
        return True
    return not any(placement.is_shard() for placement in placements)


def is_traceable(
    stride: Sequence[int] | None, shape: Sequence[int] | None, told_more: bool
) -> bool:
    """Whether a graph can do what from_local is told: of DTensor's arguments the
    shape, and the strides of contiguous memory."""
    if told_more or stride is None:
        return not told_more
    expected = 1
    for extent, step in zip(reversed(shape or ()), reversed(stride)):
        if extent != 1 and step != expected:
            return False
        expected *= max(extent, 1)
    return shape is not None


def between_graphs(reason: str) -> Callable:
    """The compiler ends its graph before such a function, or raises for `reason`."""

    def mark(function):
        function._torchdynamo_disable_msg = reason
        return as_written(function)

    return mark


def from_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    sharding_shapes: str | Mapping[int, Sequence[Sequence[int]]],
    global_shape: Sequence[int] | None,
) -> torch.Tensor:
    """See ShardTensor.from_local."""
    shape = _numbers(local.shape)
    pieces = sharding_shapes
    if not isinstance(pieces, str):
        pieces = [
            (axis, [_numbers(piece) for piece in along])
            for axis, along in sharding_shapes.items()
        ]
    wanted = None if global_shape is None else _numbers(global_shape)
    number = _number_of_layout(shape, mesh, placements, pieces, wanted)
    return _in_numbered_layout(local, shape, number)


if torch.__version__ < "2.12":  # which takes no other object for a constant
    torch.utils._pytree.register_constant(ShardTensorSpec)


def from_spec(local: torch.Tensor, spec: ShardTensorSpec) -> torch.Tensor:
    """See ShardTensor.from_spec."""
    return _in_numbered_layout(local, _numbers(local.shape), _number_of_spec(spec))


def _numbers(shape: Sequence[int]) -> list[int]:
    """A size that the compiler would keep open becomes a number in range()."""
    return [len(range(extent)) for extent in shape]


def _while_tracing(function: Callable) -> Callable:
    """The compiler calls it, and takes what it returns for a constant."""
    function._dynamo_marked_constant = True
    return function


def one_node(function: Callable) -> Callable:
    """Of tensors and plain values, which a graph can hold: a call is a node of it."""

    @_while_tracing
    def allow():
        torch._dynamo.allow_in_graph(function)
        order_communication()

    @functools.wraps(function)
    def call(*args, **kwargs):
        if is_tracing():
            allow()
        return function(*args, **kwargs)

    return call


@_while_tracing
def _number_of_layout(shape, mesh, placements, pieces, global_shape):
    if pieces == "infer":
        pieces = "chunk"  # nothing is cut, see is_known_alone
    layout = infer_layout(
        "from_local",
        torch.empty(shape, device="meta"),
        mesh,
        check_placements(placements, mesh.ndim),
        pieces if isinstance(pieces, str) else dict(pieces),
        global_shape,
    )
    return _number_of(layout)


@_while_tracing
def _number_of_spec(spec: ShardTensorSpec) -> int:
    return _number_of(spec._core)


def _number_of(layout: _C.ShardSpec) -> int:
    torch._dynamo.allow_in_graph(_in_numbered_layout)
    order_communication()
    if layout not in _known:
        _known[layout] = len(_layouts)
        _layouts.append(layout)
    return _known[layout]


def _in_numbered_layout(local, shape, number):
    if any(isinstance(extent, torch.SymInt) for extent in local.shape):
        local = local.view(shape)
    return _C.from_local(local, _layouts[number])
