"""What opt_einsum asks of the package that an array's class comes from.

opt_einsum looks its functions up in the module that stands first in the name of
the class' module, and takes numpy's where it finds none: for a ShardTensor that
is `shardtensor`. These are opt_einsum's documented names and signatures, which
are numpy's; the work is torch's.
"""

import string
from collections.abc import Sequence

import torch


def einsum(equation: str, *operands: torch.Tensor) -> torch.Tensor:
    """torch.einsum; indices may be any characters, as opt_einsum's are in large
    contractions."""
    return torch.einsum(_in_letters(equation), *operands)


def tensordot(x: torch.Tensor, y: torch.Tensor, axes=2) -> torch.Tensor:
    """torch.tensordot."""
    return torch.tensordot(x, y, dims=axes)


def transpose(x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """numpy.transpose: all dims in a new order, torch's permute."""
    return x.permute(*axes)


def _in_letters(equation):
    """torch.einsum knows the 52 letters only."""
    others = [c for c in dict.fromkeys(equation) if not (c.isascii() or c in ",->. ")]
    if not others:
        return equation
    free = [c for c in string.ascii_letters if c not in equation]
    return equation.translate(str.maketrans(dict(zip(others, free, strict=False))))
