"""What gives several views: split, chunk, tensor_split, unbind."""

import pytest
import torch
from layouts import ALL, check
from ranks import ranks, shard
from torch.distributed.tensor import Shard


def on_host(numbers):
    """Where PyTorch wants indices of tensor_split, whatever the device."""
    return torch.tensor(numbers, device="cpu")


SPLITS = {
    "split": lambda x: x.split(3),
    "split_dim": lambda x: x.split(2, dim=1),
    "split_sizes": lambda x: x.split([1, 0, 4, 2]),
    "chunk": lambda x: x.chunk(3),
    "tensor_split": lambda x: x.tensor_split(3),
    "tensor_split_indices": lambda x: x.tensor_split(on_host([1, 4]), 0),
    "tensor_split_sections": lambda x: x.tensor_split(on_host(2), 1),
    "tensor_split_computed": lambda x: x.tensor_split((x[:2, 0] * 0).long().cpu() + 3),
    "unbind": lambda x: x.unbind(),
    "unbind_dim": lambda x: x.unbind(1),
    "iterate": lambda x: [row * 2 for row in x],
}


@ranks(*ALL)
@pytest.mark.parametrize("name", SPLITS)
def test_splits(mesh, name):
    check(mesh, (7, 3), SPLITS[name])


@ranks(2)
def test_splits_by_numbers_on_a_device_are_refused(mesh):
    """As one device refuses them."""
    if mesh.device_type == "cpu":
        pytest.skip("they are on the host")
    x, numbers = torch.randn(6, 2), torch.tensor([1, 4])
    parts = shard(x, mesh, [Shard(0)]), shard(numbers, mesh, [Shard(0)])
    for given in ((x, numbers), (parts[0], numbers), parts):
        with pytest.raises(RuntimeError, match="to be on cpu"):
            given[0].tensor_split(given[1])
