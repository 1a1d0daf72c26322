"""torch.inference_mode with tensors from outside, as data are made before it."""

import pytest
import rig
import torch
import torch.nn.functional as F
from ranks import assert_close, partitions, ranks, shard
from torch import nn
from torch.distributed.tensor import Shard

CALLS = {
    "select": lambda x: x[:, 0],
    "select of the cut dim": lambda x: x[:, :, 3],
    "a comparison": lambda x: x[:, 0] > 0,
    "slice": lambda x: x[:, :2],
    "chunks": lambda x: torch.cat([a * 2 for a in x.chunk(2, 1)], 1),
    "detach": lambda x: x.detach(),
    "data": lambda x: (x + 1).data,
    "its data": lambda x: x.data,
    "view": lambda x: x.view(2, -1),
    "flatten": lambda x: x.flatten(2),
    "transpose": lambda x: x.transpose(1, 2),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "unbind": lambda x: x.unbind(1)[1],
    "windows": lambda x: x.unfold(3, 3, 2),
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=1),
    "a view of a view": lambda x: x[:, 1].t_() if x.dim() == 3 else x[:, 1, None, 1:],
    "moved": lambda x: x.reshape(2, 4, 4, 2, 9).permute(0, 1, 3, 2, 4).flatten(1, 2),
    "gather": lambda x: x.gather(1, (x[:, :1] > 0).long()),
    "grid_sample": lambda x: F.grid_sample(
        x, x[:, :2].movedim(1, -1), align_corners=False
    ),
    "lstm": lambda x: nn.LSTM(9, 3, batch_first=True, dtype=x.dtype)(x[:, 0])[0],
    "loss": lambda x: F.cross_entropy(x, (x[:, 0] > 0).long()),
    "a copy": lambda x: x.clone(),
}
if rig.DEVICE == "guarded":  # PyTorch asks it for CUDA's fused cell
    del CALLS["lstm"]


@ranks(2, 3, "2x2")
def test_views_are_what_their_tensors_are(mesh):
    x = torch.randn(2, 4, 8, 9, dtype=torch.float64)
    for dim in (0, 2, 3):
        for sizes in partitions(x.size(dim), mesh.size()):
            s = shard(x, mesh, [Shard(dim)] * mesh.ndim, {dim: sizes})
            for name, call in CALLS.items():
                with torch.inference_mode():
                    torch.manual_seed(0)
                    expected = call(x)
                    torch.manual_seed(0)
                    found = call(s)
                    assert_close(found, expected)
                if name != "windows":  # those of a cut dim are a copy
                    assert found.is_inference() == expected.is_inference(), name
                again = (found + 1) if not found.is_inference() else found
                assert_close(again, expected + (again is not found))


@ranks(2)
def test_of_inference_tensors(mesh):
    with torch.inference_mode():
        s = shard(torch.randn(4, 6), mesh, [Shard(0)]) * 1
    assert s.is_inference()
    assert s.detach().is_inference()
    with pytest.raises(RuntimeError, match="[Ii]nference tensors"):
        s[:, 0] * torch.ones(4, requires_grad=True)


@ranks(2, 3, "2x2")
def test_a_view_is_looked_at_after_the_mode(mesh):
    x = torch.arange(24.0).reshape(6, 4)
    with torch.inference_mode():
        whole = x * 1
        s = shard(x, mesh, [Shard(0)] * mesh.ndim) * 1
        views = [(t[1], t.view(-1), t[1][2:], t.diagonal()) for t in (whole, s)]
        for t in (whole, s):
            t.add_(1)
    for expected, found in zip(*views, strict=True):
        assert_close(found.clone(), expected)


@ranks(2, 3, "2x2")
def test_writes_through_views(mesh):
    x = torch.arange(24.0).reshape(6, 4)
    s = shard(x, mesh, [Shard(0)] * mesh.ndim)
    version = s._version
    with torch.inference_mode():
        for t in (x, s):
            t[:, 1].mul_(3)
            t[1:4] = 5
            t.t()[2].add_(1)
    assert_close(s, x)
    assert s._version - version == x._version
