"""ShardTensors on meta: sizes, strides and layouts without memory or messages."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Shard

import shardtensor


def rows(x, *sizes):
    """An index where x is."""
    return torch.ones(sizes, dtype=torch.long, device=x.device)


FAMILIES = {
    "index": lambda x: x[:, rows(x, 3)],
    "index_of_host": lambda x: x[:, torch.tensor([0, 2, 1], device="cpu")],
    "index_select": lambda x: x.index_select(-1, rows(x, 5)),
    "index_of_two": lambda x: x[rows(x, 3), rows(x, 3)],
    "index_put": lambda x: x.index_put((rows(x, 3),), x[:3]),
    "index_add": lambda x: x.index_add(0, rows(x, 3), x[:3]),
    "index_reduce": lambda x: x.index_reduce(1, rows(x, 3), x[:, :3], "amax"),
    "gather": lambda x: x.gather(1, rows(x, 4, 2, 8)),
    "take_along_dim": lambda x: x.take_along_dim(rows(x, 1, 2, 1), 1),
    "scatter": lambda x: x.scatter(0, rows(x, 4, 2, 8), x),
    "embedding": lambda x: F.embedding(rows(x, 5), x[0]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "nearest": lambda x: F.interpolate(x[None], scale_factor=2, mode="nearest"),
    "nearest_line": lambda x: F.interpolate(x, (5,), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x[None], (5, 7), mode="bilinear"),
    "conv": lambda x: F.conv1d(x, x.new_ones(3, 6, 3), padding=1),
    "pool": lambda x: F.max_pool1d(x, 2),
    "group_norm": lambda x: F.group_norm(x, 2),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(1)[0],
    "fft": lambda x: torch.fft.rfft(x),
    "product": lambda x: x @ x.mT,
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x @ x.mT),
    "solve": lambda x: torch.linalg.solve(x @ x.mT, x),
    "one_hot": lambda x: F.one_hot(rows(x, 4) * (x[:, 0, 0] > 9), 3),
    "histogram": lambda x: x.histc(5),
    "windows": lambda x: x.unfold(1, 3, 1)[:, 1:],
    "dropout": lambda x: F.dropout(x),
    "loss": lambda x: F.mse_loss(x, x * 2),
}


def shown(tensor):
    local = tensor.to_local()
    return tensor.shape, tensor.stride(), tensor.placements, local.shape, tensor.dtype


@ranks(2)
def test_meta_tensors_show_what_others_do(mesh):
    for name, family in FAMILIES.items():
        for dim in range(3):
            x = shard(torch.randn(4, 6, 8), mesh, [Shard(dim)])
            expected = shown(family(x.clone()))
            meta = x.to("meta")
            shardtensor.reset_comm_stats()
            actual = family(meta)
            assert actual.is_meta, name
            assert shown(actual) == expected, (name, dim)
            assert shardtensor.comm_stats().messages == 0, (name, dim)


@ranks(2)
def test_only_the_device_of_a_tensor_is_asked_for_determinism(mesh):
    """Meta kernels take it for CUDA, where some operators are refused."""
    x, image = torch.randn(5, 3), torch.randn(2, 3, 4, 4)
    pooled, places = F.max_pool2d(image, 2, return_indices=True)
    families = {
        "median": (lambda x: x.median(1), x),
        "median_kept": (lambda x: x.nanmedian(-1, keepdim=True), x),
        "mode": (lambda x: x.mode(1), x),
        "kthvalue": (lambda x: x.kthvalue(2, 1), x),
        "max_unpool": (
            lambda pooled: F.max_unpool2d(
                pooled, like(pooled, places), 2, output_size=(5, 4)
            ),
            pooled.to(memory_format=torch.channels_last),
        ),
    }
    torch.use_deterministic_algorithms(True)
    try:
        for family, (fn, x) in families.items():
            expected = refused = None
            try:
                expected = fn(x)
            except RuntimeError as error:
                refused = str(error)
            for dim in range(2):
                part = shard(x, mesh, [Shard(dim)])
                if refused:
                    with pytest.raises(RuntimeError, match="deterministic"):
                        fn(part)
                    continue
                found = fn(part)
                for one, other in zip(leaves(found), leaves(expected), strict=True):
                    assert_close(one, other, what=family)
                    assert one.stride() == other.stride(), family
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def like(x, index):
    """index where and as x is."""
    if not shardtensor.is_shard_tensor(x):
        return index
    return shardtensor.distribute_tensor(index, x.device_mesh, x.placements)


def leaves(result):
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@ranks(2)
def test_other_threads_kernels_are_asked_for_determinism(mesh):
    """The process's flag stays as it is while sizes are asked for."""
    x = shard(torch.randn(23, 7), mesh, [Shard(0)])  # sizes that nobody asked for
    seen = []

    def alert(caller):
        seen.append((caller, torch.are_deterministic_algorithms_enabled()))

    torch.use_deterministic_algorithms(True)
    try:
        with mock.patch("torch._prims_common.alert_not_deterministic", alert):
            x.median(1)
            x.mode(1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(flag for _, flag in seen), seen
