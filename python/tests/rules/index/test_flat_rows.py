"""Indices of several dims and masks of cut ones, read as rows of one dim."""

import pytest
import torch
from layouts import placements_of
from ranks import check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

import shardtensor

BATCH, POINTS, GROUPS = 3, 7, (5, 2)
ENTRIES = torch.arange(BATCH).view(-1, 1, 1)


def cloud():
    return torch.randn(BATCH, POINTS, 2, dtype=torch.float64, requires_grad=True)


def groups(low=0):
    return torch.randint(low, POINTS, (BATCH, *GROUPS))


def as_pointnet_has_it(x, index):
    entries = torch.arange(BATCH).view(-1, 1, 1).repeat(1, *GROUPS)
    return x[entries, index, :].sin()


def behind(x, index):
    return x.unsqueeze(0)[:, ENTRIES.int(), index].sin()


def apart(x, index):
    return x[ENTRIES, :, index % 2].sin()


READS = {
    "grouped": lambda x, index: x[ENTRIES, index].sin(),
    "pointnet": as_pointnet_has_it,
    "behind": behind,
    "apart": apart,
    "three": lambda x, index: x[ENTRIES - BATCH, index, index % 2].sin(),
    "turned": lambda x, index: x.transpose(0, 1)[index, ENTRIES].sin(),
    "own_entries": lambda x, index: x[index % BATCH, index].sin(),
    "few": lambda x, index: x[ENTRIES[:, 0], index[:, :2, 0]].sin(),
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", READS)
def test_rows_of_groups_in_any_pieces(mesh, name):
    with shardtensor.fallback_mode("error"):
        for dim in (0, 1):
            others = partitions(groups().size(dim), mesh.size())
            for i, sizes in enumerate(partitions(cloud().size(dim), mesh.size())):
                cuts = {dim: others[i % len(others)]}
                for index in (
                    sharded(groups(-POINTS), [Shard(dim)], cuts),
                    sharded(groups(), [Shard(1 - dim)]),
                    groups(),
                ):
                    check_op(
                        READS[name], sharded(cloud(), [Shard(dim)], {dim: sizes}),
                        index, mesh=mesh, second_order=True,
                    )  # fmt: skip


@ranks("2x2")
@pytest.mark.parametrize("name", READS)
def test_rows_of_groups_on_a_grid_of_ranks(mesh, name):
    layouts = [placements_of(mesh, a, b) for a in (0, 1) for b in (0, 1)]
    layouts.append([Replicate(), Shard(1)])
    with shardtensor.fallback_mode("error"):
        for i, layout in enumerate(layouts):
            for other in (layout, layouts[i - 1]):
                check_op(
                    READS[name], sharded(cloud(), layout), sharded(groups(), other),
                    mesh=mesh, second_order=True,
                )  # fmt: skip


@ranks(2, 3)
def test_groups_send_the_rows_that_they_name(mesh):
    points = 64 * mesh.size()
    x = torch.randn(2, points, 8)
    index = torch.arange(points).view(1, -1, 1).repeat(2, 1, 3)
    index[:, 0, 0] = points - 1
    cut, named = shard(x, mesh, [Shard(1)]), shard(index, mesh, [Shard(1)])
    shardtensor.reset_comm_stats()
    found = cut.requires_grad_()[torch.arange(2).view(-1, 1, 1), named]
    found.sum().backward()
    sent = shardtensor.comm_stats().bytes
    assert sent < x[0, :16].nbytes, sent
    assert found.placements == (Shard(1),)


@ranks(2)
def test_groups_lie_in_the_memory_order_of_one_device(mesh):
    x, index = cloud(), groups()
    cut, named = shard(x, mesh, [Shard(1)]), shard(index, mesh, [Shard(1)])
    for read in (
        lambda x, i: x[ENTRIES, i],
        lambda x, i: x.permute(2, 0, 1)[:, ENTRIES, i],
        lambda x, i: x.transpose(0, 1)[i, ENTRIES],
        lambda x, i: x[:, i, i % 2],
        lambda x, i: x.permute(1, 2, 0).unsqueeze(0)[:, i, :, ENTRIES],
    ):
        assert read(cut, named).stride() == read(x, index).stride()


@ranks(2, 3, "2x2")
def test_a_row_of_groups_that_is_none_is_the_same_error_everywhere(mesh):
    x, index = cloud(), groups()
    index[-1, -1, -1] = POINTS
    for dim in (0, 1):
        layout = placements_of(mesh, *[dim] * mesh.ndim)
        cut, named = shard(x, mesh, layout), shard(index, mesh, layout)
        with pytest.raises(IndexError, match=f"index {POINTS} is out of bounds"):
            cut[ENTRIES, named]
        with pytest.raises(IndexError, match=f"index -{BATCH + 1} is out of bounds"):
            cut[-2 - ENTRIES, named % POINTS]
        with pytest.raises(
            IndexError, match=r"shape mismatch.*shapes \[4\], \[3, 5, 2\]"
        ):
            cut[torch.arange(BATCH + 1), named]


def hardest(x, limit):
    loss = x.square()
    return loss[loss > limit].mean()


def rows_of_mask(x, mask):
    return x[:, mask].sin()


@ranks(1, 2, 3, "2x2")
def test_masks_of_cut_dims_in_any_pieces(mesh):
    x = torch.rand(2, 5, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(5, 6) > 0.5
    with shardtensor.fallback_mode("error"):
        for dims in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2)):
            layout = placements_of(mesh, *dims[: mesh.ndim])
            cuts = [None] if mesh.ndim > 1 else partitions(x.size(dims[0]), mesh.size())
            for sizes in cuts:
                given = sharded(x, layout, sizes and {dims[0]: sizes})
                for function, *others in (
                    (hardest, 0.5),
                    (lambda x: x[x > 2],),
                    (lambda x: x[x.detach() > 0.5].sin(),),
                    (lambda x: x.masked_select(x[0] > 0.5).sin(),),
                    (rows_of_mask, mask),
                ):
                    check_op(function, given, *others, mesh=mesh, second_order=True)


