"""Collectives on local tensors: values, derivatives, 16 bits, errors."""

import pytest
import rig
import torch
import torch.distributed as dist
from collective_checks import check_collectives
from ranks import ranks

from shardtensor import _ops
from shardtensor import distributed as st


@ranks(1, 2, 3, 4)
def test_values_and_derivatives_are_those_of_one_process(mesh):
    check_collectives()


@ranks(3, 4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_summed_in_fp32(mesh, dtype):
    """1, small terms that a 16-bit sum loses each, and -1: what is left is them."""
    rank, size = dist.get_rank(), mesh.size()
    small = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12
    term = {0: 1.0, size - 1: -1.0}.get(rank, small)
    left = (size - 2) * small
    sizes = [2, 0, 1, 1][:size]

    def summed(y, x):
        (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, term))
        assert gradient.dtype == dtype
        return gradient

    x = torch.full((sum(sizes), 2), term, dtype=dtype, requires_grad=True)
    for dim in (0, 1):
        whole = x if dim == 0 else x.t()
        got = st.reduce_scatter_v(whole, sizes, dim)
        assert torch.equal(got, torch.full_like(got, left))
    for total in (st.all_reduce(x), summed(st.all_reduce(x), x)):
        assert torch.equal(total, torch.full_like(x, left))
    got = summed(st.broadcast(x, 1), x)
    assert torch.equal(got, torch.full_like(x, left if rank == 1 else 0))
    piece = torch.ones(sizes[rank], 2, dtype=dtype, requires_grad=True)
    got = summed(st.all_gather_v(piece, sizes), piece)
    assert torch.equal(got, torch.full_like(piece, left))


@ranks(2)
def test_operators_pass_opcheck(mesh):
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    sizes, index = [2, 1], [torch.tensor([1]), torch.tensor([1, 0])]
    x = torch.arange(6.0).reshape(3, 2).requires_grad_()
    own = x[: sizes[rank]].detach().requires_grad_()
    for op, arguments in (
        (_ops.all_gather_v, (own, 0, sizes)),
        (_ops.gather_v, (own, 0, sizes, 1)),
        (_ops.scatter_v, (x, 0, sizes, 1)),
        (_ops.reduce_scatter_v, (x, 0, sizes)),
        (_ops.all_to_all_v, (x, 0, sizes, ([2, 2], [1, 1])[rank])),
        (_ops.indexed_all_to_all_v, (x, 0, index, ([1, 1], [2, 2])[rank])),
        (_ops.broadcast, (x, 1)),
        (_ops.copy_to_parallel_region, (x,)),
        (_ops.reduce_from_parallel_region, (x,)),
        (_ops.scatter_to_parallel_region, (x, 0, sizes)),
        (_ops.gather_from_parallel_region, (own, 0, sizes)),
        (_ops.fused_all_reduce, ([x, x[0]], "avg")),
        (_ops.reduce_loss, (x.sum(), 1, True)),
    ):
        given = (*arguments, name)
        torch.library.opcheck(op.default, given, test_utils=rig.OPCHECKS)


@ranks(2)
def test_what_does_not_fit_is_a_value_error(mesh):
    x = torch.ones(3, 2)
    index = torch.tensor([0])
    for call, message in (
        (lambda: st.reduce_scatter_v(x, [1, 1]), "expected 2 in dim 0"),
        (
            lambda: st.all_to_all_v(x, [3], [1, 1]),
            r"in_splits is \[3\], expected 2 numbers",
        ),
        (lambda: st.all_to_all_v(x, [1, 1], [1, 1]), "expected 2 in dim 0"),
        (lambda: st.broadcast(x, 2), "src is 2, expected one of the 2 ranks"),
        (
            lambda: st.indexed_all_to_all_v(x, [index, index], [[1, 2], [2, 1]]),
            "do not make the same call",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
