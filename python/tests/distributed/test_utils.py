"""Splitting, padding and shared parameters under PhysicsNeMo's names."""

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import assert_close, ranks

from shardtensor.distributed import (
    DistributedManager,
    mark_module_as_shared,
    unmark_module_as_shared,
)
from shardtensor.distributed.utils import (
    compute_split_shapes,
    distributed_transpose,
    get_memory_format,
    pad_helper,
    split_tensor_along_dim,
    truncate_helper,
)


@pytest.mark.parametrize(
    "size, pieces, expected",
    [
        (4, 3, [1, 1, 2]),
        (5, 4, [1, 1, 1, 2]),
        (10, 4, [3, 3, 3, 1]),
        (8, 2, [4, 4]),
        (7, 1, [7]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_compute_split_shapes(size, pieces, expected):
    assert compute_split_shapes(size, pieces) == expected
    x = torch.arange(2.0 * size).reshape(2, size)
    parts = split_tensor_along_dim(x, -1, pieces)
    assert [part.shape[1] for part in parts] == expected
    assert torch.equal(torch.cat(parts, 1), x)


def test_splits_always_tile():
    for size in range(1, 65):
        for pieces in range(1, min(size, 8) + 1):
            shapes = compute_split_shapes(size, pieces)
            assert sum(shapes) == size and min(shapes) > 0 and len(shapes) == pieces


def test_what_cannot_be_split():
    with pytest.raises(ValueError, match="dim 2 of 2 dims"):
        split_tensor_along_dim(torch.ones(2, 2), 2, 2)
    with pytest.raises(ValueError, match="2 rows of dim 0 in 3 pieces"):
        split_tensor_along_dim(torch.ones(2, 2), 0, 3)


def test_padding_and_truncating():
    x = torch.arange(6.0).reshape(2, 3)
    assert pad_helper(x, 0, 4).tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 0], [0, 0, 0]]
    assert pad_helper(x, -1, 4).tolist() == [[0, 1, 2, 0], [3, 4, 5, 0]]
    signal = torch.randn(3, 6, dtype=torch.float64)
    half, whole = torch.fft.rfft(signal), torch.fft.fft(signal)
    assert_close(pad_helper(half[:, :4], 1, 6, mode="conj"), whole)
    assert_close(truncate_helper(whole, 1, 4), half)
    with pytest.raises(ValueError, match="expected 'zero' or 'conj'"):
        pad_helper(x, 0, 4, mode="wrap")


def test_memory_formats():
    x = torch.randn(2, 3, 4, 5)
    assert get_memory_format(x) == torch.contiguous_format
    x = x.contiguous(memory_format=torch.channels_last)
    assert get_memory_format(x) == torch.channels_last
    assert get_memory_format(truncate_helper(x, 2, 2)) == torch.channels_last


@ranks(1, 2, 4)
@pytest.mark.parametrize("async_op", [False, True])
def test_distributed_transpose(mesh, async_op):
    size, rank = mesh.size(), dist.get_rank()
    whole = torch.arange(8.0 * 4 * 3).reshape(8, 4, 3)
    mine = whole.chunk(size, 1)[rank]
    parts, work = distributed_transpose(mine, 0, 1, async_op=async_op)
    if async_op:
        work.wait()
    assert_close(torch.cat(parts, 1), whole.chunk(size, 0)[rank])
    if size == 4:
        with pytest.raises(ValueError, match="3 rows of dim 2 do not divide by 4"):
            distributed_transpose(mine, 2, 0)


# ---- shared parameters ------------------------------------------------------


@ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_shared_parameters_are_sums_of_new_terms(mesh, dtype):
    DistributedManager.initialize()
    rank, size = dist.get_rank(), mesh.size()
    layer = torch.nn.Linear(2, 1, dtype=dtype)
    x = torch.full((1, 2), 1.0 + rank, dtype=dtype)
    assert mark_module_as_shared(layer, None) is layer
    total = float(sum(range(1, size + 1)))
    for step in (1, 2):  # the second accumulates
        layer(x).sum().backward()
        assert_close(layer.weight.grad, torch.full((1, 2), step * total, dtype=dtype))
        assert_close(layer.bias.grad, torch.full((1,), float(step * size), dtype=dtype))
    with pytest.raises(RuntimeError, match="already shared"):
        mark_module_as_shared(layer, None)
    assert unmark_module_as_shared(layer) is layer
    layer.zero_grad()
    layer(x).sum().backward()
    assert_close(layer.weight.grad, x)
    with pytest.raises(RuntimeError, match="not shared"):
        unmark_module_as_shared(layer)


@ranks(3)
def test_terms_of_16_bits_are_added_in_32_unless_told_otherwise(mesh):
    DistributedManager.initialize()
    # Each column adds them in another order, of which some lose the small one.
    columns = list(itertools.permutations([1.0, 2.0**-9, -1.0]))
    mine = torch.tensor(columns, dtype=torch.bfloat16)[:, dist.get_rank()]
    sums = {}
    for wide in (True, False):
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        mark_module_as_shared(layer, None, use_fp32_reduction=wide)
        (layer.weight * mine).sum().backward()
        sums[wide] = layer.weight.grad.tolist()
    assert sums[True] == [2.0**-9] * 6
    assert 0.0 in sums[False] and {*sums[False]} <= {0.0, 2.0**-9}


@ranks(4)
def test_parameters_are_shared_within_the_named_group(mesh):
    DistributedManager.initialize()
    DistributedManager.create_process_subgroup("pair", 2)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model.register_parameter("own", torch.nn.Parameter(torch.ones(1)))
    mark_module_as_shared(model, "pair", recurse=False)
    rank = dist.get_rank()
    ((1.0 + rank) * model.own).sum().backward()
    assert model.own.grad.item() == [3.0, 3.0, 7.0, 7.0][rank]
    assert not model[0].weight._backward_hooks
