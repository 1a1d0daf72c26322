"""PhysicsNeMo's distributed FFT of strips: the whole transform's pieces."""

import re

import pytest
import torch
from ranks import assert_close, ranks, uneven

from shardtensor.distributed import DistributedManager
from shardtensor.distributed.fft import DistributedIRFFT2, DistributedRFFT2
from shardtensor.distributed.utils import compute_split_shapes


def strip(x, dim, sizes, rank):
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


@ranks(1, 2, 3)
@pytest.mark.parametrize("norm", ["ortho", "backward", "forward"])
@pytest.mark.parametrize("s", [(None, None), (7, 10), (6, 9)])
def test_strips_of_the_transform_and_its_inverse(mesh, norm, s):
    DistributedManager.initialize()
    DistributedManager.create_process_subgroup("spatial_parallel", mesh.size())
    rank, size = mesh.get_local_rank(), mesh.size()
    x = torch.randn(2, 6, 3, 10, dtype=torch.float64, requires_grad=True)
    dim = (1, -1)
    shape = None if s == (None, None) else s
    expected = torch.fft.rfft2(x, shape, dim, norm)
    sizes = uneven(10, size)
    mine = strip(x.detach(), 3, sizes, rank).clone().requires_grad_()
    y = DistributedRFFT2.apply(mine, s, dim, norm)
    rows = compute_split_shapes(expected.shape[1], size)
    assert_close(y, strip(expected, 1, rows, rank))

    given = expected.detach().requires_grad_()
    back = torch.fft.irfft2(given, shape, dim, norm)
    part = strip(given.detach(), 1, rows, rank).clone().requires_grad_()
    z = DistributedIRFFT2.apply(part, s, dim, norm)
    columns = compute_split_shapes(back.shape[3], size)
    assert_close(z, strip(back, 3, columns, rank))

    # Gradients of both, and of these: each rank's part of one device's.
    weight = torch.randn_like(expected)
    own_weight = strip(weight, 1, rows, rank)
    (grad,) = torch.autograd.grad((expected * weight).abs().sum(), x, create_graph=True)
    (own,) = torch.autograd.grad((y * own_weight).abs().sum(), mine, create_graph=True)
    assert_close(own, strip(grad, 3, sizes, rank))
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    (own_second,) = torch.autograd.grad(own.square().sum(), mine)
    assert_close(own_second, strip(second, 3, sizes, rank))
    (grad,) = torch.autograd.grad(back.square().sum(), given)
    (own,) = torch.autograd.grad(z.square().sum(), part)
    assert_close(own, strip(grad, 1, rows, rank))


@ranks(2)
def test_what_is_no_plane_of_real_numbers_is_an_error(mesh):
    DistributedManager.initialize()
    DistributedManager.create_process_subgroup("spatial_parallel", mesh.size())
    x = torch.randn(4, 4)
    with pytest.raises(IndexError, match="dim 2 of 2 dims"):
        DistributedRFFT2.apply(x, (None, None), (0, 2))
    with pytest.raises(TypeError, match="expected real numbers, got torch.complex64"):
        DistributedRFFT2.apply(x.to(torch.complex64))
    with pytest.raises(ValueError, match="two dims, got"):
        DistributedIRFFT2.apply(x, (None, None), (1, -1))


@ranks(2)
def test_strips_of_another_shape_are_an_error(mesh):
    DistributedManager.initialize()
    DistributedManager.create_process_subgroup("spatial_parallel", mesh.size())
    x = torch.randn((2, 3, 4, 4) if mesh.get_local_rank() else (3, 2, 4, 4))
    for transform, sizes in (
        (DistributedRFFT2, "2, 3, 4, *"),
        (DistributedIRFFT2, "2, 3, *, 4"),
    ):
        with pytest.raises(ValueError, match=r"rank 1: .* \[" + re.escape(sizes)):
            transform.apply(x)
