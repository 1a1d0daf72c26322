"""Tensors from one rank, from equal ones and from nothing."""

import contextlib

import pytest
import rig
import torch
import torch.distributed as dist
from layouts import sweep
from oracle import Repeated, merged
from ranks import assert_close, partitions, ranks, uneven
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor import (
    _C,
    ShardTensor,
    distribute_tensor,
    make_spec,
    scatter_tensor,
)


def numbered(*shape):
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).reshape(shape)


@ranks(1, 2, 3, 4)
def test_scatter_gives_each_rank_its_shard_only(mesh):
    x = numbered(10, 3)
    for source in range(mesh.size()):
        for sizes in partitions(10, mesh.size(), repeated=False):
            mine = x if dist.get_rank() == source else None
            shardtensor.reset_comm_stats()
            y = scatter_tensor(mine, source, mesh, (Shard(0),), sizes={0: sizes})
            assert type(y) is ShardTensor and y.is_leaf and not y.requires_grad
            assert y._spec.sizes() == {0: sizes}
            assert_close(y, x)
            sent = 10 - sizes[source] if dist.get_rank() == source else 0
            assert shardtensor.comm_stats().bytes == sent * 3 * 8


@ranks("2x2", "1x2", "2x1")
@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0)),
        (Replicate(), Shard(1)),
        (Replicate(), Replicate()),
    ],
    ids=str,
)
def test_scatter_on_two_axes(mesh, placements):
    x = numbered(7, 5)
    source = mesh.mesh.flatten().tolist()[-1]
    mine = x if dist.get_rank() == source else None
    y = scatter_tensor(mine, source, mesh, placements, (7, 5), requires_grad=True)
    assert y.requires_grad and y.is_leaf and y.placements == placements
    assert_close(y, x)


@ranks(1, 2)
def test_scatter_keeps_the_sources_memory_format(mesh):
    for shape, told in (
        ((2, 3, 7, 5), torch.channels_last),
        ((2, 3, 7, 5), torch.contiguous_format),
        ((2, 3, 7, 2, 2), torch.channels_last_3d),
    ):
        x = numbered(*shape).to(memory_format=told)
        mine = x if dist.get_rank() == 0 else None
        y = scatter_tensor(mine, 0, mesh, [Shard(2)])
        assert y.stride() == x.stride()
        assert_close(y, x)
        for source in (0, None):
            d = distribute_tensor(x, mesh, [Shard(2)], src_data_rank=source)
            assert d.stride() == x.stride()
            assert_close(d, x)


@ranks(1, 2)
def test_scatter_of_scalars_and_conversion(mesh):
    mine = torch.tensor(3) if dist.get_rank() == 0 else None
    y = scatter_tensor(mine, 0, mesh, [Replicate()], dtype=torch.float32)
    assert y.dtype == torch.float32 and y.item() == 3.0


@ranks(2, 3, "2x2")
def test_dims_that_are_merged_from_two(mesh):
    x, pieces = numbered(12, 3), merged(12, mesh.size())
    sizes = {0: _C.Partition(list(pieces), pieces.repeat)}
    placements = [Shard(0)] * mesh.ndim
    mine = x if dist.get_rank() == 0 else None
    assert_close(scatter_tensor(mine, 0, mesh, placements, sizes=sizes), x)
    for source in (0, None):
        found = distribute_tensor(
            x, mesh, placements, sizes=sizes, src_data_rank=source
        )
        assert found.is_leaf
        assert_close(found, x)
    where = {"device_mesh": mesh, "placements": placements, "sizes": sizes}
    assert_close(shardtensor.ones(12, 3, **where), torch.ones(12, 3))
    torch.manual_seed(3)
    drawn = shardtensor.randn(12, 3, **where)
    torch.manual_seed(3)
    assert_close(drawn, torch.randn(12, 3))


