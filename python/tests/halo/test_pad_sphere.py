"""Ghost cells and convolutions on a latitude-longitude grid."""

import pytest
import torch
from layouts import sweep
from ranks import assert_close, check_op, partitions, ranks, shard, sharded, uneven
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.nn.functional import pad_sphere


def extended(x, high, wide, sign=1.0, skipped=0):
    """Element by element: what stands at (i, j) of the sphere."""
    rows, columns = x.shape[-2:]
    out = x.new_zeros(*x.shape[:-2], rows + 2 * high, columns + 2 * wide)
    last = rows - 1
    for i in range(-high, rows + high):
        for j in range(-wide, columns + wide):
            row, column, factor = i, j, 1.0
            if i < 0:
                row, column, factor = -1 - i + skipped, j + columns // 2, sign
            if i > last:
                row = 2 * last + 1 - i - skipped
                column, factor = j + columns // 2, sign
            out[..., i + high, j + wide] = factor * x[..., row, column % columns]
    return out


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("pole_rows", [False, True])
def test_beyond_a_pole_lies_the_row_half_a_turn_away(vector, pole_rows):
    x = torch.arange(2.0 * 5 * 8).reshape(2, 5, 8)
    y = pad_sphere(x, (2, 3), vector=vector, pole_rows=pole_rows)
    assert torch.equal(y, extended(x, 2, 3, -1.0 if vector else 1.0, int(pole_rows)))


@ranks(1, 2, 3, "2x2")
def test_padding_is_that_of_one_device_in_every_layout(mesh):
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)

    def padded(x):
        return pad_sphere(x, (2, 1), vector=True).sin()

    for placements, sizes in sweep(mesh, x.shape):
        check_op(padded, sharded(x, placements, sizes), mesh=mesh, second_order=True)


@ranks(2, 3, "2x2")
def test_a_convolution_on_the_sphere_keeps_the_layout(mesh):
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True)
    conv = torch.nn.Conv2d(3, 3, 3, dtype=torch.float64)
    dims = [(2,), (3,)] if mesh.ndim == 1 else [(2, 3)]
    for cut in dims:
        sizes = {cut[0]: uneven(x.shape[cut[0]], mesh.size(0))}
        with shardtensor.fallback_mode("error"):
            part = sharded(x, [Shard(dim) for dim in cut], sizes)
            y = check_op(lambda x: conv(pad_sphere(x, 1)), part, mesh=mesh)
        assert y._spec.sizes()[cut[0]] == sizes[cut[0]]


@ranks(1, 2, 3, "2x2")
def test_ghost_cells_around_the_sphere(mesh):
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    whole = extended(x.detach(), 2, 1, -1.0)
    for dims in ((1,), (2,)) if mesh.ndim == 1 else ((1, 2), (2, 1)):
        sizes = {dims[0]: uneven(x.shape[dims[0]], mesh.size(0))}
        part = shard(x, mesh, [Shard(dim) for dim in dims], sizes)
        local = shardtensor.halo_exchange(
            part, {-2: 2, -1: 1}, boundary="sphere", vector=True
        )
        (top, bottom), (left, right) = part._spec.interval(1), part._spec.interval(2)
        if not part._spec.is_sharded(1):
            top, bottom = 0, 9
        if not part._spec.is_sharded(2):
            left, right = 0, 12
        assert torch.equal(local, whole[:, top : bottom + 4, left : right + 2])


@ranks(1, 2, 3, "2x2")
def test_what_is_left_without_ghost_cells_is_the_sphere(mesh):
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)

    def there_and_back(x):
        if not isinstance(x, shardtensor.ShardTensor):
            return x * 1
        local = shardtensor.halo_exchange(x, {-2: 2, -1: 1}, boundary="sphere")
        return shardtensor.halo_trim(local, x, {-2: 2, -1: 1}, boundary="sphere")

    for dims in ((1,), (2,)) if mesh.ndim == 1 else ((1, 2), (2, 1)):
        for rows in partitions(x.shape[dims[0]], mesh.size(0), repeated=False):
            cut = [Shard(dim) for dim in dims], {dims[0]: rows}
            y = check_op(there_and_back, sharded(x, *cut), mesh=mesh)
            assert y._spec == shard(x.detach(), mesh, *cut)._spec
    y = x.detach()
    repeated = shard(y, mesh, [Shard(1)] * mesh.ndim).flatten(0, 1)
    flat = y.flatten(0, 1)
    for boundary, widths in (("sphere", {-2: 2, -1: 1}), ("periodic", {0: 1})):
        local = shardtensor.halo_exchange(repeated, widths, boundary=boundary)
        back = shardtensor.halo_trim(local, repeated, widths, boundary=boundary)
        assert_close(back, flat)
    part = shard(x.detach(), mesh, [Shard(1)] * mesh.ndim)
    local = part.to_local()
    with pytest.raises(ValueError, match=r"expected \d+ rows with ghost cells along"):
        shardtensor.halo_trim(local, part, 2, boundary="sphere")
    with pytest.raises(ValueError, match="halo_trim: the sphere has two dims"):
        shardtensor.halo_trim(local, part, {1: 2}, boundary="sphere")


@ranks(2)
def test_what_the_sphere_has_not_is_an_error(mesh):
    x = shard(torch.randn(4, 7), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="half a turn of 7 columns"):
        pad_sphere(x, 1)
    with pytest.raises(ValueError, match="is more than the 4 x 7 rows"):
        pad_sphere(x, (5, 0))
    with pytest.raises(ValueError, match="the same on both sides"):
        shardtensor.halo_exchange(x, {0: (1, 2), 1: 1}, boundary="sphere")
