"""Operators of each rule family against one device; `make conformance` has all."""

import pytest
from conformance import sweep
from oracle import every

PRELOAD = sweep.PRELOAD

FAMILIES = {
    "ops": [
        "matmul",
        "addmv",
        "einsum",
        "where",
        "add",
        "bernoulli",
        "nn.functional.dropout",
    ],
    "view": [
        "reshape",
        "permute",
        "expand",
        "unfold",
        "split",
        "cat",
        "__getitem__",
        "tile",
    ],
    "reduce": [
        "sum",
        "var",
        "amax",
        "argmax",
        "norm",
        "nn.functional.cross_entropy",
        "aminmax",
    ],
    "index": [
        "gather",
        "index_put",
        "index_add",
        "masked_select",
        "nn.functional.embedding",
    ],
    "order": ["sort", "cumsum", "flip", "roll", "searchsorted", "renorm", "softmax"],
    "norm": ["nn.functional.layer_norm", "nn.functional.group_norm", "nn.BatchNorm2d"],
    "stencil": [
        "nn.functional.conv2d",
        "nn.functional.max_pool2d",
        "nn.functional.pad.reflect",
        "nn.functional.interpolate.bilinear",
        "nn.functional.conv_transpose1d",
    ],
    "fallback": ["linalg.svd", "resize_", "as_strided", "split_with_sizes_copy"],
    "modules": [
        "nn.Linear",
        "nn.LSTM",
        "nn.MultiheadAttention",
        "nn.Conv3d",
        "nn.GELU",
    ],
}


ALL = [name for names in FAMILIES.values() for name in names]


@pytest.mark.parametrize("name", every(2, ALL))
def test_ranks_do_what_one_device_does(name):
    assert_conforms(sweep.sweep(3, name, 1))


@pytest.mark.tail
@pytest.mark.parametrize("name", ALL)
def test_ranks_do_it_with_other_samples(name):
    assert_conforms(sweep.sweep(3, name, 3))


@pytest.mark.parametrize("name", [names[0] for names in FAMILIES.values()])
def test_on_a_grid(name):
    assert_conforms(sweep.sweep("2x2", name, 1))


@pytest.mark.tail
@pytest.mark.parametrize("name", [n for names in FAMILIES.values() for n in names[1:]])
def test_others_on_a_grid(name):
    assert_conforms(sweep.sweep("2x2", name, 1))


def assert_conforms(records):
    assert records
    assert not sweep.described(records)
