"""What attention does again in backward, and what not."""

import pytest
import torch
import torch.nn.functional as F
from layouts import placements_of
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Shard

import shardtensor


@ranks(1, 2)
def test_backward_knows_which_rows_are_hidden(mesh):
    """Looking for them waits for a device."""
    mask = torch.zeros(6, 6)
    mask[2] = -1e9
    q, k, v = (shard(torch.randn(2, 2, 6, 4), mesh, [Shard(2)]) for _ in range(3))
    for transport in ("ring", "all_gather", "all_to_all"):
        with shardtensor.attention_transport(transport):
            out = F.scaled_dot_product_attention(q.requires_grad_(), k, v, mask)
        with torch.profiler.profile() as profile:
            out.sum().backward()
        assert "aten::nonzero" not in {event.key for event in profile.key_averages()}


@ranks(2)
@pytest.mark.parametrize("transport", ["all_gather", "all_to_all"])
def test_gradients_of_one_block_are_no_sums(mesh, transport):
    """Two passes over each less."""
    q, k, v = (
        shard(torch.randn(2, 2, 6, 4), mesh, [Shard(2)]).requires_grad_()
        for _ in range(3)
    )
    with shardtensor.attention_transport(transport):
        out = F.scaled_dot_product_attention(q, k, v)
    loss = out.sum()
    with torch.profiler.profile() as profile:
        torch.autograd.grad(loss, (q, k, v))
    calls = {event.key: event.count for event in profile.key_averages()}
    assert "aten::zeros_like" not in calls
    # Of what other ranks' queries make for the own keys.
    assert calls.get("aten::add_", 0) == (transport == "all_gather")


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("transport", ["auto", "ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_at_minus_infinity_have_no_weight(mesh, transport, causal):
    """Also where a rank has no others."""
    q, v = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(2))
    q = q.detach().abs().requires_grad_()
    for rows in (slice(3, 6), slice(0, 3), slice(4, 5)):
        k = torch.randn(1, 2, 6, 4)
        k[:, :, rows] = -3e38  # scores overflow
        if causal and rows.start == 0:
            continue  # first rows see nothing: one device has NaN in gradients
        mask = torch.ones(6, 6, dtype=torch.bool)
        mask[:, rows.stop :] = False
        for given in (None,) if causal else (None, mask):
            expected = F.scaled_dot_product_attention(q, k, v, given, 0.0, causal)
            weight = torch.randn_like(expected)
            (slope,) = torch.autograd.grad((expected * weight).sum(), v)
            for whole_queries in (False, True):
                if whole_queries and causal:
                    continue
                keys, values = (shard(x, mesh, placements_of(mesh, 2)) for x in (k, v))
                values.requires_grad_()
                with shardtensor.attention_transport(transport):
                    found = F.scaled_dot_product_attention(
                        q if whole_queries else shard(q, mesh, placements_of(mesh, 2)),
                        *(keys, values, given, 0.0, causal),
                    )  # fmt: skip
                assert_close(found, expected)
                (actual,) = torch.autograd.grad((found * weight).sum(), values)
                assert_close(actual, slope)


@ranks(2)
def test_masks_of_too_few_dims(mesh):
    q = torch.randn(2, 3, 8, 5)
    cut = shard(q, mesh, [Shard(2)])
    for mask in torch.tensor(True), torch.ones(8, dtype=torch.bool), torch.zeros(8):
        for given in q, cut:
            with pytest.raises(IndexError, match="^Dimension"):
                F.scaled_dot_product_attention(given, given, given, mask)
