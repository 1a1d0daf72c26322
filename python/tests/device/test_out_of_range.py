"""Labels and rows out of range on a device: the same error on all ranks."""

import re

import pytest
import rig
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import ranks, shard
from torch.distributed.tensor import Shard

guarded_only = pytest.mark.skipif(
    rig.DEVICE != "guarded", reason="errors of the guarded device"
)


@guarded_only
@ranks(2)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_labels_out_of_range(mesh, reduction):
    x = torch.randn(4, 3, 6)
    target = torch.randint(0, 3, (4, 6))
    s = shard(x, mesh, [Shard(2)])
    F.cross_entropy(s, shard(target, mesh, [Shard(1)]), reduction=reduction)
    target[2, 5] = 255
    with pytest.raises(RuntimeError, match="targets are out of bounds"):
        F.cross_entropy(s, shard(target, mesh, [Shard(1)]), reduction=reduction)


@guarded_only
@ranks(2)
def test_indices_out_of_range(mesh):
    """A kernel says so, or where a plan is made the host."""
    x = torch.rand(5, 3)
    for dim in (0, 1):
        s = shard(x, mesh, [Shard(dim)])
        with pytest.raises(IndexError, match="index 5 is out of bounds for dimension"):
            s[torch.tensor([0, 5])].to_local().cpu()


@guarded_only
@ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_out_of_range(mesh, dim):
    """Written or read, the same error on all ranks."""
    x, bad = torch.rand(5, 3), torch.tensor([0, 5])
    rows, wide = torch.rand(2, 3), bad[:, None].expand(2, 3)
    for name, call in {
        "index_put_": lambda s: s.index_put_((bad,), torch.tensor(1.0)),
        "index_put_ of rows": lambda s: s.index_put_((bad,), rows, accumulate=True),
        "index_fill_": lambda s: s.index_fill_(0, bad, 2.0),
        "index_copy": lambda s: s.index_copy(0, bad, rows),
        "index_add": lambda s: s.index_add(0, bad, rows),
        "scatter": lambda s: s.scatter(0, wide, rows),
        "scatter_add": lambda s: s.scatter_add(0, wide, rows),
        "gather": lambda s: s.gather(0, wide),
        "index_select": lambda s: s.index_select(0, bad),
    }.items():
        s, said = shard(x.clone(), mesh, [Shard(dim)]), None
        try:
            call(s).to_local().cpu()
        except (IndexError, RuntimeError) as error:
            said = type(error).__name__, str(error)
        everyone = [None, None]
        dist.all_gather_object(everyone, said)
        assert said and everyone[0] == everyone[1], (name, everyone)
        assert re.search("out of (bounds|range)", said[1]), (name, said)
