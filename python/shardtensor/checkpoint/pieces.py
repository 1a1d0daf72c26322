"""A ShardTensor in torch.distributed.checkpoint: which boxes of the whole tensor
this rank holds. DCP asks each tensor by the methods that ShardTensor has of
`_Checkpointable`; what it writes is a box each, so what reads it back may be cut
in any other way."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from shardtensor import _C

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardtensor.shard_tensor import ShardTensor

# Where a box begins in the whole tensor, where in this rank's piece, its sizes.
_Box = tuple[torch.Size, list[int], torch.Size]


def write_items(name: str, tensor: ShardTensor) -> list[WriteItem]:
    spec = _C.spec(tensor)
    if spec.has_partial():
        raise ValueError(
            f"checkpoint: {name} is a sum that is still to be made, {spec}; "
            "redistribute it to Shard or Replicate first"
        )
    properties = TensorProperties.create_from_tensor(_C.local(tensor))
    return [
        WriteItem(
            index=MetadataIndex(name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, sizes),
                properties=properties,
                size=tensor.size(),
            ),
        )
        for offsets, _, sizes in _boxes(spec)
    ]


def chunks(tensor: ShardTensor) -> list[ChunkStorageMetadata]:
    spec = _C.spec(tensor)
    return [ChunkStorageMetadata(offsets, sizes) for offsets, _, sizes in _boxes(spec)]


def shard_at(tensor: ShardTensor, index: MetadataIndex) -> torch.Tensor:
    """A view of this rank's piece, which is written to when a checkpoint is read."""
    local = _C.local(tensor).detach()
    for offsets, begins, sizes in _boxes(_C.spec(tensor)):
        if offsets == index.offset:
            for dim, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
                local = local.narrow(dim, begin, size)
            return local
    raise ValueError(
        f"checkpoint: this rank has no box of {index.fqn} at {index.offset}, its "
        f"layout is {_C.spec(tensor)}"
    )


def _boxes(spec: _C.ShardSpec) -> Iterator[_Box]:
    """An empty piece has none, or it would be taken for its neighbour, which
    begins at the same place. A tensor without elements has one, without extent, which
    is in every piece."""
    position = spec.mesh.position
    if position < 0:
        return
    if 0 in spec.sizes:
        zeros = [0] * len(spec.sizes)
        yield torch.Size(zeros), zeros, torch.Size(zeros)
        return
    runs = [_runs(spec, dim, position) for dim in range(len(spec.sizes))]
    for box in itertools.product(*runs):
        sizes = torch.Size(size for _, _, size in box)
        if 0 not in sizes:
            offsets = torch.Size(offset for offset, _, _ in box)
            yield offsets, [begin for _, begin, _ in box], sizes


def _runs(spec, dim, position):
    """What a position has of `dim`: (offset, where in the piece, size); several
    where the cut is repeated."""
    if not spec.is_sharded(dim):
        return [(0, 0, spec.sizes[dim])]
    partition = spec.partition(dim)
    begin, end = spec.interval(dim, position)
    return [
        (i * partition.period + begin, i * (end - begin), end - begin)
        for i in range(partition.repeat)
    ]
