"""What torch.compile must know of the communication operators."""

import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.fx.traceback
from torch.fx.node import has_side_effect

_ordered = False


def communicates(operator) -> bool:
    """Whether an operator of this library sends messages: it takes their group."""
    return any(argument.name == "group" for argument in operator._schema.arguments)


def as_written(function: Callable) -> Callable:
    """For what PyTorch or the core call between the graphs of a compiled program. The
    compiler would take these frames for the program's."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    strategy = frames._FrameExecStrategy(skip, skip)
    frames.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True
    return function


def order_communication() -> None:
    """Has inductor run the communication operators in the order of the graph,
    as it does c10d's. They are pure functions, which it may otherwise move, by
    sizes that differ between ranks for one: then ranks wait for each other. And
    has it join the sums of gradients, see join_sums.py. Called while a
    ShardTensor is traced; cheap."""
    global _ordered
    _keep_all()
    if "torch._functorch.compile_utils" in sys.modules:
        _keep_apart()
    if not _ordered and "torch._inductor.lowering" in sys.modules:
        from shardtensor import graph_order, join_sums

        _ordered = True
        graph_order.install()
        join_sums.install()
        for operator in _communication():
            _lower_as_collective(operator)


@functools.cache
def _keep_all() -> None:
    """What nobody needs is dropped from a graph. A rank may have no use for what came
    with a message, where its piece is empty; its peers still wait for it."""
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    for operator in _communication():
        has_side_effect(operator)
        torch.library.register_torch_dispatch(
            operator, ProxyTorchDispatchMode, _trace_in_its_pass
        )


def _trace_in_its_pass(mode, operator, types, args=(), kwargs=None):
    """Adds a call to the graph that is traced. In backward it stays there: by the
    sizes of its piece one rank's partitioner would otherwise move to forward what
    needs no gradient, messages included, and another's would not."""
    meta = torch.fx.traceback.current_meta
    if meta.get("partitioner_tag") != "is_backward":
        return mode.__torch_dispatch__(operator, types, args, kwargs)
    meta["partitioner_tag"] = "must_be_in_backward"
    try:
        return mode.__torch_dispatch__(operator, types, args, kwargs)
    finally:
        meta["partitioner_tag"] = "is_backward"


@functools.cache
def _keep_apart() -> None:
    """Equal calls in a graph are made one, but for random ones. Two exchanges may be
    equal on one rank, where the same goes and comes, and not on its peer. And what is
    kept without a use would run in both passes, where backward has its input."""
    from torch._functorch import compile_utils, partitioners

    random = compile_utils.rand_ops
    random += [operator.overloadpacket for operator in _communication()]
    must_be_in_forward = partitioners._must_be_in_forward
    partitioners._must_be_in_forward = lambda node: (
        must_be_in_forward(node) or _was_traced_in_forward(node)
    )


def _was_traced_in_forward(node) -> bool:
    """What a checkpoint repeats runs in both passes, as its other operators do."""
    return (
        node.target in _communication()
        and node.meta.get("partitioner_tag") == "is_forward"
        and "recompute" not in node.meta
    )


@functools.cache
def _communication():
    """The operators of this library that send messages."""
    operators = []
    for name in torch._C._dispatch_get_all_op_names():
        library, _, operator = name.partition("::")
        if library == "shardtensor":
            operators.append(getattr(torch.ops.shardtensor, operator).default)
    return [operator for operator in operators if communicates(operator)]


def _lower_as_collective(operator):
    from torch._inductor import ir, lowering

    @lowering.register_lowering(operator, type_promotion_kind=None)
    def lower(x, *args):
        result = ir._CollectiveKernel.create_out_of_place(operator, x, *args)
        if isinstance(result, list):
            return [ir.TensorBox.create(part) for part in result]
        return ir.TensorBox.create(result)


@functools.cache
def library_digest() -> str:
    """Changes with the library: a compiled graph holds its exchange plans, in the
    places that this file gives them."""
    digest = hashlib.blake2b(digest_size=16)
    for source in (*sorted(Path(__file__).parent.glob("*.so")), Path(__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()
