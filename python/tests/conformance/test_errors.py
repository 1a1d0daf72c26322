"""Arguments that PyTorch refuses, by its own list of them, are refused on shards: the
same kind of error on every rank, no crash and nobody who waits."""

import warnings

import torch
from ranks import ranks, shard
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_flatten, tree_unflatten

# One device's errors of an assertion inside of a kernel, or of an out= whose dtype we
# convert to.
EXCEPT = {("narrow_copy", 1), ("multinomial", 2)}


def refused():
    """Name, function, and arguments for which it raises."""
    from operator_samples import op_db

    for info in op_db:
        inputs = info.error_inputs("cpu") if info.error_inputs_func else ()
        for number, given in enumerate(inputs):
            sample = given.sample_input
            if (info.name, number) not in EXCEPT:
                arguments = (sample.input, *sample.args), sample.kwargs
                yield f"{info.name} #{number}", info.op, arguments


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


@ranks(2)
def test_what_pytorch_refuses(mesh):
    warnings.simplefilter("ignore")
    wrong, count = [], 0
    for name, fn, arguments in refused():
        leaves, tree = tree_flatten(arguments)
        expected = error_of(fn, tree_unflatten(copies(leaves), tree))
        for cut in cuts_of(leaves) if expected else ():
            given = copies(leaves)
            for place, dim in cut.items():
                given[place] = shard(given[place].detach(), mesh, [Shard(dim)])
            error = error_of(fn, tree_unflatten(given, tree))
            count += 1
            if not isinstance(error, type(expected)):
                wrong.append((name, cut, repr(expected)[:200], repr(error)[:200]))
    assert not wrong, "\n".join(map(str, wrong))
    assert count > 1500
