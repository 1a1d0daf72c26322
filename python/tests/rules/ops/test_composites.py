"""Operators that PyTorch makes of others, and copies of views."""

import pytest
import torch
from layouts import ALL, check, check_native
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

COMPOSITES = {
    "channel_shuffle": lambda x: torch.channel_shuffle(x, 2),
    "diag_embed": lambda x: (
        torch.diag_embed(x, -1) + torch.diag_embed(x, 1, 0, 2).sum()
    ),
    "dist": lambda x: torch.dist(x, x.exp(), 3),
    "rot90": lambda x: x.rot90(1, (0, 2)),
    "rot90_back": lambda x: x.rot90(-1, (1, 2)),
    "cross": lambda x: torch.linalg.cross(x, x.exp(), dim=2),
}
COPIES = {
    "alias": lambda x: torch.alias_copy(x),
    "diagonal": lambda x: torch.diagonal_copy(x, 0, 0, 1),
    "expand": lambda x: torch.expand_copy(x, (2, 4, 6, 3)),
    "narrow": lambda x: torch.narrow_copy(x, 0, 1, 2),
    "permute": lambda x: torch.permute_copy(x, (2, 0, 1)),
    "select": lambda x: torch.select_copy(x, 0, 1),
    "slice": lambda x: torch.slice_copy(x, 0, 1, 4, 2),
    "split": lambda x: torch.split_copy(x, 2),
    "split_sizes": lambda x: torch.split_with_sizes_copy(x, [1, 3]),
    "squeeze": lambda x: torch.squeeze_copy(x.unsqueeze(1)),
    "squeeze_dim": lambda x: torch.squeeze_copy(x.unsqueeze(1), 1),
    "t": lambda x: torch.t_copy(x.sum(2)),
    "transpose": lambda x: torch.transpose_copy(x, 0, 2),
    "unbind": lambda x: torch.unbind_copy(x),
    "unfold": lambda x: torch.unfold_copy(x, 1, 3, 2),
    "unsqueeze": lambda x: torch.unsqueeze_copy(x, 1),
    "view": lambda x: torch.view_copy(x, (4, 2, 9)),
}
# As the views themselves, these need a cut dim whole.
MOVED = ("diagonal", "select", "unbind", "unfold", "view", "narrow", "slice")
MOVED += (
    "split",
    "split_sizes",
    "rot90",
    "rot90_back",
    "channel_shuffle",
    "diag_embed",
)


@ranks(*ALL)
@pytest.mark.parametrize("name", COMPOSITES | COPIES)
def test_composites_and_copies(mesh, name):
    run = check if name in MOVED else check_native
    run(mesh, (4, 6, 3), (COMPOSITES | COPIES)[name])


@ranks(2, 3)
@pytest.mark.parametrize("name", MOVED)
def test_other_dims_stay_cut(mesh, name):
    dims = {
        "unfold": [0, 2],
        "rot90_back": [0],
        "rot90": [1],
        "channel_shuffle": [0, 2],
    }
    dims |= {"diagonal": [2], "view": [0], "diag_embed": [0]}
    fn = (COMPOSITES | COPIES)[name]
    check_native(mesh, (4, 6, 3), fn, dims=dims.get(name, [1, 2]))


@ranks(2)
def test_a_copy_is_no_view(mesh):
    x = torch.randn(4, 3)
    part = shard(x, mesh, [Shard(0)])
    torch.permute_copy(part, (1, 0)).zero_()
    torch.view_copy(part, (4, 3)).zero_()
    assert_close(part, x)


@ranks(2, 3, "2x2")
def test_channel_shuffle_of_any_strides(mesh):
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    for placement in (Shard(0), Shard(1), Shard(2)):
        s = shard(x, mesh, [placement] * mesh.ndim)
        last = torch.channels_last
        for whole, part in (
            (x.transpose(1, 2), s.transpose(1, 2)),
            (x.to(memory_format=last), s.to(memory_format=last)),
        ):
            expected = torch.channel_shuffle(whole, 2)
            found = torch.channel_shuffle(part, 2)
            assert_close(found, expected)
            assert found.stride() == expected.stride()


def bytes_made(fn):
    """Of all tensors that a call makes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        fn()
    return sum(max(event.self_cpu_memory_usage, 0) for event in seen.events())


@ranks(4)
def test_diagonals_are_made_by_pieces(mesh):
    n = 1024
    row = shard(torch.ones(n, dtype=torch.uint8), mesh, [Shard(0)])
    assert bytes_made(lambda: row.diag_embed()) < 0.75 * n * n
    for dim in (0, 1):
        matrix = shard(torch.ones(n, n), mesh, [Shard(dim)])
        assert bytes_made(lambda m=matrix: m.trace()) < 1.5 * n * n


@ranks(2)
def test_no_rows_have_channels_to_shuffle(mesh):
    for shape in ((0, 6, 4), (2, 6, 0, 3), (2, 0, 3)):
        x = torch.zeros(shape)
        for dim in range(len(shape)):
            part = shard(x, mesh, [Shard(dim)])
            for shuffle in (torch.channel_shuffle, torch.native_channel_shuffle):
                assert_close(shuffle(part, 3), shuffle(x, 3))
    none = shard(torch.zeros(0, 6, 4), mesh, [Shard(1)])
    with pytest.raises(RuntimeError, match="got 4 groups of 6 channels"):
        torch.channel_shuffle(none, 4)
    with pytest.raises(RuntimeError, match="more than 2 dims, got sizes .0, 6."):
        torch.channel_shuffle(none[..., 0], 3)
