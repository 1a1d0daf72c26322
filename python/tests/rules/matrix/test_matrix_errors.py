"""Errors of matrix operators are those of one device: words and types."""

import pytest
import torch
from ranks import ranks, shard
from torch.distributed.tensor import Shard

WRONG = {
    "cholesky": (torch.linalg.cholesky, [(5,)]),
    "det": (torch.linalg.det, [(5,)]),
    "eigh": (torch.linalg.eigh, [(5,)]),
    "inv": (torch.linalg.inv, [(5, 4)]),
    "lu_factor": (torch.linalg.lu_factor, [(5,)]),
    "matrix_exp": (torch.linalg.matrix_exp, [(5,)]),
    "mm": (torch.mm, [(5, 4), (5, 4)]),
    "mm of rows": (torch.mm, [(5,), (5, 4)]),
    "solve": (torch.linalg.solve, [(5,), (5,)]),
}


def error_of(call):
    with pytest.raises(Exception) as caught:
        call()
    return type(caught.value), str(caught.value).split("\n")[0]


@ranks(2, 3)
@pytest.mark.parametrize("name", WRONG)
def test_errors_of_sizes_are_those_of_one_device(mesh, name):
    fn, sizes = WRONG[name]
    operands = [torch.zeros(size) for size in sizes]
    parts = [shard(x, mesh, [Shard(0)]) for x in operands]
    assert error_of(lambda: fn(*parts)) == error_of(lambda: fn(*operands))


@ranks(2)
def test_errors_of_large_operands_are_those_of_one_device(mesh):
    x = torch.zeros(()).expand(1_000_001)
    part = shard(x, mesh, [Shard(0)])
    assert error_of(lambda: torch.linalg.det(part)) == error_of(
        lambda: torch.linalg.det(x)
    )
