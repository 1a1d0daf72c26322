"""What attention does again in backward, and what not."""

import pytest
import torch
import torch.nn.functional as F
from ranks import ranks, shard
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
