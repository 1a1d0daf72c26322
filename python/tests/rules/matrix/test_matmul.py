"""Products of matrices: any dim of either operand sharded."""

import itertools
import math
from functools import partial

import pytest
import rig
import torch
import torch.nn.functional as F
from oracle import WHOLE, every
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import shardtensor


def values(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def einsum(equation):
    return lambda a, b: torch.einsum(equation, a, b)


# name: (function, shapes of its operands)
NUMBER = torch.tensor(-8.0, dtype=torch.float64)
PRODUCTS = {
    "mm": (torch.mm, (5, 6), (6, 4)),
    "bmm": (torch.bmm, (3, 5, 6), (3, 6, 4)),
    "mv": (torch.mv, (5, 6), (6,)),
    "dot": (torch.dot, (6,), (6,)),
    "vdot": (torch.vdot, (6,), (6,)),
    "outer": (torch.outer, (5,), (6,)),
    "matmul_vector": (torch.matmul, (3, 5, 6), (6,)),
    "matmul_of_vector": (torch.matmul, (6,), (3, 6, 4)),
    "matmul_batch": (torch.matmul, (2, 3, 5, 6), (6, 4)),
    "matmul_broadcast": (torch.matmul, (2, 1, 5, 6), (3, 6, 4)),
    "linear": (F.linear, (3, 5, 6), (4, 6)),
    "linear_bias": (F.linear, (3, 5, 6), (4, 6), (4,)),
    "bilinear": (F.bilinear, (5, 3), (5, 4), (2, 3, 4), (2,)),
    "trilinear": (
        lambda a, b, c: torch._trilinear(a, b, c, [1, 3], [0], [1, 2], [2, 3]),
        (5, 3),
        (2, 3, 4),
        (5, 4),
    ),
    "addmm": (torch.addmm, (5, 4), (5, 6), (6, 4)),
    "addmm_row": (torch.addmm, (4,), (5, 6), (6, 4)),
    "addmm_scaled": (
        lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=-2),
        (5, 4),
        (5, 6),
        (6, 4),
    ),
    "addmm_number": (lambda a, b: torch.addmm(NUMBER, a, b, beta=2), (5, 6), (6, 4)),
    "baddbmm": (torch.baddbmm, (3, 1, 4), (3, 5, 6), (3, 6, 4)),
    "baddbmm_number": (
        lambda a, b: torch.baddbmm(NUMBER, a, b),
        (3, 5, 6),
        (3, 6, 4),
    ),
    "addbmm": (torch.addbmm, (5, 4), (3, 5, 6), (3, 6, 4)),
    "addmv": (torch.addmv, (5,), (5, 6), (6,)),
    "addr": (torch.addr, (5, 6), (5,), (6,)),
    "einsum_product": (einsum("bij,bjk->bik"), (3, 5, 6), (3, 6, 4)),
    "einsum_trace": (einsum("ij,ji->"), (5, 6), (6, 5)),
    "einsum_mixed": (einsum("bhqd,bkhd->bhqk"), (2, 3, 4, 5), (2, 6, 3, 5)),
    "tensordot": (
        lambda a, b: torch.tensordot(a, b, ([1, 2], [0, 1])),
        (3, 5, 6),
        (5, 6, 4),
    ),
    "multi_dot": (
        lambda a, b, c: torch.linalg.multi_dot([a, b, c]),
        (5, 6),
        (6, 4),
        (4, 3),
    ),
    "inner": (torch.inner, (5, 6), (4, 6)),
    "kron": (torch.kron, (2, 3), (3, 2)),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, 3), (4, 4)),
}


ON_A_GRID = ("mm", "bmm", "matmul_broadcast", "addmm_row", "mv", "trilinear")


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", PRODUCTS)
def test_any_operand_cut_along_any_dim(mesh, name):
    function, *shapes = PRODUCTS[name]
    operands = [values(*shape) for shape in shapes]
    for i, operand in enumerate(operands):
        for dim in range(operand.dim()):
            for sizes in partitions(operand.shape[dim], mesh.size()):
                parts = list(operands)
                parts[i] = sharded(operand, [Shard(dim)], {dim: sizes})
                check_op(function, *parts, mesh=mesh, second_order=True)


