"""PyTorch's placements and the core's, one for one."""

import functools
from collections.abc import Sequence

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardtensor import _C

Placements = tuple[Placement, ...]


def to_core(placement: Placement) -> _C.Placement:
    # Subclasses mean something else.
    if type(placement) in (Shard, Replicate, Partial):
        return _to_core(placement)
    raise TypeError(
        f"expected Shard, Replicate or Partial of torch.distributed.tensor, "
        f"got {placement!r}"
    )


@functools.cache
def _to_core(placement):
    if type(placement) is Shard:
        return _C.Placement.shard(placement.dim)
    if type(placement) is Replicate:
        return _C.Placement.replicate()
    return _C.Placement.partial(placement.reduce_op)


@functools.cache
def from_core(placement: _C.Placement) -> Placement:
    if placement.kind == "shard":
        return Shard(placement.dim)
    if placement.kind == "replicate":
        return Replicate()
    return Partial(placement.reduce)


def as_list(placements: Sequence[Placement] | Placement) -> list[Placement]:
    """One placement stands for a list of one."""
    return [placements] if isinstance(placements, Placement) else list(placements)


def check_placements(placements: Sequence[Placement], axes: int) -> Placements:
    """One placement per mesh axis, as a tuple."""
    placements = tuple(as_list(placements))
    for placement in placements:
        to_core(placement)
    if len(placements) != axes:
        raise ValueError(
            f"expected one placement for each of the {axes} mesh axes, got "
            f"{len(placements)}: {placements}"
        )
    return placements
