"""A latitude-longitude grid continued around the sphere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor.shard_tensor import ShardTensor


def pad_sphere(
    x: torch.Tensor,
    width: int | tuple[int, int],
    dims: tuple[int, int] = (-2, -1),
    *,
    vector: bool = False,
    pole_rows: bool = False,
) -> torch.Tensor:
    """`x` with `width` more rows on each side of `dims`, latitude and longitude;
    two numbers for different widths. Longitude wraps around. Beyond a pole lies the
    row half a turn away: the first row again where rows lie between the poles, the
    second where `pole_rows` says that the first is the pole. East and north turn
    round there, so components of a `vector` field change sign.

    Plain tensors and ShardTensors with any dims cut, in any pieces: the ranks with
    the outermost rows get those beyond. Differentiable to any order. For a
    convolution on the sphere:

        y = F.conv2d(pad_sphere(x, 1), weight)  # 3 x 3
    """
    lat, lon = (dim % x.dim() for dim in dims)
    high, wide = (width, width) if isinstance(width, int) else width
    skipped = 1 if pole_rows else 0
    rows, columns = x.shape[lat], x.shape[lon]
    if lat == lon or high < 0 or wide < 0:
        raise ValueError(f"pad_sphere: got dims {dims} and width {width}")
    if high > rows - skipped or wide > columns:
        raise ValueError(
            f"pad_sphere: width {width} is more than the {rows} x {columns} rows of "
            f"dims {dims}"
        )
    if high and columns % 2:
        raise ValueError(
            f"pad_sphere: half a turn of {columns} columns of dim {dims[1]}: expected "
            "an even number"
        )
    if high:
        ends = [
            x.narrow(lat, skipped, high),
            x.narrow(lat, rows - skipped - high, high),
        ]
        ends = [end.flip(lat).roll(columns // 2, lon) for end in ends]
        if vector:
            ends = [-end for end in ends]
        x = _between(ends, x, lat, high)
    if wide:
        ends = [x.narrow(lon, columns - wide, wide), x.narrow(lon, 0, wide)]
        x = _between(ends, x, lon, wide)
    return x


def _between(ends: Sequence, x: torch.Tensor, dim: int, width: int) -> torch.Tensor:
    """The ends go to the ranks with the outermost rows."""
    joined = torch.cat([ends[0], x, ends[1]], dim)
    if not isinstance(x, ShardTensor) or not x._spec.is_sharded():
        return joined
    sizes = {d: _piece_sizes(x._spec.partition(d)) for d in x._spec.sizes()}
    if dim in sizes:
        pieces = list(sizes[dim])
        owners = [rank for rank, rows in enumerate(pieces) if rows] or [0]
        pieces[owners[0]] += width
        pieces[owners[-1]] += width
        sizes[dim] = pieces
    return joined.redistribute(placements=x.placements, sizes=sizes)


def _piece_sizes(partition) -> list[int]:
    return [partition.repeat * rows for rows in partition.sizes]
