"""A latitude-longitude grid continued around the sphere."""

from __future__ import annotations

import torch

from shardtensor import _ops


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
    return _ops.pad_sphere(x, width, dims, vector=vector, pole_rows=pole_rows)
