"""PyTorch's attention modules, unmodified, over a sharded sequence."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from compiled import Compiled
from layouts import placements_of
from ranks import assert_close, check_op, ranks, shard, sharded, uneven
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor

PRELOAD = ("torch._inductor.compile_fx",)

FEATURES, HEADS = 8, 2


def check(mesh, fn, *inputs, **options):
    with shardtensor.fallback_mode("error"):
        return check_op(fn, *inputs, mesh=mesh, **options)


def rows_cut(mesh, x, dim):
    return sharded(
        x, placements_of(mesh, dim), {dim: uneven(x.shape[dim], mesh.size())}
    )


class Attend(nn.Module):
    def __init__(self, options, **call):
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, HEADS, **options).double()
        self.call = call

    def forward(self, query, keys):
        return self.attention(query, keys, keys, **self.call)


@ranks(2, "2x2")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(mesh, batch_first, need_weights):
    rows = 1 if batch_first else 0
    q = torch.randn(7, 7, FEATURES, dtype=torch.float64, requires_grad=True)
    k = torch.randn(7, 7, FEATURES, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(7, 7, dtype=torch.float64) > 0.5
    mask[:, 0] = False
    for options in ({}, {"attn_mask": mask}, {"key_padding_mask": mask}):
        module = Attend(
            {"batch_first": batch_first}, need_weights=need_weights, **options
        )
        check(mesh, module, rows_cut(mesh, q, rows), rows_cut(mesh, k, rows))
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}):
        module = Attend(
            {"batch_first": batch_first, **options}, need_weights=need_weights
        )
        check(mesh, module, rows_cut(mesh, q, rows), rows_cut(mesh, k, rows))


def layer(kind, **options):
    torch.manual_seed(1)
    return kind(FEATURES, HEADS, 16, dropout=0.0, **options).double()


@ranks(2, "2x2")
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder(mesh, norm_first):
    x = torch.randn(2, 7, FEATURES, dtype=torch.float64, requires_grad=True)
    one = layer(nn.TransformerEncoderLayer, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
    causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    for mask in (None, causal):
        check(mesh, lambda x: model(x, mask), rows_cut(mesh, x, 1))  # noqa: B023
    check(mesh, model, rows_cut(mesh, x, 1))


@ranks(2)
def test_transformer_decoder(mesh):
    x, memory = (
        torch.randn(2, rows, FEATURES, dtype=torch.float64, requires_grad=True)
        for rows in (5, 7)
    )
    model = nn.TransformerDecoder(
        layer(nn.TransformerDecoderLayer, batch_first=True), 2
    )
    check(mesh, model, rows_cut(mesh, x, 1), rows_cut(mesh, memory, 1))
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)

    def masked(x, memory):
        return model(x, memory, tgt_mask=causal, tgt_is_causal=True)

    check(mesh, masked, rows_cut(mesh, x, 1), rows_cut(mesh, memory, 1))


@ranks(2, "2x2")
@pytest.mark.parametrize("norm_first", [False, True])
def test_what_eval_mode_calls(mesh, norm_first):
    x = torch.randn(2, 7, FEATURES, dtype=torch.float64)
    mask = torch.rand(7, 7) > 0.6
    mask[:, 0] = False
    padding = torch.rand(2, 7) > 0.6
    padding[:, 0] = False
    options = {"activation": "gelu"} if norm_first else {}
    encoder = layer(
        nn.TransformerEncoderLayer, batch_first=True, norm_first=norm_first, **options
    ).eval()
    attention = nn.MultiheadAttention(FEATURES, HEADS, batch_first=True).double().eval()
    calls = [
        (encoder, (mask, None)),
        (encoder, (None, padding)),
        (encoder, (mask, padding)),
        (encoder, (None, None)),
    ]
    for weights, merged in itertools.product((False, True), calls[:]):
        masks = merged[1]
        calls.append((attend_to_self(attention), (masks[1], weights, masks[0])))
    with torch.no_grad():
        for fn, options in calls:
            check(mesh, fn, rows_cut(mesh, x, 1), *options)


def attend_to_self(attention):
    return lambda x, *options: attention(x, x, x, *options)


class Block(nn.Module):
    """Attention as image models write it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(FEATURES, 3 * FEATURES)
        self.proj = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


@ranks(2, 3)
def test_a_block_of_an_image_model(mesh):
    x = torch.randn(2, 7, FEATURES, dtype=torch.float64, requires_grad=True)
    out = check(mesh, Block().double(), rows_cut(mesh, x, 1))
    assert list(out._spec.placements) == [Shard(1)]


