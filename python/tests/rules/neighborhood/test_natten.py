"""What programs call in the place of our function."""

from types import ModuleType

import pytest
import torch
from neighborhood import dense
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import handle_torch_function, has_torch_function

from shardtensor import ShardTensor
from shardtensor.nn.functional import register_natten


def na1d(q, k, v, kernel_size, dilation=1, **kwargs):
    """As PhysicsNeMo's asks; stands for a function that knows plain tensors."""
    if has_torch_function((q, k, v)):
        return handle_torch_function(
            na1d, (q, k, v), q, k, v, kernel_size, dilation=dilation, **kwargs
        )
    return dense(q, k, v, kernel_size, dilation, kwargs.get("stride", 1))


def na2d(query, key, value, kernel_size, stride=1, dilation=1, is_causal=False,
         scale=None, additional_keys=None, backend=None):  # fmt: skip
    """NATTEN's parameters, in its order."""
    assert not isinstance(query, ShardTensor)
    return dense(query, key, value, kernel_size, dilation, stride, is_causal, scale)


def module_of(name, **functions):
    module = ModuleType(name)
    module.__dict__.update(functions)
    return module


def operands(mesh, *shape):
    whole = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    return whole, [shard(x, mesh, [Shard(1)]) for x in whole]


@ranks(1, 2, 3)
def test_functions_that_ask(mesh):
    whole, parts = operands(mesh, 2, 8, 2, 4)
    register_natten(module_of("wrappers", na1d=na1d))
    try:
        for options in ({}, {"dilation": 2}, {"stride": 2, "backend": "any"}):
            out = na1d(*parts, 3, **options)
            assert_close(out, na1d(*whole, 3, **options))
            assert out.placements == (Shard(1),)
    finally:
        ShardTensor.unregister_function_handler(na1d)


@ranks(2)
def test_functions_that_do_not_ask(mesh):
    whole, parts = operands(mesh, 1, 6, 7, 2, 4)
    below = {
        name: module_of(f"natten.{name}", neighborhood_attention_generic=na2d)
        for name in ("functional", "modules")
    }
    natten = module_of("natten", na2d=na2d, **below)
    register_natten(natten)
    # What na2d calls, if it was imported before, and NATTEN's modules.
    generic = [module.neighborhood_attention_generic for module in below.values()]
    for call in (natten.na2d, *generic):
        out = call(*parts, (3, 2), 2, (1, 3), scale=0.3, backend="cutlass-fna")
        assert_close(out, na2d(*whole, (3, 2), 2, (1, 3), scale=0.3))
        assert_close(call(*whole, 3), na2d(*whole, 3))
    with pytest.raises(NotImplementedError, match="na2d: additional_keys"):
        natten.na2d(*parts, 3, additional_keys=parts[0])


@ranks(2)
def test_flex_attention_names_our_function(mesh):
    x = shard(torch.randn(1, 2, 128, 16), mesh, [Shard(2)])
    operator = torch.ops.higher_order.flex_attention
    with pytest.raises(NotImplementedError, match="neighborhood_attention"):
        operator(x, x, x, lambda score, *_: score, None, 1.0, {})
    device = "cuda" if x.is_cuda else "cpu"
    near = create_block_mask(
        lambda b, h, q, k: (q - k).abs() <= 3, None, None, 128, 128, device=device
    )
    for options in ({}, {"block_mask": near}):
        for function in (flex_attention, torch.compile(flex_attention)):
            # Of the compiler, which both use.
            with pytest.raises(RuntimeError, match="neighborhood_attention"):
                function(x, x, x, **options)