def merged_batches(x, index):
    """As get_graph_feature() of DGCNN reads neighbours."""
    batches, points, channels = x.shape
    rows = index + torch.arange(batches).view(-1, 1, 1) * points
    found = x.reshape(batches * points, channels)[rows.view(-1)]
    return found.view(*index.shape, channels)


@ranks(2, 3, "2x2")
def test_rows_of_merged_batches_travel_as_others(mesh):
    points, axes = 20 * mesh.size(), [Shard(1)] * mesh.ndim
    x = torch.randn(2, points, 3, requires_grad=True)
    ring = torch.stack([torch.arange(points), (torch.arange(points) + 1) % points], 1)
    index = ring.expand(2, -1, -1).contiguous()
    for sizes in (None, {1: [points // mesh.size() + (i == 0) - (i == 1)
                             for i in range(mesh.size())]}):  # fmt: skip
        check_op(
            merged_batches, sharded(x, axes, sizes), sharded(index, axes, sizes),
            mesh=mesh, second_order=True,
        )  # fmt: skip
        cut, named = shard(x, mesh, axes, sizes), shard(index, mesh, axes, sizes)
        shardtensor.reset_comm_stats()
        found = merged_batches(cut, named)
        assert found.placements == tuple(axes)
        found.sum().backward()
        assert shardtensor.comm_stats().bytes < 200  # 2 rows each way, what to ask for


def nearest(distance, other):
    """As farthest_point_sample() of PointNet++ keeps what is nearest."""
    kept = distance.sin()
    mask = other < kept
    kept[mask] = other[mask].cos()
    return kept


@ranks(1, 2, 3, "2x2")
def test_rows_under_a_mask_are_written_from_any_pieces(mesh):
    distance, other = cloud(), cloud()
    layouts = [([Shard(1)] * mesh.ndim, {1: s}) for s in partitions(7, mesh.size())]
    if mesh.ndim == 2:
        layouts += [([Shard(0), Shard(1)], None), ([Shard(2), Shard(1)], None)]
    with shardtensor.fallback_mode("error"):
        for layout, sizes in layouts:
            found = check_op(
                nearest, sharded(distance, layout, sizes),
                sharded(other, layout, sizes), mesh=mesh, second_order=True,
            )  # fmt: skip
            assert found._spec == shard(distance, mesh, layout, sizes)._spec
