"""What torch.compile must know of the communication operators."""

import contextlib
import functools
import hashlib
import sys
from pathlib import Path

import torch
import torch.fx.traceback

_ordered = False


def communicates(operator) -> bool:
    """Whether an operator of this library sends messages: it takes their group."""
    return any(argument.name == "group" for argument in operator._schema.arguments)


def order_communication() -> None:
    """Has inductor run the communication operators in the order of the graph,
    as it does c10d's. They are pure functions, which it may otherwise move, by
    sizes that differ between ranks for one: then ranks wait for each other. And
    has it join the sums of gradients, see join_sums.py. Called while a
    ShardTensor is traced; cheap."""
    global _ordered
    if "torch._functorch.compile_utils" in sys.modules:
        _keep_apart()
    if not _ordered and "torch._inductor.lowering" in sys.modules:
        from shardtensor import join_sums

        _ordered = True
        join_sums.install()
        for operator in filter(communicates, _operators()):
            _lower_as_collective(operator)


@functools.cache
def _keep_apart() -> None:
    """Equal calls in a graph are made one, but for random ones. Two exchanges may be
    equal on one rank, where the same goes and comes, and not on its peer."""
    from torch._functorch import compile_utils

    random = compile_utils.rand_ops
    random += [op.overloadpacket for op in filter(communicates, _operators())]


def _operators():
    for name in torch._C._dispatch_get_all_op_names():
        library, _, operator = name.partition("::")
        if library == "shardtensor":
            yield getattr(torch.ops.shardtensor, operator).default


def _lower_as_collective(operator):
    from torch._inductor import ir, lowering

    @lowering.register_lowering(operator, type_promotion_kind=None)
    def lower(x, *args):
        result = ir._CollectiveKernel.create_out_of_place(operator, x, *args)
        if isinstance(result, list):
            return [ir.TensorBox.create(part) for part in result]
        return ir.TensorBox.create(result)


@contextlib.contextmanager
def staying_in_backward():
    """What is traced inside, if that is in backward, stays there. By the sizes
    of its piece one rank's partitioner would otherwise move to forward what
    needs no gradient, messages included, and another's would not."""
    meta = torch.fx.traceback.current_meta
    if meta.get("partitioner_tag") != "is_backward":
        yield
        return
    meta["partitioner_tag"] = "must_be_in_backward"
    try:
        yield
    finally:
        meta["partitioner_tag"] = "is_backward"


@functools.cache
def library_digest() -> str:
    """Changes with the library: a compiled graph holds its exchange plans."""
    digest = hashlib.blake2b(digest_size=16)
    for library in sorted(Path(__file__).parent.glob("*.so")):
        digest.update(library.read_bytes())
    return digest.hexdigest()
