"""Attention over a long sequence, 8 heads of 64, forward and backward."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Table
from timing import compare
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardTensor

ROWS, HEADS, FEATURES = {2: (4096, 8192), 3: (10008,)}, 8, 64
ROUNDS = 5


def table(mesh):
    rows = {}
    for count in ROWS.get(mesh.size(), ROWS[2]):
        even = [count // mesh.size()] * mesh.size()
        made = {"": even_variants(mesh, even)}
        if HEADS % mesh.size() == 0:  # else no rank has its share of them
            made[", causal"] = causal_variants(mesh, even)
        if mesh.size() > 1:
            uneven = [even[0] - count // 8, *even[1:-1], even[-1] + count // 8]
            made[", cut unevenly"] = variants(mesh, uneven)
        for name in made:
            rows[f"{count}{name}"] = compare(made[name], ROUNDS, calls=1)
    note = (
        "Ceiling: the same products on each rank without communication; causal, "
        "half of the heads with all rows; unevenly, 3/8 and 5/8 of the rows. By hand: "
        "all keys gathered before, their gradients reduced and scattered after; or "
        "one block after the other, the next on its way meanwhile (on CPUs). One row "
        "less: ShardTensor where the last rank has one row less than the others."
    )
    return Table(f"Attention, {HEADS} heads of {FEATURES}", "ceiling", rows, note)


def tensors(rows, heads=HEADS):
    return torch.randn(1, heads, rows, FEATURES)


def variants(mesh, sizes):
    own = sizes[mesh.get_local_rank()]
    local = [tensors(own).requires_grad_() for _ in range(3)]
    whole = [tensors(sum(sizes)).requires_grad_() for _ in range(2)]
    by_hand = {}
    if len(sizes) > 1 and len(set(sizes)) == 1:
        by_hand["all-gather by hand"] = step(gathered, *local)
        if local[0].is_cpu:
            by_hand["ring by hand"] = step(Ring.apply, *local)
    return {
        "ceiling": step(F.scaled_dot_product_attention, local[0], *whole),
        **by_hand,
        **sharded(mesh, local, sizes),
    }


def even_variants(mesh, sizes):
    """The same, and a sequence one row shorter, which divides by nothing."""
    shorter = [*sizes[:-1], sizes[-1] - 1]
    local = [tensors(shorter[mesh.get_local_rank()]) for _ in range(3)]
    less = sharded(mesh, local, shorter)["ShardTensor"]
    return {**variants(mesh, sizes), "one row less": less}


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
    both = Gather.apply(torch.cat([k, v], 1))
    return F.scaled_dot_product_attention(q, *both.chunk(2, 1))


class Ring(torch.autograd.Function):
    """Each rank's keys and values go round; in backward their gradients, too."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, total = None, None
        for block in pass_around(torch.cat([k, v], 1)):
            part, lse = flash(q, *block.chunk(2, 1), 0.0, False)
            if out is None:
                out, total = part, lse
                continue
            both = torch.logaddexp(total, lse)
            out = out * (total - both).exp().unsqueeze(-1)
            out += part * (lse - both).exp().unsqueeze(-1)
            total = both
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, total = ctx.saved_tensors
        grad_q, travelling = torch.zeros_like(q), None
        for block in pass_around(torch.cat([k, v], 1)):
            saved = (q, *block.chunk(2, 1), out, total)
            own_q, *own = flash_backward(grad, *saved, 0.0, False)
            grad_q += own_q
            # They go where their block goes, one step behind it.
            own = torch.cat(own, 1)
            if travelling is not None:
                own += finish(travelling)
            travelling = start(own)
        return grad_q, *finish(travelling).chunk(2, 1)


flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def pass_around(block):
    """All ranks' blocks, the own one first, each while the next one travels."""
    for _ in range(dist.get_world_size() - 1):
        travelling = start(block)
        yield block
        block = finish(travelling)
    yield block


def start(block):
    """Sends to the next rank what the rank before sends here."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(block, memory_format=torch.contiguous_format)
    send = dist.P2POp(dist.isend, block.contiguous(), (rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
    return received, dist.batch_isend_irecv([send, receive])


def finish(travelling):
    received, works = travelling
    for work in works:
        work.wait()
    return received
