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


@ranks(2)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
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


@ranks(2)
def test_eval_mode_does_not_drop_padded_rows(mesh):
    x = torch.randn(3, 7, FEATURES, dtype=torch.float64)
    padding = torch.arange(7) >= torch.tensor([[7], [4], [2]])
    one = layer(nn.TransformerEncoderLayer, batch_first=True)
    model = nn.TransformerEncoder(one, 2, enable_nested_tensor=False).eval()
    nested = nn.TransformerEncoder(one, 2).eval()
    with torch.no_grad():
        check(mesh, lambda x: model(x, None, padding), rows_cut(mesh, x, 1))
        part = shard(x, mesh, placements_of(mesh, 1))
        with pytest.raises(NotImplementedError, match="enable_nested_tensor=False"):
            nested(part, None, padding)


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
