"""torch.autograd.detect_anomaly."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from ranks import ranks, shard
from torch.distributed.tensor import Replicate, Shard

import shardtensor


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("policy", ["coalesced", "immediate"])
def test_anomalies_of_one_piece_are_an_error_on_all_ranks(mesh, policy):
    """Of a local term of a weight's gradient; others would wait for its message."""
    x = torch.ones(1, 1, 8)
    x[..., 7] = torch.inf
    weight = torch.ones(1, 1, 1, requires_grad=True)
    cut = shard(x, mesh, [Shard(2)] * mesh.ndim)
    text = "'ConvolutionBackward0' returned nan values in its 1th output"
    with shardtensor.gradient_policy(policy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            for inputs in (cut, shard(x, mesh, [Replicate()] * mesh.ndim)):
                with pytest.raises(RuntimeError, match=text) as error:
                    F.conv1d(inputs * 0, weight).sum().backward()
                last = f" (on mesh rank {mesh.size() - 1})"
                assert (last in str(error.value)) == (inputs is cut)
            F.conv1d(cut.isfinite() * 1.0, weight).sum().backward()
            assert cut.isfinite().sum().item() == 7  # messages are those of one call


@ranks(2)
def test_anomalies_are_warned_of_where_they_are(mesh):
    x = torch.ones(1, 1, 8)
    x[..., 7] = torch.inf
    weight = torch.ones(1, 1, 1, requires_grad=True)
    cut = shard(x, mesh, [Shard(2)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError):
            F.conv1d(cut * 0, weight).sum().backward()
    lines = [str(one.message) for one in said if "Error detected" in str(one.message)]
    assert len(lines) == (mesh.get_rank() == 1)
    assert all("Traceback of forward call" in line for line in lines)
    assert all("test_anomaly.py" in line for line in lines)
