"""Neighbourhood attention: each query sees the keys around it."""

from collections.abc import Sequence

import torch

from shardtensor import _ops


def neighborhood_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    stride: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of each query to the `kernel_size` keys around it, in one, two or
    three dims, as NATTEN's na1d, na2d and na3d define it. Tensors are (batch,
    dims..., heads, features). Parameters are one value for all dims or one each.

    At the ends of the domain windows move inwards. `dilation`: neighbours are so
    many rows apart. `stride`: so many queries in a row share a window. With
    `is_causal` a query sees rows up to itself. Values may have other features,
    and fewer heads of key and value may serve several of the query's.

    Plain tensors and ShardTensors with any dims cut, in any pieces; the result
    lies as the query does. Differentiable to any order. Communication: the rows of
    key and value that a rank's windows name, one message from each rank that holds
    some, one for each of both where pieces are large, and the adjoint in backward."""
    return _ops.neighborhood_attention(
        query,
        key,
        value,
        _values("kernel_size", int, kernel_size),
        _values("dilation", int, dilation, 1),
        _values("stride", int, stride, 1),
        _values("is_causal", bool, is_causal, False),
        scale,
    )


def _values(name, kind, given, default=None):
    """A list. None stands for the default, where there is one, as NATTEN has it."""
    given = default if given is None else given
    values = list(given) if isinstance(given, Sequence) else [given]
    if not all(isinstance(value, kind) for value in values):
        kinds = f"{kind.__name__}s"
        raise ValueError(
            f"neighborhood_attention: expected {name} of {kinds}, got {given!r}"
        )
    return values
