"""Uneven collectives under PhysicsNeMo's names, and its groups' regions."""

import pytest
import torch
import torch.distributed as dist
from ranks import assert_close, ranks

from shardtensor.distributed import (
    DistributedManager,
    all_gather_v,
    gather_v,
    indexed_all_to_all_v,
    scatter_v,
)
from shardtensor.distributed.mappings import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    reduce_from_parallel_region,
    scatter_to_parallel_region,
)
from shardtensor.distributed.utils import distributed_transpose

F64 = torch.float64
SIZES = {1: [4], 2: [3, 1], 3: [2, 0, 3], 4: [0, 1, 4, 2]}


def whole(rows, dim=0):
    x = torch.arange(rows * 3.0, dtype=F64).reshape(rows, 3) + 1
    return x if dim == 0 else x.t().contiguous()


def own(mesh, dim=0):
    """(everything, this rank's piece, the sizes)"""
    sizes = SIZES[mesh.size()]
    begin = sum(sizes[: mesh.get_local_rank()])
    x = whole(sum(sizes), dim)
    piece = x.narrow(dim, begin, sizes[mesh.get_local_rank()]).clone()
    return x, piece.requires_grad_(), sizes


# ---- the four collectives ---------------------------------------------------


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_v_joins_and_sums_the_gradients(mesh, dim):
    everything, piece, sizes = own(mesh, dim % 2)
    rank, size = mesh.get_local_rank(), mesh.size()
    y = all_gather_v(piece, [torch.tensor(n) for n in sizes], dim)
    assert torch.equal(y, everything)
    (gradient,) = torch.autograd.grad((y * y * (rank + 1)).sum(), piece)
    assert_close(gradient, 2 * piece * sum(range(1, size + 1)))


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_halves_are_summed_in_fp32(mesh, dtype, dim):
    """1, then 2^-12 from each other rank but the last, which takes the 1 back."""
    sizes = [2] * mesh.size()
    x = torch.ones(2, 2, dtype=dtype, requires_grad=True)
    y = all_gather_v(x, sizes, dim)
    term = {0: 1.0, mesh.size() - 1: -1.0}.get(dist.get_rank(), 2.0**-12)
    y.backward(torch.full_like(y, term))
    middle = (mesh.size() - 2) * 2.0**-12
    assert_close(x.grad, torch.full_like(x, middle))

    x = torch.ones(2, 2, dtype=dtype, requires_grad=True)
    table = [[2] * mesh.size() for _ in range(mesh.size())]
    to = [torch.tensor([0, 0])] * mesh.size()
    y = indexed_all_to_all_v(x, to, table, dim=dim)
    y.backward(torch.full_like(y, term))
    expected = torch.zeros_like(x)
    expected.select(dim, 0).fill_(2 * middle)
    assert_close(x.grad, expected)


@ranks(1, 2, 3, 4)
def test_gather_v_joins_on_one_rank(mesh):
    everything, piece, sizes = own(mesh)
    rank = mesh.get_local_rank()
    for dst in range(mesh.size()):
        y = gather_v(piece, sizes, dst=dst)
        assert torch.equal(y, everything if rank == dst else torch.zeros_like(y))
        factor = 2.0 if rank == dst else 100.0
        (gradient,) = torch.autograd.grad(y, piece, everything * factor)
        assert_close(gradient, 2 * piece)


@ranks(1, 2, 3, 4)
def test_scatter_v_cuts_one_ranks_tensor(mesh):
    everything, piece, sizes = own(mesh)
    rank = mesh.get_local_rank()
    for src in range(mesh.size()):
        x = everything.clone() if rank == src else torch.ones(1, 3, dtype=F64)
        x = x.requires_grad_()
        y = scatter_v(x, sizes, src=src)
        assert torch.equal(y, piece)
        (gradient,) = torch.autograd.grad((y * y).sum(), x)
        assert_close(gradient, 2 * x if rank == src else torch.zeros_like(x))


@ranks(1, 2, 3)
def test_indexed_all_to_all_v_sends_rows_several_ways(mesh):
    """Rank i sends its rows 0, ..., j to rank j, the first row last."""
    rank, size = mesh.get_local_rank(), mesh.size()
    x = (whole(4) + 100 * rank).requires_grad_()
    indices = [torch.arange(j, -1, -1) for j in range(size)]
    table = [[j + 1 for j in range(size)] for _ in range(size)]
    y = indexed_all_to_all_v(x, indices, table)
    mine = torch.arange(rank, -1, -1)
    assert torch.equal(y, torch.cat([whole(4)[mine] + 100 * i for i in range(size)]))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    times = torch.tensor([float(sum(k <= j for j in range(size))) for k in range(4)])
    assert_close(gradient, times.to(F64)[:, None].expand(4, 3))


