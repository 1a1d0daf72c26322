"""DTensors on another mesh than the ShardTensors they meet."""

import math

import pytest
import rig
import torch
import torch.nn.functional as F
from dtensor_checks import (
    REPLICATE,
    ROWS,
    assert_gradient,
    check_dtensors,
    cut,
    distributed,
)
from ranks import assert_close, ranks, shard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor


def randn(*sizes):
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


def block(x, first, second, bias):
    hidden = F.gelu(F.linear(x, first, bias))
    return F.linear(hidden, second) + x  # of the larger mesh, and of x's


@pytest.mark.parametrize("axes", [("domain_h", "domain_w"), ("domain_w", "domain_h")])
@pytest.mark.parametrize("placements", [REPLICATE, ROWS, [Shard(1)]])
@ranks("2x2")
def test_another_axis_of_the_device_mesh(mesh, axes, placements):
    """What tensor parallelism does: rows of the first weight, columns of the
    second, beside the cut domain."""
    domain, other = mesh[axes[0]], mesh[axes[1]]
    x = cut(randn(3, 7, 4), [Shard(1)], domain)
    check_dtensors(
        block,
        x,
        *(randn(6, 4), randn(4, 6), randn(6)),
        mesh=domain,
        dtensor_mesh=other,
        placements=placements,
    )


@pytest.mark.parametrize("placements", [REPLICATE, ROWS])
@pytest.mark.parametrize("axis", ["domain_h", "domain_w"])
@ranks("2x2")
def test_a_sub_mesh(mesh, axis, placements):
    """Samples cut along one axis, the domain along the other, parameters along
    one of them."""
    both = [Shard(0), Shard(2)]
    arguments = {"mesh": mesh, "dtensor_mesh": mesh[axis], "placements": placements}
    x = cut(randn(3, 4, 9, 5), both, mesh)
    check_dtensors(F.conv2d, x, randn(6, 4, 3, 3), randn(6), **arguments)
    check_dtensors(
        lambda x, *affine: F.group_norm(x, 2, *affine),
        x,
        randn(4),
        randn(4),
        **arguments,
    )
    check_dtensors(lambda x, w: w + x * w, x, randn(9, 1), **arguments)


@pytest.mark.parametrize(
    "placements",
    [[Replicate(), Replicate()], [Shard(0), Replicate()], [Shard(0), Shard(0)]],
)
@ranks("2x2")
def test_a_larger_mesh(mesh, placements):
    for axis in ("domain_h", "domain_w"):
        arguments = {"mesh": mesh[axis], "dtensor_mesh": mesh, "placements": placements}
        x = cut(randn(3, 7, 4), [Shard(1)], mesh[axis])
        check_dtensors(F.linear, x, randn(5, 4), randn(5), **arguments)
        check_dtensors(torch.mul, x, randn(7, 4), **arguments)


@ranks("2x2")
def test_shard_tensors_of_two_axes_meet(mesh):
    x, y = randn(5, 4), randn(5, 4)
    rows = shard(x, mesh["domain_h"], [Shard(0)])
    columns = shard(y, mesh["domain_w"], [Shard(1)])
    for out in (rows * columns, torch.cat([columns, rows], 1)[:, :4] * rows):
        assert out.device_mesh == mesh
    (rows * columns).sin().sum().backward()
    (x * y).sin().sum().backward()
    assert_close(rows.grad, x.grad)
    assert_close(columns.grad, y.grad)


@ranks("2x2")
def test_writing_to_a_smaller_mesh(mesh):
    x, y = randn(5, 4).detach(), randn(5, 4).detach()
    rows = shard(x, mesh["domain_h"], [Shard(0)])
    returned = rows.mul_(shard(y, mesh, [Shard(1), Shard(0)]))
    assert returned is rows and rows.device_mesh == mesh["domain_h"]
    assert_close(rows, x * y)


@ranks("2x2")
def test_check_mode_compares_along_other_axes(mesh):
    data, domain = mesh["domain_h"], mesh["domain_w"]
    x = torch.ones(4, 4) + mesh.get_local_rank(0)  # another sample on each data rank
    part = shard(x, domain, [Shard(0)])
    given = distributed(torch.ones(4), data, [Replicate()])
    with (
        shardtensor.check_mode(),
        pytest.raises(ValueError, match="must be equal along all other axes"),
    ):
        part * given
    same = torch.tensor([math.nan, 1.0, 2.0, 3.0])
    with shardtensor.check_mode():
        shard(same, domain, [Shard(0)]) * given
    other = torch.tensor([0, 2**53 + mesh.get_local_rank(0)])
    with (
        shardtensor.check_mode(),
        pytest.raises(ValueError, match="must be equal along all other axes"),
    ):
        shard(other, domain, [Shard(0)]) * distributed(
            torch.ones(2), data, [Replicate()]
        )


@ranks(2, "2x2")
def test_equal_meshes_made_twice(mesh):
    names = mesh.mesh_dim_names
    again = init_device_mesh(rig.DEVICE, tuple(mesh.shape), mesh_dim_names=names)
    x, w = randn(6, 4), randn(4)
    given = distributed(w, again, [Replicate()] * mesh.ndim)
    (shard(x, mesh, [Shard(0)] * mesh.ndim) * given).square().sum().backward()
    (x * w).square().sum().backward()
    assert_gradient(given, w.grad)


@ranks("2x2", 3)
def test_unrelated_meshes_are_one_error(mesh):
    first = DeviceMesh(rig.DEVICE, [0, 1])  # not all ranks of `mesh` are in it
    part = shard(torch.ones(6, 4), mesh, [Shard(0)] * mesh.ndim)
    given = distributed(torch.ones(4), first, [Replicate()])
    message = r"aten::mul.Tensor: expected all tensors on one mesh or on axes of one"
    with pytest.raises(ValueError, match=message):
        part * given
    with pytest.raises(ValueError, match="aten::conv1d: expected all tensors on one"):
        F.conv1d(part, distributed(torch.ones(4, 6, 1), first, [Replicate()]))
    if mesh.ndim == 2:
        line = init_device_mesh(rig.DEVICE, (4,))
        given = distributed(torch.ones(4), line, [Replicate()])
        with pytest.raises(ValueError, match=message):
            given * part


@ranks("2x2")
def test_a_sum_on_a_sub_mesh(mesh):
    term, x = randn(5), randn(6, 5)
    from torch.distributed.tensor import DTensor

    weight = DTensor.from_local(term.detach(), mesh["domain_w"], [Partial()])
    assert_close(shard(x, mesh, [Shard(0), Shard(1)]) * weight, x * term * 2)
