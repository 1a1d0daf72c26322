"""Attention over a sequence of 4096 rows, 8 heads of 64, forward and backward."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Table
from timing import compare
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardTensor

ROWS, HEADS, FEATURES = 4096, 8, 64
ROUNDS = 5


def table(mesh):
    even = [ROWS // mesh.size()] * mesh.size()
    uneven = [even[0] - 1, *even[1:-1], even[-1]]
    rows = {
        "rows cut evenly": compare(variants(mesh, even), ROUNDS, calls=1),
        "causal": compare(causal_variants(mesh, even), ROUNDS, calls=1),
        "rows cut unevenly": compare(variants(mesh, uneven), ROUNDS, calls=1),
    }
    note = (
        "Ceiling: the same products on each rank without communication; causal, "
        "half of the heads with all rows. By hand: all keys gathered before, their "
        "gradients reduced and scattered after."
    )
    return Table(
        f"Attention, {ROWS} rows, {HEADS} heads of {FEATURES}", "ceiling", rows, note
    )


def tensors(rows, heads=HEADS):
    return torch.randn(1, heads, rows, FEATURES)


def variants(mesh, sizes):
    own = sizes[mesh.get_local_rank()]
    local = [tensors(own).requires_grad_() for _ in range(3)]
    whole = [tensors(sum(sizes)).requires_grad_() for _ in range(2)]
    by_hand = {} if len(set(sizes)) > 1 else {"all-gather by hand": gathered(*local)}
    return {
        "ceiling": step(F.scaled_dot_product_attention, local[0], *whole),
        **by_hand,
        **sharded(mesh, local, sizes),
    }


def causal_variants(mesh, sizes):
    own = sizes[mesh.get_local_rank()]
    local = [tensors(own).requires_grad_() for _ in range(3)]
    heads = HEADS // mesh.size()
    share = [tensors(sum(sizes), heads).requires_grad_() for _ in range(3)]
    return {
        "ceiling": step(causal, *share),
        **sharded(mesh, local, sizes, causal),
    }


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sharded(mesh, local, sizes, attend=F.scaled_dot_product_attention):
    """ShardTensor with the transport of its choice, and with each."""
    shards = [
        ShardTensor.from_local(
            x.detach(), mesh, [Shard(2)], sharding_shapes=shapes(sizes)
        ).requires_grad_()
        for x in local
    ]

    def by(transport):
        run = step(attend, *shards)

        def inside():
            with shardtensor.attention_transport(transport):
                run()

        return inside

    return {
        "ShardTensor": by("auto"),
        "ring": by("ring"),
        "all-gather": by("all_gather"),
        "all-to-all": by("all_to_all"),
    }


def shapes(sizes):
    return {0: tuple((1, HEADS, size, FEATURES) for size in sizes)}


def step(attend, *inputs):
    grad = torch.ones_like(attend(*inputs))

    def run():
        for x in inputs:
            x.grad = None
        attend(*inputs).backward(grad)

    return run


class Gather(torch.autograd.Function):
    """All ranks' rows; the gradient is summed and cut."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        parts = [p.contiguous() for p in grad.chunk(dist.get_world_size(), 2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own


def gathered(q, k, v):
    def attend(q, k, v):
        both = Gather.apply(torch.cat([k, v], 1))
        return F.scaled_dot_product_attention(q, *both.chunk(2, 1))

    return step(attend, q, k, v)
