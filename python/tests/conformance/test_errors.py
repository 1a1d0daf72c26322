"""Arguments that PyTorch refuses, by its own lists of them, are refused on shards: the
same kind of error on every rank, no crash and nobody who waits."""

import itertools
import warnings

import pytest
import rig
import torch
from oracle import WHOLE
from ranks import ranks, shard
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_flatten, tree_unflatten

PRELOAD = ("operator_samples", "torch.testing._internal.common_modules")
# One device's errors of an assertion inside of a kernel, or of an out= whose dtype we
# convert to.
EXCEPT = {("narrow_copy", 1), ("multinomial", 2)}


def refused():
    """Name, function, and arguments for which it raises; an eighth, but for a whole
    sweep."""
    every = itertools.chain(refused_by_operators(), refused_by_modules())
    return itertools.islice(every, 0, None, 1 if WHOLE else 8)


def refused_by_operators():
    from operator_samples import op_db

    for info in op_db:
        inputs = info.error_inputs("cpu") if info.error_inputs_func else ()
        for number, given in enumerate(inputs):
            sample = given.sample_input
            if (info.name, number) not in EXCEPT:
                arguments = (sample.input, *sample.args), sample.kwargs
                yield f"{info.name} #{number}", info.op, arguments


def refused_by_modules():
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if not (listed := info.module_error_inputs_func):
            continue
        for number, given in enumerate(listed(info, "cpu", torch.float64, False, True)):
            new, forward = (
                given.module_error_input.constructor_input,
                given.module_error_input.forward_input,
            )
            if forward is not None:
                try:
                    module = info.module_cls(*new.args, **new.kwargs)
                except (RuntimeError, ValueError):
                    continue  # refused before anything is called
                arguments = forward.args, forward.kwargs
                yield f"{info.name} #{number}", module, arguments


def error_of(fn, arguments):
    args, kwargs = arguments
    try:
        fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  compared with another
        return error
    return None


def cuts_of(leaves):
    """{place of a tensor: dim}: each alone on each dim, then all on their first."""
    tensors = [i for i, x in enumerate(leaves) if can_be_cut(x)]
    yield from ({i: dim} for i in tensors for dim in range(leaves[i].dim()))
    if len(tensors) > 1:
        yield dict.fromkeys(tensors, 0)


def can_be_cut(x):
    of_kind = isinstance(x, torch.Tensor) and x.layout == torch.strided
    return of_kind and x.dim() > 0 and x.device.type == "cpu"


def copies(leaves):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]


@ranks(2, timeout=120)
def test_what_pytorch_refuses(mesh):
    check_what_pytorch_refuses(mesh)


@pytest.mark.tail
@ranks(3, "2x2", timeout=300)
def test_what_pytorch_refuses_on_more_ranks(mesh):
    check_what_pytorch_refuses(mesh)


def check_what_pytorch_refuses(mesh):
    if rig.DEVICE == "cuda":
        pytest.skip("a wrong index there ends what a process can do")
    warnings.simplefilter("ignore")
    wrong, count = [], 0
    for name, fn, arguments in refused():
        leaves, tree = tree_flatten(arguments)
        expected = error_of(fn, tree_unflatten(copies(leaves), tree))
        for cut in cuts_of(leaves) if expected else ():
            given = copies(leaves)
            for place, dim in cut.items():
                given[place] = shard(
                    given[place].detach(), mesh, [Shard(dim)] * mesh.ndim
                )
            error = error_of(fn, tree_unflatten(given, tree))
            count += 1
            if not isinstance(error, type(expected)):
                wrong.append((name, cut, repr(expected)[:200], repr(error)[:200]))
    assert not wrong, "\n".join(map(str, wrong))
    assert count > (1500 if WHOLE else 180)
