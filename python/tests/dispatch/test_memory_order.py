"""Results lie in memory as on one device, whatever the pieces do."""

import pytest
import torch
from memory import MEMORY, layouts_of
from ranks import assert_close, ranks, shard

POINTWISE = {
    "one": lambda x: x.exp(),
    "number": lambda x: x * 2,
    "itself": lambda x: x + x,
    "contiguous": lambda x: x + torch.ones(x.shape, dtype=x.dtype),
    "contiguous_first": lambda x: torch.ones(x.shape, dtype=x.dtype) + x,
    "row": lambda x: x * torch.ones(x.shape[-1:], dtype=x.dtype),
    "column": lambda x: torch.ones(x.shape[0], *[1] * (x.dim() - 1)) * x,
    "cast": lambda x: x.float(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "clone": lambda x: x.clone(),
    "contiguous_clone": lambda x: x.contiguous(),
    "empty_like": lambda x: torch.empty_like(x).fill_(0),
    "zeros_like": lambda x: torch.zeros_like(x, dtype=torch.int32),
    "fill": lambda x: torch.ops.aten.fill(x, 1.0),
}


@ranks(1, 2)
@pytest.mark.parametrize("memory", MEMORY)
def test_results_lie_as_on_one_device(mesh, memory):
    shape, lay = MEMORY[memory]
    base = torch.randn(shape, dtype=torch.float64)
    for placements, sizes in layouts_of(mesh, shape):
        whole, part = lay(base), lay(shard(base, mesh, placements, sizes))
        for name, fn in POINTWISE.items():
            expected, actual = fn(whole), fn(part)
            assert_close(actual, expected, what=name)
            assert actual.stride() == expected.stride(), f"{name} of {memory}"