@ranks(2, 3)
def test_a_second_derivative_passes_through(mesh):
    _, piece, sizes = own(mesh)
    for fn in (
        lambda x: all_gather_v(x, sizes),
        lambda x: gather_v(x, sizes, dst=1),
    ):
        y = fn(piece)
        (first,) = torch.autograd.grad((y**3).sum(), piece, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), piece)
        times = (first / (3 * piece**2)).detach().round()
        assert_close(second, (6 * piece * times).detach())


@ranks(2)
def test_what_does_not_fit_is_a_value_error(mesh):
    x = torch.ones(2, 3)
    table, index = [[1, 1], [1, 1]], torch.tensor([0])
    for call, message in (
        (lambda: all_gather_v(x, [2]), r"sizes is \[2\], expected 2 numbers"),
        (lambda: all_gather_v(x, [2, 2], dim=2), "range of .-2, 1., but got 2"),
        (lambda: all_gather_v(x, [1, 1]), "expected 1 in dim 0"),
        (lambda: gather_v(x, [1, 1]), "expected 1 in dim 0"),
        (lambda: gather_v(x, [2, 2], dst=2), "dst is 2, expected one of the 2"),
        (lambda: scatter_v(x, [1, 1], src=-1), "src is -1, expected one of the 2"),
        (lambda: scatter_v(x, [1, 1], dim=-3), "range of .-2, 1., but got -3"),
        (
            lambda: indexed_all_to_all_v(x, [], table),
            r"extents of indices is \[\], expected 2 numbers",
        ),
        (
            lambda: indexed_all_to_all_v(x, [index, index], [[1, 1]]),
            r"out_splits is \[1\], expected 2 numbers",
        ),
    ):
        with pytest.raises((ValueError, IndexError), match=message):
            call()


@ranks(1)
def test_one_rank_gets_its_tensor_itself(mesh):
    x = torch.ones(2, 3)
    assert all_gather_v(x, [2]) is x
    assert gather_v(x, [2]) is x and scatter_v(x, [2]) is x


# ---- regions ----------------------------------------------------------------


def manager(mesh):
    DistributedManager.initialize()
    DistributedManager().initialize_mesh(tuple(mesh.shape), mesh.mesh_dim_names)


