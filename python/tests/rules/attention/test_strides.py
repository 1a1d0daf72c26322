"""Attention's outputs show the strides that they have on one device."""

import pytest
import rig
import torch
import torch.nn.functional as F
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

# The order of dims is that of the CPU's kernel.
pytestmark = pytest.mark.skipif(rig.DEVICE != "cpu", reason="other kernels")
ROWS = [Shard(2)]


def scatter_like(x, mesh, placements):
    """A ShardTensor with x's strides."""
    order = sorted(range(x.dim()), key=lambda dim: -x.stride(dim))
    back = [order.index(dim) for dim in range(x.dim())]
    cut = [Shard(order.index(p.dim)) for p in placements]
    return shard(x.permute(order).contiguous(), mesh, cut).permute(back)


def check(mesh, query, key, value, *options, **named):
    parts = [scatter_like(x, mesh, ROWS) for x in (query, key, value)]
    out = F.scaled_dot_product_attention(*parts, *options, **named)
    expected = F.scaled_dot_product_attention(query, key, value, *options, **named)
    assert out.stride() == expected.stride()
    assert_close(out, expected)


def rows_of_heads(rows, heads=3):
    """In memory as projections leave them."""
    return torch.randn(2, rows, heads, 4).transpose(1, 2)


@ranks(2)
def test_strides_follow_the_query(mesh):
    x = torch.randn(2, 6, 3, 4)
    for q in (x, x.transpose(1, 2)):
        check(mesh, q, q, q)
    q, k = rows_of_heads(7, 6), rows_of_heads(9)
    check(mesh, q, k, k, enable_gqa=True)


@ranks(2)
@pytest.mark.parametrize(
    "shape", [(7, 9), (1, 9), (3, 7, 9), (1, 7, 9), (2, 1, 1, 9), (1, 3, 7, 1)]
)
def test_strides_beside_a_mask(mesh, shape):
    """PyTorch's kernel takes masks of two or four dims."""
    q, k, v = rows_of_heads(7), rows_of_heads(9), rows_of_heads(9)
    check(mesh, q, k, v, torch.randn(shape))
    check(mesh, q, k, v, torch.rand(shape) > 0.3)


@ranks(2)
def test_strides_of_what_the_kernel_does_not_take(mesh):
    q, k, v = rows_of_heads(7), rows_of_heads(9), rows_of_heads(9)
    check(mesh, q[:1], k, v)
    check(mesh, q, k[:, :1], v[:, :1])
    check(mesh, q, k, v[..., :3])
    check(mesh, rows_of_heads(0), k, v)
    with sdpa_kernel(SDPBackend.MATH):
        check(mesh, q, k, v)


@ranks(2)
def test_strides_of_expanded_queries(mesh):
    x = torch.randn(2, 3, 1, 4)
    k = rows_of_heads(9)
    part = shard(x, mesh, [Shard(1)]).expand(2, 3, 7, 4)
    keys = scatter_like(k, mesh, ROWS)
    out = F.scaled_dot_product_attention(part, keys, keys)
    expected = F.scaled_dot_product_attention(x.expand(2, 3, 7, 4), k, k)
    assert out.stride() == expected.stride()
    assert_close(out, expected)
