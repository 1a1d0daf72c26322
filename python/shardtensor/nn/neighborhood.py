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
    some, and the adjoint in backward."""
    return _ops.neighborhood_attention(
        query,
        key,
        value,
        kernel_size,
        _values(dilation),
        _values(stride),
        [is_causal] if isinstance(is_causal, bool) else list(is_causal),
        scale,
    )


def _values(given):
    """None stands for 1, as NATTEN has it."""
    return 1 if given is None else given