@ranks(1, 2, 3, "2x2")
def test_regions_hand_values_on_and_gradients_back(mesh):
    manager(mesh)
    group = mesh.mesh_dim_names[0]
    rank, size = mesh.get_local_rank(0), mesh.size(0)
    weight = 1.0 + rank
    total = sum(range(1, size + 1))
    x = whole(5).requires_grad_()

    y = copy_to_parallel_region(x, group)
    assert torch.equal(y, x)
    (gradient,) = torch.autograd.grad(y.sum() * weight, x)
    assert_close(gradient, torch.full_like(x, total))

    before = x.detach().clone()
    y = reduce_from_parallel_region(x * weight, group)
    assert_close(y, x * total)
    assert torch.equal(x.detach(), before)
    (gradient,) = torch.autograd.grad((y * weight).sum(), x)
    assert_close(gradient, torch.full_like(x, weight * weight))

    shapes = {1: [5], 2: [3, 2], 3: [2, 2, 1]}[size]
    begin = sum(shapes[:rank])
    y = scatter_to_parallel_region(x, 0, group)
    assert torch.equal(y, x[begin : begin + shapes[rank]])
    (gradient,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    assert_close(gradient, 2 * x)

    piece = x.detach()[begin : begin + shapes[rank]].clone().requires_grad_()
    y = gather_from_parallel_region(piece, -2, shapes, group)
    assert torch.equal(y, x)
    (gradient,) = torch.autograd.grad((y * y).sum() * weight, piece)
    assert_close(gradient, 2 * piece * weight)


@ranks(2)
def test_regions_of_all_ranks_and_uneven_pieces(mesh):
    manager(mesh)
    rank = mesh.get_local_rank()
    piece = torch.full((1 + 3 * rank, 2), float(rank), requires_grad=True)
    y = gather_from_parallel_region(piece, 0, [1, 4], None)
    assert y.tolist() == [[0.0, 0.0]] + [[1.0, 1.0]] * 4
    y.sum().backward()
    assert_close(piece.grad, torch.ones_like(piece))
    with pytest.raises(IndexError, match="dim 3 of 2 dims"):
        scatter_to_parallel_region(piece, 3, None)
    with pytest.raises(ValueError, match="1 rows of dim 0 for 2 ranks"):
        scatter_to_parallel_region(torch.ones(1, 2), 0, None)
    with pytest.raises(IndexError, match=r"distributed_transpose: dims 2 and 0 of 2"):
        distributed_transpose(piece, 2, 0)


@ranks(1, 2, 3)
def test_regions_have_second_derivatives(mesh):
    """Of losses that are the same on all ranks: x**3 and then g**2, 36 x**3 in all;
    what enters a sum has a gradient on each rank, all of which the penalty counts."""
    manager(mesh)
    rank, size = mesh.get_local_rank(), mesh.size()
    x = whole(5) / 8
    sizes = {1: [5], 2: [0, 5], 3: [2, 0, 3]}[size]
    begin = sum(sizes[:rank])
    piece = x[begin : begin + sizes[rank]]
    third = torch.full((), 1 / size, dtype=F64)
    for region, given, expected in (
        (lambda t: copy_to_parallel_region(t, None) * third ** (1 / 3), x, 36 * x**3),
        (lambda t: reduce_from_parallel_region(t / size, None), x, 36 * x**3 / size**2),
        (lambda t: scatter_to_parallel_region(t, 0, None), x, 36 * x**3),
        (
            lambda t: gather_from_parallel_region(t, 0, sizes, None),
            piece,
            36 * piece**3,
        ),
    ):
        given = given.clone().requires_grad_()
        loss = (region(given) ** 3).sum()
        (first,) = torch.autograd.grad(loss, given, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), given)
        assert_close(second, expected)


@ranks(2)
def test_regions_compile_and_have_tangents(mesh):
    """As sums of a perceptron whose hidden rows are cut along both of its dims."""
    manager(mesh)
    rank = mesh.get_local_rank()

    def model(x, rows):
        rows = scatter_to_parallel_region(rows, 1, None)
        hidden = copy_to_parallel_region(x, None) @ rows
        joined = gather_from_parallel_region(hidden, -1, [2, 1], None)
        return reduce_from_parallel_region(joined.sin(), None)

    def results(model):
        x, rows = (whole(3).requires_grad_() for _ in range(2))
        y = model(x[:, :3], rows[:3, :3])
        return y, *torch.autograd.grad((y**2).sum() * (1 + rank), (x, rows))

    expected = results(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for mine, eager in zip(results(compiled), expected, strict=True):
        assert_close(mine, eager)

    x, rows = whole(3)[:, :3], whole(3)[:3, :3]
    value, tangent = torch.func.jvp(lambda t: model(t, rows), (x,), (x,))
    assert_close(value, 2 * (x @ rows).sin())
    assert_close(tangent, 2 * (x @ rows).cos() * (x @ rows))


@ranks(2)
def test_regions_share_no_memory_but_for_a_view(mesh):
    manager(mesh)
    x = whole(2).requires_grad_()
    for region in (
        lambda t: reduce_from_parallel_region(t, None),
        lambda t: scatter_to_parallel_region(t, 0, None),
        lambda t: gather_from_parallel_region(t, 0, [2, 2], None),
    ):
        before = x.detach().clone()
        region(x).add_(1)
        assert torch.equal(x.detach(), before)
    view = copy_to_parallel_region(x, None)
    assert view.data_ptr() == x.data_ptr()
    with pytest.raises(RuntimeError, match=r"_region\w* is a view and is"):
        view.add_(1)


@ranks(3, 4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_regions_sum_sixteen_bits_in_fp32(mesh, dtype):
    """1, small terms that a 16-bit sum loses each, and -1: what is left is them."""
    manager(mesh)
    rank, size = mesh.get_local_rank(), mesh.size()
    small = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12
    term = {0: 1.0, size - 1: -1.0}.get(rank, small)
    x = torch.full((2, 3), term, dtype=dtype, requires_grad=True)
    left = torch.full_like(x, (size - 2) * small)
    assert torch.equal(reduce_from_parallel_region(x, None), left)
    y = copy_to_parallel_region(x, None)
    (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, term))
    assert gradient.dtype == dtype and torch.equal(gradient, left)
