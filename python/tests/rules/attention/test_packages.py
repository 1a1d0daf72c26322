"""Attention as public packages write it, unmodified, where they are installed."""

import pytest
import torch
from layouts import placements_of
from neighborhood import dense
from ranks import check_op, ranks, sharded, uneven
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.nn.functional import register_natten

FEATURES, HEADS = 8, 2


def check(mesh, fn, *inputs, **options):
    with shardtensor.fallback_mode("error"):
        return check_op(fn, *inputs, mesh=mesh, **options)


def tensor(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def cut(mesh, x, dim):
    pieces = {dim: uneven(x.shape[dim], mesh.size())}
    return sharded(x, placements_of(mesh, dim), pieces)


def made(kind, *args, **options):
    torch.manual_seed(1)
    return kind(*args, **options).double().eval()


# ---- timm -------------------------------------------------------------------


@ranks(2, 3, "2x2")
def test_timm_layers(mesh):
    layers = pytest.importorskip("timm.layers")
    norm = {"qk_norm": True, "norm_layer": nn.LayerNorm}
    rows = cut(mesh, tensor(2, 7, FEATURES), 1)
    sees = torch.rand(7, 7) > 0.4
    sees[:, 0] = True
    rope = torch.randn(7, 2 * FEATURES // HEADS, dtype=torch.float64)
    for fused in (True, False):
        for options in ({}, {"qkv_bias": True, **norm}):
            attention = made(layers.Attention, FEATURES, HEADS, **options)
            with_rope = made(
                layers.AttentionRope, FEATURES, HEADS, num_prefix_tokens=0, **options
            )
            attention.fused_attn = with_rope.fused_attn = fused
            for masks in ({}, {"attn_mask": sees}, {"is_causal": True}):
                check(mesh, lambda x: attention(x, **masks), rows)  # noqa: B023
            check(mesh, lambda x: with_rope(x, rope), rows)  # noqa: B023
        pool = made(layers.AttentionPoolLatent, FEATURES, num_heads=HEADS)
        pool.fused_attn = fused
        check(mesh, pool, rows)


@ranks(2, "2x2")
def test_timm_models(mesh):
    models = pytest.importorskip("timm.models")
    image = tensor(2, 3, 16, 16)
    small = {"img_size": 16, "patch_size": 4, "num_classes": 5, "embed_dim": FEATURES}
    vit = made(
        models.vision_transformer.VisionTransformer,
        **small, depth=2, num_heads=HEADS, reg_tokens=2,
    )  # fmt: skip
    eva = made(
        models.eva.Eva, **small, depth=2, num_heads=HEADS, use_rot_pos_emb=True,
        scale_mlp=True, swiglu_mlp=True,
    )  # fmt: skip
    for model in (vit, eva):
        check(mesh, model, sharded(image, placements_of(mesh, 2)))


# ---- diffusers --------------------------------------------------------------


@ranks(2, 3, "2x2")
def test_diffusers_attention(mesh):
    processors = pytest.importorskip("diffusers.models.attention_processor")
    image = tensor(2, FEATURES, 5, 3)
    text, seen = tensor(2, 7, FEATURES), torch.zeros(2, 1, 7, dtype=torch.float64)
    seen[1, 0, 3:] = -10000.0
    options = {"heads": HEADS, "dim_head": FEATURES // HEADS, "bias": True}
    of_image = made(
        processors.Attention, FEATURES, **options, norm_num_groups=2,
        residual_connection=True,
    )  # fmt: skip
    of_text = made(
        processors.Attention, FEATURES, **options, cross_attention_dim=FEATURES
    )
    rows = cut(mesh, image, 2)
    for kind in (processors.AttnProcessor2_0, processors.AttnProcessor):
        for module in (of_image, of_text):
            module.set_processor(kind())
        check(mesh, of_image, rows)
        for given in (text, cut(mesh, text, 1)):
            check(mesh, lambda x, y: of_text(x, y, seen), rows, given)


@ranks(2)
def test_diffusers_blocks(mesh):
    attention = pytest.importorskip("diffusers.models.attention")
    x, text = tensor(2, 7, FEATURES), tensor(2, 5, FEATURES)
    of = {"num_attention_heads": HEADS, "attention_head_dim": FEATURES // HEADS}
    block = made(
        attention.BasicTransformerBlock, FEATURES, **of, cross_attention_dim=FEATURES
    )
    for given in (text, cut(mesh, text, 1)):
        check(mesh, lambda x, y: block(x, None, y), cut(mesh, x, 1), given)
    joint = made(attention.JointTransformerBlock, FEATURES, **of)
    time = tensor(2, FEATURES)
    check(mesh, joint, cut(mesh, x, 1), text, time)
    check(mesh, joint, cut(mesh, x, 1), cut(mesh, text, 1), time)


# ---- NATTEN -----------------------------------------------------------------


def by_definition(query, key, value, kernel_size, stride=1, dilation=1,
                  is_causal=False, scale=None, **kwargs):  # fmt: skip
    """Stands for NATTEN's kernels on one device: it has none for CPUs."""
    return dense(query, key, value, kernel_size, dilation, stride, is_causal, scale)


@ranks(2, 3, "2x2")
def test_natten_functions_and_modules(mesh):
    natten = pytest.importorskip("natten")
    for module in (natten.functional, natten.modules):
        module.neighborhood_attention_generic = by_definition
    register_natten(natten)
    for extents, call in (
        ((9,), lambda *x: natten.na1d(*x, 3, dilation=2)),
        ((9, 7), lambda *x: natten.na2d(*x, (3, 2), stride=(2, 1), scale=0.3)),
        ((9, 4, 5), lambda *x: natten.na3d(*x, 3, is_causal=(True, False, False))),
    ):
        parts = [cut(mesh, tensor(1, *extents, HEADS, 4), 1) for _ in range(3)]
        out = check(mesh, call, *parts)
        assert all(placement == Shard(1) for placement in out.placements)
        kind = getattr(natten, f"NeighborhoodAttention{len(extents)}D")
        module = made(kind, embed_dim=FEATURES, num_heads=HEADS, kernel_size=3)
        check(mesh, module, cut(mesh, tensor(2, *extents, FEATURES), 1))
