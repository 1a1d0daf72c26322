"""One call of an operator or a module; quick to import."""

import collections.abc
import dataclasses
import random

import numpy
import torch
from torch.utils._pytree import tree_flatten


@dataclasses.dataclass
class Sample:
    """One call. `call` may be a module, whose parameters and buffers count."""

    label: str
    call: collections.abc.Callable
    args: tuple
    kwargs: dict

    def tensors(self):
        """Positions of the tensors that can be cut, among all leaves."""
        leaves, _ = tree_flatten((self.args, self.kwargs))
        written = {id(x) for x in tree_flatten(self.kwargs.get("out"))[0]}
        return [
            i for i, x in enumerate(leaves)
            if isinstance(x, torch.Tensor)
            and x.layout == torch.strided
            and not x.is_meta
            and id(x) not in written
        ]  # fmt: skip


def seed_everything():
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


def in_place(inplace, x, *args, **kwargs):
    return inplace(x.clone(), *args, **kwargs)  # a leaf cannot be written
