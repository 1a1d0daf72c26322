"""What goes wrong on one rank is an error on all of them."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.device_mesh import device_of, whole_group

# What other ranks can raise again from its text.
_KINDS = {
    kind.__name__: kind
    for kind in (ImportError, IndexError, OSError, RuntimeError, TypeError, ValueError)
}


def agree(mesh: DeviceMesh, error: Exception | None, told: object = None) -> None:
    """Raises on every rank of the mesh what `error` is on one of them, the first
    rank's where several have one; and where the ranks were not `told` the same.
    Communication: one small gather, another one where something is wrong."""
    group, device = whole_group(mesh), device_of(mesh)
    digest = hashlib.blake2b(repr(told).encode(), digest_size=8).digest()
    number = 0 if error else int.from_bytes(digest, "little", signed=True)
    mine = torch.tensor([error is not None, number], device=device)
    ranks = dist.get_world_size(group)
    everyone = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everyone, mine, group)
    rows = torch.stack(everyone).tolist()
    if all(row == [0, rows[0][1]] for row in rows):
        return
    texts: list = [None] * ranks
    dist.all_gather_object(texts, _text(error, told), group)
    _raise(texts, [bool(bad) for bad, _ in rows], error)


def _text(error, told):
    if error is None:
        return "RuntimeError", repr(told)
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS]
    return (kinds or ["RuntimeError"])[0], str(error)


def _raise(texts, failed, error):
    if not any(failed):
        calls: dict[str, list[int]] = {}
        for rank, (_, text) in enumerate(texts):
            calls.setdefault(text, []).append(rank)
        lines = [f"mesh ranks {ranks}: {text}" for text, ranks in calls.items()]
        raise ValueError("ranks were told different things\n" + "\n".join(lines))
    kind, text = texts[failed.index(True)]
    if not all(failed):
        ranks = [str(rank) for rank, bad in enumerate(failed) if bad]
        text = f"{text} (on mesh rank {', '.join(ranks)})"
    raise _KINDS[kind](text) from error