@ranks(2, 3)
def test_scatter_refuses_alike_on_every_rank(mesh):
    mine = numbered(4, 2) if dist.get_rank() == 1 else None
    sharded = scatter_tensor(mine, 1, mesh, [Shard(0)])
    outside = mesh.size()
    for message, args in [
        (f"global_src {outside} is not one of", (mine, outside, mesh, [Shard(0)])),
        ("global_shape says", (mine, 1, mesh, [Shard(0)], (5, 2))),
        ("got NoneType", (mine, 0, mesh, [Shard(0)])),
        ("got a ShardTensor", (sharded, 1, mesh, [Shard(0)])),
        ("each of the 1 mesh axes", (mine, 1, mesh, [Shard(0)] * 2)),
        ("expected Shard and Replicate", (mine, 1, mesh, [Partial()])),
    ]:
        with pytest.raises(ValueError, match=message):
            scatter_tensor(*args)
    first, x, cut = dist.get_rank() == 0, numbered(4, 2), [Shard(0)]
    for error, message, call in [
        (
            TypeError,
            r"^scatter_tensor: global_shape: expected sizes, got 10 \(on mesh rank 0",
            lambda: scatter_tensor(x, 0, mesh, cut, 10),
        ),
        (
            ValueError,
            rf"global_src {outside} is not one of .* \(on mesh rank 0",
            lambda: scatter_tensor(x, outside if first else 0, mesh, cut),
        ),
        (
            ValueError,
            r"each of the 1 mesh axes.* \(on mesh rank 0",
            lambda: scatter_tensor(x, 0, mesh, cut * (1 + first)),
        ),
        (
            ValueError,
            r"(?s)scatter_tensor: ranks were told different.*Shard\(dim=1",
            lambda: scatter_tensor(x, 0, mesh, [Shard(int(first))]),
        ),
        (
            ValueError,
            "'requires_grad': True",
            lambda: scatter_tensor(x, 0, mesh, cut, requires_grad=first),
        ),
        (
            ValueError,
            r"src_data_rank 9 is outside .* \(on mesh rank 0",
            lambda: distribute_tensor(x, mesh, cut, src_data_rank=9 if first else 0),
        ),
        (
            ValueError,
            r"expected a plain tensor, got NoneType \(on mesh rank 0",
            lambda: distribute_tensor(None if first else x, mesh, cut),
        ),
        (
            ValueError,
            r"got a ShardTensor on .* redistribute\(\) cuts",
            lambda: distribute_tensor(sharded, mesh, cut),
        ),
        (
            ValueError,
            r"got a DTensor on .* of placements .*from_dtensor\(\) .* \(on mesh rank 0",
            lambda: distribute_tensor(sharded.to_dtensor() if first else x, mesh, cut),
        ),
        (
            ValueError,
            "scatter_tensor: expected a plain tensor, got a DTensor",
            lambda: scatter_tensor(sharded.to_dtensor(), 0, mesh, cut),
        ),
        (
            RuntimeError,
            r"expected a leaf, got .*Mul.* history would be lost; detach\(\)",
            lambda: distribute_tensor(x.clone().requires_grad_() * 2, mesh, cut),
        ),
    ]:
        with pytest.raises(error, match=message) as told:
            call()
        everyones = [None] * mesh.size()
        dist.all_gather_object(everyones, str(told.value))
        assert len({*everyones}) == 1
    assert_close(scatter_tensor(x, 0, mesh, cut), x)


@ranks(1, 2, 3, 4)
def test_distribute_takes_one_ranks_values(mesh):
    x = numbered(10, 3)
    mine = x + dist.get_rank()
    sizes = {0: uneven(10, mesh.size())}
    assert_close(distribute_tensor(mine, mesh, [Shard(0)], sizes=sizes), x)
    last = mesh.size() - 1
    y = distribute_tensor(mine.requires_grad_(), mesh, [Shard(1)], src_data_rank=last)
    assert y.is_leaf and y.requires_grad
    assert_close(y, x + last)
    shardtensor.reset_comm_stats()
    y = distribute_tensor(x, mesh, [Shard(0)], sizes=sizes, src_data_rank=None)
    assert shardtensor.comm_stats().bytes == 0
    assert_close(y, x)
    assert_close(distribute_tensor(x, mesh), x)
    with pytest.raises(ValueError, match="src_data_rank 9 is outside"):
        distribute_tensor(x, mesh, src_data_rank=9)


