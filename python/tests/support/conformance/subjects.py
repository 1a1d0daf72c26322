"""What is called: every operator of PyTorch's op_db, every module of module_db.

A subject is a name; its samples are the same on every rank and in every run.
"""

import functools
import warnings

import rig
import torch
from torch.utils._pytree import tree_map

from conformance.sample import Sample, in_place, seed_everything

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from operator_samples import op_db
    from torch.testing._internal.common_modules import module_db

# The first that an operator takes is swept in full, the others by few samples.
DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
FURTHER = (torch.complex128, torch.int64)
# Results that have values: without dropout a GPU's generator leaves its state alone.
DEFINED = {"torch.ops.aten._efficient_attention_forward": 2}


def spread(items, count, turn):
    """At most `count` of the items, evenly spread; others of them for another `turn`
    from 0 to 1."""
    items = list(items)
    step = max(len(items) / count, 1) if count else 1
    return [items[int((i + turn) * step)] for i in range(min(len(items), count))]


def operator_samples(info, count, turn):
    taken = info.supported_dtypes(rig.DEVICE)
    first = next((d for d in DTYPES if d in taken), None)
    if first is not None:
        yield from _samples_of(info, first, count, turn)
    for dtype in FURTHER:
        if dtype in taken and dtype != first:
            yield from _samples_of(info, dtype, -(-count // 4), turn)
    yield from _error_samples(info, count, turn)


def _samples_of(info, dtype, count, turn):
    differentiable = dtype.is_floating_point or dtype.is_complex
    needs_grad = differentiable and info.supports_autograd
    seed_everything()
    try:
        found = list(info.sample_inputs(rig.DEVICE, dtype, requires_grad=needs_grad))
    except (IndexError, RuntimeError, TypeError):
        return  # it needs another device or another dtype
    numbered = [(i, s) for i, s in enumerate(found) if _can_be_cut(s)]
    for i, s in spread(numbered, count, turn):
        label = f"{str(dtype)[6:]} sample {i}"
        call = functools.partial(_defined, DEFINED.get(info.name), info.op)
        yield Sample(label, call, (s.input, *s.args), s.kwargs)
        yield from _variants(info, s, label)


def _defined(count, op, *args, **kwargs):
    """The first `count` results, or all."""
    result = op(*args, **kwargs)
    return result[:count] if count else result


def _can_be_cut(sample):
    return Sample("", None, (sample.input, *sample.args), sample.kwargs).tensors()


def _variants(info, sample, label):
    inplace = info.get_inplace()
    if (
        inplace
        and isinstance(sample.input, torch.Tensor)
        and not sample.broadcasts_input
    ):
        call = functools.partial(in_place, inplace)
        yield Sample(
            label + ", in place", call, (sample.input, *sample.args), sample.kwargs
        )
    if info.supports_out:
        outs = _outs(info, sample)
        if outs is not None:
            kwargs = {**sample.kwargs, "out": outs}
            call = functools.partial(_detached, info.op)
            yield Sample(label + ", out=", call, (sample.input, *sample.args), kwargs)


def _detached(op, *args, **kwargs):
    with torch.no_grad():  # out= has no derivative
        return op(*args, **kwargs)


def _outs(info, sample):
    """Tensors like the call's results, filled with something else; None where
    the call takes no such out=."""
    try:
        with torch.no_grad():
            result = info.op(sample.input, *sample.args, **sample.kwargs)
            outs = tree_map(lambda r: torch.full(r.shape, 7, dtype=r.dtype), result)
            info.op(sample.input, *sample.args, **sample.kwargs, out=outs)
    except (AttributeError, RuntimeError, TypeError, ValueError, IndexError):
        return None
    return outs


def _error_samples(info, count, turn):
    """Calls that one device refuses: ranks must refuse them, too."""
    if info.error_inputs_func is None or rig.DEVICE == "cuda":
        return  # a wrong index there ends what a process can do
    seed_everything()
    found = spread(info.error_inputs(rig.DEVICE), count, turn)
    for i, error in enumerate(found):
        s = error.sample_input
        yield Sample(f"error sample {i}", info.op, (s.input, *s.args), s.kwargs)


def module_samples(info, count, turn):
    for training in (True, False) if info.train_and_eval_differ else (True,):
        seed_everything()
        found = info.module_inputs_func(
            info,
            device=rig.DEVICE,
            dtype=torch.float64,
            requires_grad=True,
            training=training,
        )
        for i, given in spread(enumerate(found), count, turn):
            if given.forward_input is None:
                continue
            new, forward = given.constructor_input, given.forward_input
            torch.manual_seed(0)
            module = info.module_cls(*new.args, **new.kwargs).double().train(training)
            label = f"{'train' if training else 'eval'} sample {i}"
            yield Sample(label, module, forward.args, forward.kwargs)


def _name(info):
    return f"{info.name}.{info.variant_test_name}".rstrip(".")


OPERATORS = {_name(info): info for info in op_db if "jiterator" not in info.name}
MODULES = {f"{info.name.replace('_', '.')}": info for info in module_db}


def samples(name, count, turn=0):
    """The samples of a subject."""
    if name in OPERATORS:
        return list(operator_samples(OPERATORS[name], count, turn))
    return list(module_samples(MODULES[name], count, turn))
