"""Neighbourhood attention by the definition: dense attention under a mask, written
from NATTEN's reference (its mask of one query and one key), with loops."""

import math

import torch


def sees(query, key, length, kernel, dilation, stride, causal):
    """Whether `query` sees `key` along one dim of `length` rows."""
    if query % dilation != key % dilation:
        return False
    rows = len(range(query % dilation, length, dilation))
    i, j = query // dilation, key // dilation
    left, right = kernel // 2, kernel // 2 + kernel % 2 - 1
    if causal:
        leader = min(i // stride * stride + stride - 1, rows - 1)
        return max(leader - left - right, 0) <= j <= i
    leader = min(i // stride * stride + stride // 2, rows - 1)
    start = max(leader - left, 0)
    if leader + right >= rows:
        start += rows - right - leader - 1
    return start <= j < start + kernel


def mask_of(lengths, kernel, dilation, stride, causal):
    """(queries, keys) of the flattened domain."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    for length, *parameters in zip(
        lengths, kernel, dilation, stride, causal, strict=True
    ):
        one = torch.tensor(
            [[sees(q, k, length, *parameters) for k in range(length)]
             for q in range(length)]
        )  # fmt: skip
        mask = (mask[:, None, :, None] & one[None, :, None, :]).flatten(2, 3)
        mask = mask.flatten(0, 1)
    return mask


def dense(query, key, value, kernel, dilation=1, stride=1, causal=False, scale=None):
    lengths = query.shape[1:-2]
    every = [
        [given] * len(lengths) if isinstance(given, (int, bool)) else list(given)
        for given in (kernel, dilation, stride, causal)
    ]
    mask = mask_of(lengths, *every).to(query.device)
    group = query.shape[-2] // key.shape[-2]
    q, k, v = (x.flatten(1, -3).transpose(1, 2) for x in (query, key, value))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return out.reshape(*query.shape[:-1], value.shape[-1])