@ranks(2)
def test_of_integers_factors_lose_their_fractions(mesh):
    if mesh.device_type == "cuda":
        pytest.skip("CUDA multiplies no matrices of integers")
    for name in ("addmm", "baddbmm", "addbmm"):
        function, *shapes = PRODUCTS[name]
        operands = [torch.arange(math.prod(s)).reshape(s) for s in shapes]
        for i, dim in ((0, 0), (1, 0), (1, -1), (2, 1)):
            parts, dim = list(operands), dim % operands[i].dim()
            pieces = [0, operands[i].shape[dim]]
            parts[i] = sharded(operands[i], [Shard(dim)], {dim: pieces})
            for factors in ({"beta": 0.2}, {"beta": 1.6, "alpha": 2.7}):
                check_op(partial(function, **factors), *parts, mesh=mesh)


@ranks(2, 3)
@pytest.mark.parametrize("name", ["bilinear", "trilinear"])
def test_products_of_three_gather_nothing(mesh, name):
    function, *shapes = PRODUCTS[name]
    operands = [values(*shape) for shape in shapes]
    with shardtensor.fallback_mode("error"):
        for i, operand in enumerate(operands):
            for dim in range(operand.dim()):
                parts = list(operands)
                parts[i] = sharded(operand, [Shard(dim)])
                check_op(function, *parts, mesh=mesh)


@ranks(2, 3)
@pytest.mark.parametrize("name", ["mm", "bmm", "mv", "dot", "addmm", "linear_bias"])
def test_every_pair_of_layouts(mesh, name):
    function, *shapes = PRODUCTS[name]
    operands = [values(*shape) for shape in shapes]
    layouts = [
        [*(Shard(d) for d in range(x.dim())), Replicate(), Partial()] for x in operands
    ]
    for placements in every(2, itertools.product(*layouts)):
        parts = [sharded(x, [p]) for x, p in zip(operands, placements, strict=True)]
        check_op(function, *parts, mesh=mesh, second_order=True)


@ranks("2x2")
@pytest.mark.parametrize("name", ON_A_GRID)
def test_every_pair_of_layouts_on_a_grid(mesh, name):
    function, *shapes = PRODUCTS[name]
    operands = [values(*shape) for shape in shapes]

    def layouts(x):
        options = [Replicate(), *(Shard(d) for d in range(x.dim()))]
        return list(itertools.product(options, repeat=2))

    pairs = itertools.product(*(enumerate(layouts(x)) for x in operands[-2:]))
    for (i, first), (j, second) in pairs:
        if WHOLE or (i + j) % 3 == 0:
            parts = list(operands)
            parts[-2] = sharded(operands[-2], first)
            parts[-1] = sharded(operands[-1], second)
            check_op(function, *parts, mesh=mesh)


EINSUMS = {
    "bgcxy,gock->bgokxy": ((2, 1, 3, 5, 4), (1, 2, 3, 2)),
    "bixy,ioxy->boxy": ((2, 3, 5, 4), (3, 2, 5, 4)),
    "...xy,...y->...x": ((2, 3, 5, 4), (3, 1)),
    "bixy , x": ((2, 3, 5, 4), (5,)),
    "bxy,xz,yz->zb": ((2, 5, 4), (5, 3), (4, 1)),
    "bxy->yb": ((2, 5, 4),),
    "xx,xy->xy": ((4, 4), (4, 5)),
}


@ranks("2x2", "2x1x2")
@pytest.mark.parametrize("equation", EINSUMS)
def test_einsums_of_what_is_cut_in_several_dims(mesh, equation):
    operands = [values(*shape) for shape in EINSUMS[equation]]
    mode = "silent" if "xx" in equation else "error"

    def einsum(*operands):
        return torch.einsum(equation, *operands)

    between = [Replicate()] * (mesh.ndim - 2)
    for i, operand in enumerate(operands):
        for first, last in itertools.permutations(range(operand.dim()), 2):
            rows, columns = operand.shape[first], operand.shape[last]
            cut = {first: [rows - 1, 1], last: [0, columns]}
            for sizes in (cut, None):
                parts = list(operands)
                parts[i] = sharded(
                    operand, [Shard(first), *between, Shard(last)], sizes
                )
                with shardtensor.fallback_mode(mode):
                    found = check_op(einsum, *parts, mesh=mesh, second_order=True)
                assert found.stride() == einsum(*operands).stride()