class Tables(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", numbered(7, 4))
        self.register_buffer("other", numbered(7))
        self.register_buffer("none", None)
        self.register_buffer("zeros", torch.zeros(4, 7))


@ranks(1, 3, "2x2")
def test_buffers_are_cut_where_they_are_registered(mesh):
    others = [Replicate()] * (mesh.ndim - 1)
    names = "Tables.rows", "Tables.none", "Tables.zeros", "other"
    told = {name: [Shard(-2), *others] for name in names}
    shardtensor.reset_comm_stats()
    for new_tensors in (contextlib.nullcontext(), shardtensor.new_tensors_on(mesh)):
        with shardtensor.cut_buffers(told, mesh), new_tensors:
            tables = Tables()
        for name in ("rows", "zeros"):
            assert getattr(tables, name).placements == (Shard(0), *others)
        assert type(tables.other) is torch.Tensor and tables.none is None
    assert shardtensor.comm_stats().bytes == 0
    if mesh.size() > 1:
        rows = tables.rows.to_local().untyped_storage()
        assert rows.nbytes() < numbered(7, 4).untyped_storage().nbytes()
    assert_close(tables.rows, numbered(7, 4))
    assert type(Tables().rows) is torch.Tensor
    with (
        pytest.raises(IndexError, match=r"cut_buffers: Tables.other: .*Shard\(dim=1"),
        shardtensor.cut_buffers({"Tables.other": [Shard(1), *others]}, mesh),
    ):
        Tables()
    with (
        pytest.raises(ValueError, match="expected one placement for each"),
        shardtensor.cut_buffers({"Tables.other": []}, mesh),
    ):
        pass
    assert type(Tables().other) is torch.Tensor


@ranks(2, 3)
def test_meta_tensors_are_cut_without_messages(mesh):
    """Models too large for one device are made of them."""
    x = torch.empty(7, 4, device="meta", requires_grad=True)
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        for y in (
            distribute_tensor(x, mesh, placements),
            distribute_tensor(x, mesh, placements, src_data_rank=None),
            scatter_tensor(x, 1, mesh, placements, requires_grad=True),
        ):
            assert y.is_meta and y.is_leaf and y.requires_grad and y.shape == (7, 4)
            assert y.to_local().shape == make_spec(mesh, (7, 4), placements).local_shape
            convolved = torch.nn.functional.conv1d(y.t(), y.new_empty(4, 4, 3))
            assert convolved.is_meta and convolved.shape == (4, 5)
            y = torch.nn.init.constant_(torch.empty_like(y, device=rig.DEVICE), 1.5)
            assert_close(y, torch.full((7, 4), 1.5))


@ranks(1, 2, "2x2")
def test_factories_make_each_piece_in_place(mesh):
    placements = [Shard(0), Shard(1)][: mesh.ndim]
    sizes = {0: uneven(7, mesh.size(0))}
    where = {"device_mesh": mesh, "placements": placements, "sizes": sizes}
    assert_close(shardtensor.zeros(7, 5, **where), torch.zeros(7, 5))
    assert_close(shardtensor.ones((7, 5), **where), torch.ones(7, 5))
    y = shardtensor.full((7, 5), 3, dtype=torch.int32, **where)
    assert_close(y, torch.full((7, 5), 3, dtype=torch.int32))
    assert y._spec.sizes()[0] == sizes[0]
    z = shardtensor.empty(torch.Size([7, 5]), requires_grad=True, **where)
    assert z.shape == (7, 5) and z.requires_grad and z.is_leaf
    assert_close(shardtensor.zeros((), device_mesh=mesh), torch.zeros(()))


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("name", ["rand", "randn"])
def test_random_factories_draw_what_one_device_draws(mesh, name):
    draw, expected = getattr(shardtensor, name), getattr(torch, name)
    for placements, sizes in sweep(mesh, (10, 6)):
        if any(isinstance(s, Repeated) for s in (sizes or {}).values()):
            continue
        where = {"device_mesh": mesh, "placements": placements, "sizes": sizes}
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            torch.manual_seed(3)
            x = draw(10, 6, dtype=dtype, **where), draw((10, 6), **where)
            like = torch.rand_like(x[1]), torch.rand(2)
            torch.manual_seed(3)
            assert_close(x[0], expected(10, 6, dtype=dtype))
            assert_close(x[1], expected(10, 6))
            assert_close(like[0], torch.rand(10, 6))
            assert_close(like[1], torch.rand(2))  # generators advance alike
    x = draw(4, device_mesh=mesh, requires_grad=True)
    assert x.is_leaf and x.requires_grad


@ranks("2x2")
def test_the_mesh_around_a_call_is_the_default(mesh):
    line, x = mesh["domain_w"], numbered(6, 4)
    with mesh:
        with line:
            for made in (
                distribute_tensor(x, placements=[Shard(0)]),
                ShardTensor.from_local(x[:3], placements=[Shard(0)]),
                shardtensor.zeros(6, 4, placements=[Shard(0)]),
            ):
                assert made.device_mesh == line and made.shape == (6, 4)
                assert made.redistribute(placements=[Replicate()]).device_mesh == line
        assert shardtensor.ones(4).placements == (Replicate(), Replicate())


@ranks(2)
def test_factories_refuse(mesh):
    with pytest.raises(ValueError, match="factories make Shard and Replicate"):
        shardtensor.zeros(4, device_mesh=mesh, placements=[Partial()])
    with pytest.raises(ValueError, match="each of the 1 mesh axes, got 0"):
        shardtensor.zeros(4, device_mesh=mesh, placements=[])
    with pytest.raises(TypeError, match="unexpected arguments: layout"):
        shardtensor.zeros(4, device_mesh=mesh, layout=torch.strided)
    with pytest.raises(ValueError, match="no default one"):
        shardtensor.zeros(4)
