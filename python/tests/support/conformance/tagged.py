"""Operators that PyTorch tags `pointwise`, from which they get their rule.

A tag proves nothing, so each overload is called by itself. Its arguments are those
that op_db's samples and their gradients hand to it, or to another overload of the
same name. A subject is a name without overload; "aten::add" stands for add.Tensor,
add_.Tensor, add.out, ...
"""

import functools
import itertools
import warnings
from collections import defaultdict

import rig
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from conformance.sample import Sample, in_place, seed_everything

KEPT = 12  # calls of one name
ALIASES = {"aten::clip": "aten::clamp"}


def family(name):
    """aten::add of aten::add_.Tensor."""
    return name.split(".")[0].rstrip("_")


def _overloads():
    families = defaultdict(list)
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or not hasattr(torch.ops.aten, packet):
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if (
            torch.Tag.pointwise in op.tags
            and torch.Tag.nondeterministic_seeded not in op.tags
        ):
            families[family(name)].append(op)
    return dict(families)


OVERLOADS = _overloads()


class Recorder(TorchDispatchMode):
    """Keeps the arguments of calls to these operators."""

    def __init__(self):
        super().__init__()
        self.calls = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kept = self.calls[family(func.name())]
        if func in OVERLOADS.get(family(func.name()), ()) and len(kept) < KEPT:
            kept.append(tree_map(_copy, (args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _put(x):
    return x.to(rig.DEVICE) if isinstance(x, torch.Tensor) else x


def _copy(x):
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


@functools.cache
def recorded_calls():
    from conformance.subjects import OPERATORS  # takes seconds

    recorder = Recorder()
    for info in OPERATORS.values():
        dtypes = info.supported_dtypes("cpu")
        order = (torch.float64, torch.int64, torch.bool, torch.complex128)
        dtype = next((d for d in order if d in dtypes), None)
        if dtype is not None:
            seed_everything()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _record(recorder, info, dtype)
    return recorder.calls


def _record(recorder, info, dtype):
    needs_grad = dtype.is_floating_point and info.supports_autograd
    try:
        found = info.sample_inputs("cpu", dtype, requires_grad=needs_grad)
        for sample in itertools.islice(found, 3):
            with recorder:
                result = info.op(sample.input, *sample.args, **sample.kwargs)
                for out in tree_leaves(result) if needs_grad else ():
                    if out.requires_grad:
                        out.sum().backward()
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return  # PyTorch refuses this one on this machine


def samples(name, count):
    """Samples of every overload of a name."""
    return [s for op in OVERLOADS[name] for s in itertools.islice(_fitting(op), count)]


def without_samples():
    """Overloads that no recorded call fits."""
    return [
        op.name() for ops in OVERLOADS.values() for op in ops if not any(_fitting(op))
    ]


def _fitting(op):
    """Samples of an overload: recorded calls that it takes, larger ones first."""
    name = family(op.name())
    recorded = tree_map(_put, recorded_calls()[ALIASES.get(name, name)])
    for args, kwargs in [*sorted(recorded, key=_dims, reverse=True), *_made_up(op)]:
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
        try:
            sample = _sample(op, args, kwargs)
            with torch.no_grad():
                sample.call(*tree_map(_copy, args), **tree_map(_copy, sample.kwargs))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            continue
        if sample.tensors():
            yield sample


def _made_up(op):
    """Arguments by their types in the schema, in several dtypes."""
    seed_everything()
    for dtype in (torch.float64, torch.int64):
        x = (torch.rand(5, 3, dtype=torch.float64) * 8 + 1).to(dtype)
        by_type = {
            "Tensor": x,
            "number": 2,
            "float": 0.5,
            "int": 1,
            "Optional[str]": "floor",
        }
        required = [
            (a.name, a.kwarg_only, by_type.get(str(a.type)))
            for a in op._schema.arguments
            if not a.has_default_value() and a.name != "out"
        ]
        yield (
            tuple(value for _, kwarg_only, value in required if not kwarg_only),
            {name: value for name, kwarg_only, value in required if kwarg_only},
        )


def _dims(call):
    return max(
        (x.dim() for x in tree_flatten(call)[0] if isinstance(x, torch.Tensor)),
        default=0,
    )


def _sample(op, args, kwargs):
    written = [
        a for a in op._schema.arguments if a.alias_info and a.alias_info.is_write
    ]
    if written and written[0].kwarg_only:
        call = functools.partial(_into, op, [a.name for a in written])
        return Sample(op.name(), call, args, {**kwargs, "out": _outs(op, args, kwargs)})
    args, kwargs = tree_map(_with_gradient, (args, kwargs))
    call = functools.partial(in_place, op) if written else op
    return Sample(op.name(), call, args, kwargs)


def _with_gradient(x):
    floating = isinstance(x, torch.Tensor) and x.dtype == torch.float64
    return x.clone().requires_grad_() if floating else x


def _into(op, names, *args, out, **kwargs):
    with torch.no_grad():
        return op(*args, **kwargs, **dict(zip(names, out)))


def _outs(op, args, kwargs):
    """Tensors like the results of the overload that returns new ones."""
    for other in OVERLOADS[family(op.name())]:
        if not any(a.alias_info for a in other._schema.arguments):
            try:
                results = other(*args, **kwargs)
            except (RuntimeError, TypeError):
                continue
            results = results if isinstance(results, (tuple, list)) else (results,)
            return tuple(torch.full(r.shape, 7, dtype=r.dtype) for r in results)
    return ()