@ranks("2x2")
def test_einsums_of_several_dims_move_nothing(mesh):
    x = shard(values(2, 3, 5, 4), mesh, [Shard(2), Shard(3)])
    spectrum = shard(values(3, 2, 5, 4), mesh, [Shard(3), Shard(0)])
    shardtensor.reset_comm_stats()
    y = torch.einsum("bixy,io->boxy", x, values(3, 2))
    assert y._spec == shard(values(2, 2, 5, 4), mesh, [Shard(2), Shard(3)])._spec
    terms = torch.einsum("bixy,io->ob", x, values(3, 2))
    assert terms.placements == (Partial(), Partial())
    stats = shardtensor.comm_stats()
    assert (stats.exchanges, stats.all_reduces) == (0, 0)
    product = torch.einsum("bixy,ioxy->boxy", x, spectrum)  # lies as the larger
    assert product.placements == x.placements
    weight = distribute_tensor(torch.ones(3, 2).double(), mesh, [Shard(0), Shard(1)])
    assert_close(
        torch.einsum("bixy,io->boxy", x, weight),
        x.full_tensor().sum(1, keepdim=True).expand(2, 2, 5, 4),
    )
    with rig.autocast(torch.bfloat16):
        narrow = torch.einsum("bixy,io->boxy", x.float(), torch.ones(3, 2))
    assert narrow.dtype == torch.bfloat16
    for equation in ("bixy,io->boz", "bixy,i->b", "bixy,io->boo", "bix,io->bo"):
        with pytest.raises(RuntimeError, match="einsum"):
            torch.einsum(equation, x, values(4, 2))


class Network(nn.Module):
    """A plain multilayer perceptron."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x):
        return self.layers(x)


@ranks(1, 2, 3, "2x2")
def test_a_network_with_plain_parameters(mesh):
    network = Network().double()
    for dims in [(0, 1), (1, 0), (2, 1), (1, 1)]:
        placements = [Shard(d) for d in dims][: mesh.ndim]
        part = sharded(values(3, 5, 6), placements)
        check_op(network, part, mesh=mesh, second_order=True)


@ranks(2, 3)
def test_a_contracted_dim_leaves_a_sum_to_be_done(mesh):
    import shardtensor

    a, b = torch.randn(5, 6), torch.randn(6, 4)
    left = shard(a, mesh, [Shard(1)])
    right = shard(b, mesh, [Shard(0)])
    shardtensor.reset_comm_stats()
    product = left @ right
    assert product.placements == (Partial(),)
    stats = shardtensor.comm_stats()
    assert (stats.exchanges, stats.all_reduces) == (0, 0)
    assert_close(product, a @ b)


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(mesh, dtype):
    x = torch.randn(5, 8).to(dtype).requires_grad_()
    w = torch.randn(4, 8).to(dtype).requires_grad_()
    for dim in range(2):
        check_op(F.linear, sharded(x, [Shard(dim)]), w, mesh=mesh, rtol=0.02, atol=0.1)


@ranks(2, 3)
def test_in_place_and_out(mesh):
    a, b, c = torch.randn(5, 4), torch.randn(5, 6), torch.randn(6, 4)
    for dim in range(2):
        target = shard(a, mesh, [Shard(dim)])
        result = target.addmm_(shard(b, mesh, [Shard(0)]), c)
        assert result is target
        assert_close(target, a.addmm(b, c))
        out = shard(torch.zeros(5, 4), mesh, [Shard(dim)])
        assert torch.mm(shard(b, mesh, [Shard(1)]), c, out=out) is out
        assert_close(out, b @ c)
        folded = shard(torch.ones(3, 5, 4), mesh, [Shard(dim)])
        stacked = shard(torch.zeros(3, 5, 0), mesh, [Shard(1)])
        assert torch.matmul(stacked, torch.zeros(0, 4), out=folded) is folded
        assert_close(folded, torch.zeros(3, 5, 4))


@ranks(2, 3)
def test_one_number_is_added_to_every_row(mesh):
    a, b, addend = torch.randn(5, 6), torch.randn(6), torch.randn(1)
    for cut in range(2):
        for sizes in partitions(a.size(cut), mesh.size()):
            s = sharded(a.requires_grad_(), [Shard(cut)], {cut: sizes})
            check_op(lambda s: torch.addmv(addend, s, b), s, mesh=mesh)


@ranks(2)
def test_shapes_that_do_not_fit_are_pytorchs_errors(mesh):
    a = shard(torch.ones(5, 6), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"5x6 and 5x6|5 x 6|same reduction dim"):
        a @ torch.ones(5, 6)
    with pytest.raises(RuntimeError, match="size|shape|expand"):
        torch.addmm(torch.ones(3), a, torch.ones(6, 4))
    batches = shard(torch.ones(4, 5, 6, dtype=torch.cfloat), mesh, [Shard(1)])
    with pytest.raises(RuntimeError, match=r"\[4, 6\] but got: \[4, 5\]"):
        batches @ batches.real
