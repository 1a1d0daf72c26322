"""PyTorch's placements and the core's, one for one.

torch.distributed.tensor takes a second to import (sympy, above all), so this
package does so where a placement is made or looked at, not before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shardtensor import _C

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement, Replicate

    Placements = tuple[Placement, ...]


def replicated(axes: int) -> list[Replicate]:
    from torch.distributed.tensor import Replicate

    return [Replicate()] * axes


def to_core(placement: Placement) -> _C.Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard

    import shardtensor.nested  # noqa: F401  DTensors may come from here on

    # Subclasses mean something else.
    if type(placement) in (Shard, Replicate, Partial):
        return _to_core(placement)
    raise TypeError(
        f"expected Shard, Replicate or Partial of torch.distributed.tensor, "
        f"got {placement!r}"
    )


@functools.cache
def _to_core(placement):
    if placement.is_shard():
        return _C.Placement.shard(placement.dim)
    if placement.is_replicate():
        return _C.Placement.replicate()
    return _C.Placement.partial(placement.reduce_op)


@functools.cache
def from_core(placement: _C.Placement) -> Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if placement.kind == "shard":
        return Shard(placement.dim)
    if placement.kind == "replicate":
        return Replicate()
    return Partial(placement.reduce)


def as_list(placements: Sequence[Placement] | Placement) -> list[Placement]:
    """One placement stands for a list of one."""
    return list(placements) if isinstance(placements, Iterable) else [placements]


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