class ImageAttention(nn.Module):
    """As diffusers' AttnProcessor2_0 has it, of an image and of a text."""

    def __init__(self, channels=FEATURES):
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(channels, channels) for _ in range(4)
        )

    def forward(self, x, text=None, mask=None):
        residual = x
        batch, channels, height, width = x.shape
        x = x.view(batch, channels, height * width).transpose(1, 2)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        text = x if text is None else text
        if mask is not None:  # (batch, 1, keys), added
            mask = mask.repeat_interleave(HEADS, dim=0)
            mask = mask.view(batch, HEADS, -1, mask.shape[-1])
        query, key, value = self.to_q(x), self.to_k(text), self.to_v(text)
        query, key, value = (
            t.view(batch, -1, HEADS, channels // HEADS).transpose(1, 2)
            for t in (query, key, value)
        )
        x = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=False
        )
        x = x.transpose(1, 2).reshape(batch, -1, channels).to(query.dtype)
        x = self.to_out(x).transpose(-1, -2).reshape(batch, channels, height, width)
        return x + residual


@ranks(2, 3, "2x2")
def test_attention_of_a_diffusion_model(mesh):
    x = torch.randn(2, FEATURES, 5, 3, dtype=torch.float64, requires_grad=True)
    text = torch.randn(2, 7, FEATURES, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(2, 1, 7, dtype=torch.float64)
    mask[1, 0, 3:] = -10000.0
    model = ImageAttention().double()
    rows = rows_cut(mesh, x, 2)
    check(mesh, model, rows)
    check(mesh, model, rows, text, mask)
    check(mesh, model, rows, rows_cut(mesh, text, 1), mask)


class VisionTransformer(nn.Module):
    """As timm's: a class token before the others, positions, blocks that normalize
    queries and keys, and a head on the token."""

    def __init__(self, extent=6):
        super().__init__()
        self.patches = nn.Conv2d(3, FEATURES, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, FEATURES))
        self.positions = nn.Parameter(torch.randn(1, extent**2 + 1, FEATURES))
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 5)
        self.qkv, self.proj = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, 8)
        self.q_norm, self.k_norm = (nn.LayerNorm(FEATURES // HEADS) for _ in range(2))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + self.positions
        x = x + self.attend(self.norm(x))
        return self.head(self.norm(x)[:, 0])

    def attend(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


@ranks(2, 3, "2x2")
def test_a_vision_transformer_with_a_class_token(mesh):
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64, requires_grad=True)
    check(mesh, VisionTransformer().double(), rows_cut(mesh, x, 2))


@ranks(2)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.tail)]
)
def test_attention_compiles_whole(mesh, backend):
    x = torch.randn(2, 7, FEATURES, requires_grad=True)
    options = {"backend": backend, "fullgraph": True}
    check(
        mesh, Compiled(Block(), **options), rows_cut(mesh, x, 1), rtol=1e-4, atol=1e-5
    )


@ranks(2)
@pytest.mark.parametrize("transport", ["ring", "all_gather", "all_to_all"])
def test_transports_and_masks_compile_whole(mesh, transport):
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    mask = torch.randn(8, 8)

    class Both(nn.Module):
        def forward(self, q):
            causal = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            return F.scaled_dot_product_attention(causal, q, q, mask)

    with shardtensor.attention_transport(transport):
        options = {"backend": "aot_eager", "fullgraph": True}
        check(mesh, Compiled(Both(), **options), sharded(q, [Shard(2)]))


@ranks(2, "2x2")
@pytest.mark.parametrize("nested", [False, True])
def test_eval_mode_with_padding(mesh, nested):
    """Nested tensors have zeros in the place of padded rows, before the last norm."""
    x = torch.randn(3, 7, FEATURES, dtype=torch.float64)
    padding = torch.arange(7) >= torch.tensor([[7], [4], [2]])
    added = torch.zeros(3, 7, dtype=torch.float64).masked_fill(padding, -torch.inf)
    one = layer(nn.TransformerEncoderLayer, batch_first=True)
    for norm in (None, nn.LayerNorm(FEATURES).double()):
        model = nn.TransformerEncoder(one, 2, norm, enable_nested_tensor=nested).eval()

        def encode(x, padding):
            return model(x, src_key_padding_mask=padding)  # noqa: B023

        with torch.no_grad():
            for mask in (padding, padding.flip(1), added, rows_cut(mesh, padding, 1)):
                check(mesh, encode, rows_cut(mesh, x, 1), mask)
        check(mesh, encode, rows_cut(mesh, x, 1), padding)


@ranks(2)
def test_a_nested_tensor_is_refused(mesh):
    part = shard(torch.randn(3, 7, FEATURES), mesh, [Shard(1)])
    with pytest.raises(NotImplementedError, match="_nested_tensor_from_mask: the rows"):
        torch._nested_tensor_from_mask(part, torch.ones(3, 7, dtype=torch.bool))


@ranks(2)
def test_dropout_by_counter_compiles_whole(mesh):
    q = torch.randn(1, 2, 8, 4)
    x = shard(q, mesh, [Shard(2)]).requires_grad_()

    def attend(q):
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4)

    def with_gradient(fn):
        torch.manual_seed(3)
        out = fn(x)
        return out, *torch.autograd.grad(out.square().sum(), x)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with shardtensor.random_policy("counter"):
        for ours, eager in zip(
            with_gradient(compiled), with_gradient(attend), strict=True
        ):
            assert_close(ours, eager.full_tensor())
