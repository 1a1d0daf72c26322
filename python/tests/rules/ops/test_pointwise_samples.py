"""Every pointwise operator that PyTorch has samples for."""

import functools
import itertools

import pytest
import rig
import torch
from ranks import check_op, ranks, sharded, uneven
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_map

PRELOAD = ("conformance.tagged:recorded_calls", "conformance.check")
# test_tagged.py has one sample of each; these are more of them.
pytestmark = pytest.mark.tail

OTHERS = [
    "where", "clamp", "clamp_min", "lerp", "addcmul", "addcdiv", "masked_fill",
    "nn.functional.gelu", "nn.functional.silu", "nn.functional.mish",
    "nn.functional.softplus", "nn.functional.leaky_relu", "nn.functional.elu",
    "nn.functional.celu", "nn.functional.selu", "nn.functional.relu",
    "nn.functional.relu6", "nn.functional.hardtanh", "nn.functional.hardswish",
    "nn.functional.hardsigmoid", "nn.functional.logsigmoid", "nn.functional.prelu",
    "nn.functional.threshold", "nn.functional.softsign", "nn.functional.tanhshrink",
    "nn.functional.hardshrink", "nn.functional.softshrink", "nn.functional.glu",
    "polar", "complex", "isclose", "bfloat16", "double", "half", "long", "to",
    "clone", "zeros_like", "ones_like", "full_like", "type_as", "contiguous",
]  # fmt: skip

PARTS = 16  # of the operators; only ranks read what these are, for it takes long


def operators():
    from operator_samples import BinaryUfuncInfo, UnaryUfuncInfo, op_db

    kinds = UnaryUfuncInfo, BinaryUfuncInfo
    found = [i for i in op_db if isinstance(i, kinds) or i.name in OTHERS]
    # Jiterator needs a GPU; nothing here is about the sparse or nested.
    return [info for info in found if "jiterator" not in info.name]


def samples(info, dtype, requires_grad):
    found = info.sample_inputs("cpu", dtype, requires_grad=requires_grad)
    return list(itertools.islice(found, 8))


def main_dtype(info):
    dtypes = info.supported_dtypes("cuda" if rig.DEVICE == "cuda" else "cpu")
    order = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
    return next(d for d in order if d in dtypes)


def sample_layouts(x, mesh):
    """Uneven along the last and the first dim, and whole."""
    layouts = [([Replicate()], None)]
    for dim in {0, x.dim() - 1} if x.dim() else ():
        layouts.append(([Shard(dim)], {dim: uneven(x.shape[dim], mesh.size())}))
    return layouts


@ranks(2)
@pytest.mark.parametrize("part", range(PARTS))
def test_pytorchs_samples(mesh, part):
    for info in operators()[part::PARTS]:
        try:
            check_samples(mesh, info)
        except AssertionError as error:
            raise AssertionError(f"{info.name} {info.variant_test_name}") from error


def check_samples(mesh, info):
    dtype = main_dtype(info)
    backward = info.supports_autograd and dtype.is_floating_point
    for sample in samples(info, dtype, backward):
        if not isinstance(sample.input, torch.Tensor):
            continue
        for placements, sizes in sample_layouts(sample.input, mesh):
            inputs = (sample.input, *sample.args)
            options = sample.kwargs

            def wrap(x, layout=(placements, sizes), like=sample.input):
                if isinstance(x, torch.Tensor) and x.shape == like.shape:
                    return sharded(x, *layout)
                return x

            check_op(
                functools.partial(call, info, options),
                *tree_map(wrap, inputs), mesh=mesh, backward=backward,
            )  # fmt: skip


def call(info, options, *inputs):
    return info.op(*inputs, **options)
