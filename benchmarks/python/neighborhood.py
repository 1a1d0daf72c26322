"""Neighbourhood attention on an image of 128 x 128, windows of 7 x 7, 4 heads of 32,
forward and backward."""

import torch
import torch.nn.functional as F
from report import Table
from timing import compare
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.nn.functional import neighborhood_attention

EXTENT, KERNEL, HEADS, FEATURES = 128, 7, 4, 32
ROUNDS = 9
LONG_ROUNDS = 3  # of seconds each


def table(mesh):
    rows = {
        "two ranks": compare(sharded(mesh), ROUNDS),
        "one rank": compare(alone(by_unfold, masked_dense), LONG_ROUNDS, calls=1),
    }
    note = (
        "Ceiling: half of the image on each rank without communication. unfold: the "
        "keys of all windows copied, then products. Dense: "
        "`scaled_dot_product_attention` under the mask of the windows."
    )
    title = f"Neighbourhood attention, {EXTENT} x {EXTENT}, windows of {KERNEL}"
    return Table(title, "ShardTensor", rows, note)


def image(rows, columns):
    return torch.randn(1, rows, columns, HEADS, FEATURES)


def step(attend, *inputs):
    for x in inputs:
        x.requires_grad_()
    grad = torch.ones_like(attend(*inputs))

    def run():
        for x in inputs:
            x.grad = None
        attend(*inputs).backward(grad)

    return run


def attend(query, key, value):
    return neighborhood_attention(query, key, value, KERNEL)


def sharded(mesh):
    own = EXTENT // mesh.size()
    local = [image(own, EXTENT) for _ in range(3)]
    shards = [ShardTensor.from_local(x.clone(), mesh, [Shard(1)]) for x in local]
    return {"ShardTensor": step(attend, *shards), "ceiling": step(attend, *local)}


def alone(*others):
    names = {by_unfold: "unfold", masked_dense: "dense"}
    x = [image(EXTENT, EXTENT) for _ in range(3)]
    variants = {"ShardTensor": step(attend, *x)}
    for other in others:
        variants[names[other]] = step(other, *(t.detach().clone() for t in x))
    return variants


def first_rows(extent):
    """Of each row's window."""
    return (torch.arange(extent) - KERNEL // 2).clamp(0, extent - KERNEL)


def windows(x):
    """(batch, rows, columns, heads, window, features)."""
    x = x.unfold(1, KERNEL, 1)[:, first_rows(x.shape[1])]
    x = x.unfold(2, KERNEL, 1)[:, :, first_rows(x.shape[2])]
    return x.flatten(-2).transpose(-1, -2)


def by_unfold(query, key, value):
    scores = query.unsqueeze(-2) @ windows(key).mT * FEATURES**-0.5
    return (scores.softmax(-1) @ windows(value)).squeeze(-2)


def masked_dense(query, key, value):
    first = first_rows(query.shape[1])
    row = torch.arange(query.shape[1])
    sees = (row >= first[:, None]) & (row < first[:, None] + KERNEL)
    mask = (sees[:, None, :, None] & sees[None, :, None, :]).flatten(0, 1).flatten(1)
    q, k, v = (x.flatten(1, 2).transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, mask)
    return out.transpose(1, 2).view(query.shape)
