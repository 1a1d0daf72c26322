"""torch-harmonics' convolutions and attention on the sphere, unmodified, and the
products with sparse matrices that convolutions are made of."""

import pytest
import torch
from fourier import OnMesh
from oracle import WHOLE
from ranks import (
    assert_close,
    check_op,
    partitions,
    ranks,
    shard,
    sharded,
    uneven,
)
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor

PRELOAD = ("torch_harmonics",)
FINE = {"rtol": 1e-10, "atol": 1e-12}


def sphere_cuts(mesh, nlat, nlon):
    """In latitude, with and without an empty piece, in longitude, in both."""
    if mesh.ndim == 2:
        return [
            ([Shard(2), Shard(3)], {2: uneven(nlat, 2)}),
            ([Shard(3), Shard(2)], {2: [0, nlat]}),
        ]
    rows, columns = uneven(nlat, mesh.size()), uneven(nlon, mesh.size())
    return [
        ([Shard(2)], {2: rows}),
        ([Shard(2)], {2: [0, *uneven(nlat, mesh.size() - 1)]}),
        ([Shard(3)], {3: columns[::-1]}),
    ]


# ---- products with sparse matrices ------------------------------------------


def matrix_of(rows, columns, entries=0.4, batch=()):
    dense = torch.randn(*batch, rows, columns, dtype=torch.float64)
    return dense * (torch.rand(dense.shape) < entries)


LAYOUTS = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
}


def times(matrix, product):
    """A function, for check_op copies what is not, and CSR cannot be copied."""
    return lambda x: product(matrix, x)


def operand(*sizes):
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


def operand_cuts(mesh, rows, columns):
    """Of the last two dims of a matrix, rows first."""
    if mesh.ndim == 2:
        both = [Shard(0), Shard(1)], {0: uneven(rows, 2), 1: [0, columns]}
        return [both, ([Shard(0), Shard(0)], {}), ([Partial(), Shard(0)], {})]
    pieces = [([Shard(0)], {0: p}) for p in partitions(rows, mesh.size())]
    pieces += [([Shard(1)], {1: p}) for p in partitions(columns, mesh.size())]
    return [*pieces, ([Replicate()], {}), ([Partial()], {}), ([Partial("max")], {})]


@ranks(1, 2, 3, 4, "2x2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_with_a_sparse_matrix(mesh, layout):
    for sizes, entries in (((5, 6), 0.4), ((3, 6), 0.1), ((40, 2), 0.4), ((5, 6), 0)):
        matrix = LAYOUTS[layout](matrix_of(*sizes, entries))
        for placements, cut in operand_cuts(mesh, sizes[1], 4):
            x = sharded(operand(sizes[1], 4), placements, cut)
            with shardtensor.fallback_mode("error"):
                for product in (torch.mm, torch.matmul, torch.sparse.mm):
                    of_x = times(matrix, product)
                    check_op(of_x, x, mesh=mesh, second_order=True, **FINE)


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_and_products_from_the_right(mesh, layout):
    matrix = LAYOUTS[layout](matrix_of(5, 6))
    whole_numbers = (matrix_of(5, 6).detach() * 9).long().to_sparse()
    vector, tall = operand(6), operand(6, 4)
    row_cuts = [c for c in operand_cuts(mesh, 6, 4) if c[0] != [Shard(1)]]
    for placements, cut in row_cuts:
        if Shard(1) not in placements:
            x = sharded(vector, placements, cut)
            check_op(lambda v: torch.mv(matrix, v), x, mesh=mesh, **FINE)
            check_op(lambda v: matrix @ v, x, mesh=mesh, **FINE)
    for placements, cut in operand_cuts(mesh, 6, 4):
        x = sharded(tall, placements, cut)
        for addend in (operand(5, 4), operand(4), operand(5, 1)):
            check_op(
                lambda a, x: torch.addmm(a, matrix, x, beta=0.5, alpha=2),
                addend,
                x,
                mesh=mesh,
                second_order=True,
                **FINE,
            )
        nothing = torch.full((4,), torch.nan, dtype=torch.float64)
        check_op(
            lambda x, nothing=nothing: torch.addmm(nothing, matrix, x, beta=0),
            x,
            mesh=mesh,
            **FINE,
        )
        check_op(lambda x: x.t() @ matrix.t(), x, mesh=mesh, second_order=True, **FINE)
        if layout == "coo":  # the others have no products of integers
            check_op(
                lambda x: torch.addmm(x[:1], whole_numbers, x, beta=0.5, alpha=1.5),
                sharded((tall * 9).long(), placements, cut),
                mesh=mesh,
            )


@ranks(1, 2, 3, 4, "2x2")
def test_batches_of_sparse_matrices(mesh):
    for entries in (0.4, 0.05, 0):
        matrices = matrix_of(5, 6, entries, batch=(3,)).to_sparse()
        cuts = [
            ([Shard(p.dim + 1) if p.is_shard() else p for p in placements],
             {dim + 1: pieces for dim, pieces in cut.items()})
            for placements, cut in operand_cuts(mesh, 6, 4)
        ]  # fmt: skip
        samples = [Shard(0)] * mesh.ndim
        cuts += [(samples, {0: p}) for p in partitions(3, mesh.size())]
        if mesh.ndim == 2:
            cuts += [([Shard(0), Shard(1)], {}), ([Shard(2), Shard(0)], {})]
        for placements, cut in cuts:
            with shardtensor.fallback_mode("error"):
                x = sharded(operand(3, 6, 4), placements, cut)
                product = times(matrices, torch.bmm)
                check_op(product, x, mesh=mesh, second_order=True, **FINE)


@ranks("2x1x2")
def test_terms_of_a_sum_cut_along_both_other_axes(mesh):
    matrix = matrix_of(60, 6).to_sparse()
    x = sharded(operand(6, 4), [Partial(), Shard(0), Shard(1)], {1: [3, 1]})
    check_op(times(matrix, torch.mm), x, mesh=mesh, second_order=True, **FINE)


@ranks(2, 3, "2x2")
def test_what_a_product_with_a_sparse_matrix_moves(mesh):
    rows, columns = [Shard(0)] * mesh.ndim, [Shard(1)] * mesh.ndim

    def product(matrix_rows, placements, sizes=None):
        x = shard(operand(60, 24), mesh, placements, sizes)
        shardtensor.reset_comm_stats()
        y = matrix_of(matrix_rows, 60).to_sparse() @ x
        return y, shardtensor.comm_stats().exchanges

    pieces = uneven(60, mesh.size())
    same, _ = product(60, rows, {0: pieces})
    assert same._spec == shard(operand(60, 24), mesh, rows, {0: pieces})._spec
    few, exchanges = product(6, rows)  # a sum
    assert few.placements == tuple(rows) and exchanges == 1
    many, exchanges = product(600, rows)  # by columns, and back
    assert many.placements == tuple(rows) and exchanges == 2
    y, exchanges = product(60, columns)
    assert y.placements == tuple(columns) and exchanges == 0
    one, exchanges = product(1, rows)
    assert one.placements == (Partial(),) * mesh.ndim and exchanges == 0
    coarse, _ = product(30, rows, {0: [2 * n for n in uneven(30, mesh.size())]})
    assert coarse._spec.partition(0).sizes == uneven(30, mesh.size())


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_the_gradient_of_a_sparse_matrix_is_that_of_its_entries(mesh, layout):
    dense = matrix_of(5, 6)
    for placements, cut in operand_cuts(mesh, 6, 4):
        x = sharded(operand(6, 4), placements, cut)
        matrix = LAYOUTS[layout](dense).requires_grad_()
        whole = LAYOUTS[layout](dense).requires_grad_()
        weight = torch.randn(5, 4, dtype=torch.float64)
        part = shard(x.tensor, mesh, placements, cut)
        (torch.sparse.mm(matrix, part) * weight).sum().backward()
        (torch.sparse.mm(whole, x.tensor) * weight).sum().backward()
        assert type(matrix.grad) is torch.Tensor
        assert_close(matrix.grad.to_dense(), whole.grad.to_dense(), **FINE)
        assert_close(part.grad, x.tensor.grad, **FINE)
        x.tensor.grad = None
    for product in (torch.mm, torch.matmul):
        with pytest.raises(NotImplementedError, match="torch.sparse.mm, whose"):
            product(matrix, part)


@ranks(1, 2, 3)
def test_values_of_a_sparse_matrix_are_learned(mesh):
    entries = matrix_of(5, 6).to_sparse()
    indices = entries.indices()
    for placements, cut in operand_cuts(mesh, 6, 4):
        check_op(
            lambda values, x: torch.sparse.mm(
                torch.sparse_coo_tensor(indices, values, (5, 6)), x
            ),
            entries.values().requires_grad_(),
            sharded(operand(6, 4), placements, cut),
            mesh=mesh,
            **FINE,
        )


@ranks(2, 3)
def test_products_with_a_sparse_matrix_refuse_what_one_device_does(mesh):
    matrix = matrix_of(5, 6).to_sparse()
    x = shard(torch.randn(6, 4), mesh, [Shard(0)], {0: [6] + [0] * (mesh.size() - 1)})
    with pytest.raises(RuntimeError, match="expected scalar type Double"):
        matrix @ x
    with pytest.raises(RuntimeError, match="sizes .5, 6. cannot be multiplied"):
        matrix @ x.double()[:5]
    with pytest.raises(NotImplementedError, match=r"layout Sparse.*to_dense\(\)"):
        matrix * x.double()[:1]
    matrices, samples = matrix.unsqueeze(0), x.double()[:5].t().unsqueeze(0)
    with pytest.raises(RuntimeError, match="must be dense"):
        torch.bmm(torch.ones(1, 4, 5).double(), matrices)
    with pytest.raises(NotImplementedError, match=r"layout Sparse.*to_dense\(\)"):
        torch.bmm(samples, matrices)
    with (
        shardtensor.ShardTensor.promotion_mode("disabled"),
        pytest.raises(ValueError, match="aten::mm: got a plain tensor"),
    ):
        matrix @ x.double()


# ---- convolutions -----------------------------------------------------------

SIZES = {
    "same": ((6, 12), (6, 12)),
    "coarser": ((7, 12), (4, 6)),
    "few rows": ((3, 4), (3, 4)),
}


def convolution(size, kind="DiscreteContinuousConvS2", **options):
    import torch_harmonics as th

    sizes = SIZES[size]
    if "Transpose" in kind:
        sizes = sizes[::-1]
    return getattr(th, kind)(4, 6, *sizes, (2, 2), **options)


def exact(conv):
    """In double precision: the filter is no buffer, which double() would find."""
    for name in ("psi", "psi_st"):
        if hasattr(conv, name):
            setattr(conv, name, getattr(conv, name).double())
    return conv.double()


@ranks(2, 3, 4, "2x2")
@pytest.mark.parametrize("size", SIZES)
def test_convolutions(mesh, size):
    grid = SIZES[size][0]
    conv = OnMesh(exact(convolution(size)), mesh)
    x = torch.randn(2, 4, *grid, dtype=torch.float64, requires_grad=True)
    for placements, cut in sphere_cuts(mesh, *grid):
        with shardtensor.fallback_mode("error"):
            check_op(conv, sharded(x, placements, cut), mesh=mesh, **FINE)


@ranks(2, 3)
def test_convolutions_stay_cut_in_latitude(mesh):
    conv = OnMesh(convolution("coarser"), mesh)
    x = shard(torch.randn(1, 4, 7, 12), mesh, [Shard(2)])
    assert conv(x).placements == (Shard(2),)


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("size", SIZES)
def test_transposed_convolutions(mesh, size):
    grid = SIZES[size][1]
    kind = "DiscreteContinuousConvTransposeS2"
    conv = OnMesh(exact(convolution(size, kind)), mesh)
    x = torch.randn(2, 4, *grid, dtype=torch.float64, requires_grad=True)
    for placements, cut in sphere_cuts(mesh, *grid):
        with shardtensor.fallback_mode("error"):
            check_op(conv, sharded(x, placements, cut), mesh=mesh, **FINE)


class Stack(torch.nn.Module):
    """Two convolutions in groups, down and up again."""

    def __init__(self):
        super().__init__()
        self.down = convolution("coarser", groups=2)
        kind = "DiscreteContinuousConvTransposeS2"
        self.up = convolution("coarser", kind, bias=False)
        self.mix = torch.nn.Conv2d(6, 4, 1)

    def forward(self, x):
        return self.up(self.mix(torch.tanh(self.down(x))))


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("on_mesh", [True, False])
def test_convolutions_train_without_a_change(mesh, on_mesh):
    x, wanted = torch.randn(2, 4, 7, 12), torch.randn(2, 6, 7, 12)
    placements, cut = sphere_cuts(mesh, 7, 12)[0]
    plain, model = Stack(), Stack()
    model.load_state_dict(plain.state_dict())
    run = OnMesh(model, mesh) if on_mesh else model
    parts = [shard(t, mesh, placements, cut) for t in (x, wanted)]
    for net, (given, truth) in ((plain, (x, wanted)), (run, parts)):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with shardtensor.fallback_mode("silent"):
                (net(given) - truth).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(ours.grad) is torch.Tensor
        assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
        assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@ranks(2)
def test_a_plain_tensor_that_is_filled_is_gathered_and_said(mesh):
    conv = convolution("same")
    x = shard(torch.randn(1, 4, 6, 12), mesh, [Shard(2)])
    shardtensor.reset_fallback_counts()
    with pytest.warns(UserWarning, match="copy_ has no rule for"):
        y = conv(x)
    assert_close(y, conv(x.full_tensor()), rtol=1e-4, atol=1e-5)
    assert shardtensor.fallback_counts()


# ---- attention --------------------------------------------------------------


def gradients(attention, given, weight):
    """The result, and the gradients of the inputs and of the parameters."""
    attention.zero_grad()
    result = attention(*given)
    (result * weight).sum().backward()
    parameters = [p.grad.clone() for p in attention.parameters()]
    return [result, *(x.grad for x in given), *parameters]


@ranks(3)
def test_attention_to_neighbours(mesh):
    check_attention_to_neighbours(mesh, 2)


@pytest.mark.tail
@ranks(2, 3, "2x2")
@pytest.mark.parametrize("heads", [1, 2])
def test_attention_of_heads_to_neighbours(mesh, heads):
    check_attention_to_neighbours(mesh, heads)


def check_attention_to_neighbours(mesh, heads):
    from torch_harmonics.attention import NeighborhoodAttentionS2

    attention = NeighborhoodAttentionS2(2, (3, 4), (3, 4), num_heads=heads)
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    weight = torch.randn(1, 2, 3, 4)
    expected = gradients(attention, [x], weight)
    cuts = sphere_cuts(mesh, 3, 4)
    for placements, cut in cuts if WHOLE else cuts[1:2]:
        part = shard(x, mesh, placements, cut)
        with shardtensor.fallback_mode("silent"):
            actual = gradients(attention, [part], weight)
        assert actual[0]._spec == actual[1]._spec == part._spec
        assert all(type(grad) is torch.Tensor for grad in actual[2:])
        for ours, theirs in zip(actual, expected, strict=True):
            assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@ranks(2)
def test_attention_to_a_coarser_grid(mesh):
    from torch_harmonics.attention import NeighborhoodAttentionS2

    attention = NeighborhoodAttentionS2(2, (4, 4), (2, 4))
    given = [torch.randn(1, 2, n, 4, requires_grad=True) for n in (2, 4, 4)]
    weight = torch.randn(1, 2, 2, 4)
    expected = gradients(attention, given, weight)
    placements, _ = sphere_cuts(mesh, 4, 4)[0]
    parts = [shard(x, mesh, placements) for x in given]
    with shardtensor.fallback_mode("silent"):
        actual = gradients(attention, parts, weight)
    assert all(type(grad) is torch.Tensor for grad in actual[4:])
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@ranks(2, 3, "2x2")
def test_attention_to_all_points_and_other_grids(mesh):
    import torch_harmonics as th
    from torch_harmonics.attention import AttentionS2

    gauss = {"grid_out": "legendre-gauss"}
    cases = [
        (AttentionS2(4, 2, (6, 8), (6, 8)), 6, 8),
        (th.ResampleS2(6, 8, 12, 16), 6, 8),
        (th.ResampleS2(12, 16, 6, 8), 12, 16),
        (th.ResampleS2(6, 8, 9, 18, **gauss), 6, 8),
        (th.ResampleS2(6, 8, 12, 16, mode="bilinear-spherical"), 6, 8),
    ]
    for module, nlat, nlon in cases:
        x = torch.randn(1, 4, nlat, nlon, requires_grad=True)
        for placements, cut in sphere_cuts(mesh, nlat, nlon):
            part = sharded(x, placements, cut)
            with shardtensor.fallback_mode("error"):
                check_op(OnMesh(module, mesh), part, mesh=mesh, rtol=1e-4, atol=1e-5)


@ranks(2, 3, "2x2")
def test_other_grids_stay_cut_and_send_what_lies_between(mesh):
    import torch_harmonics as th

    for to in ((12, 24), (11, 20), (36, 72)):
        for mode in ("bilinear", "bilinear-spherical"):
            resample = th.ResampleS2(24, 48, *to, mode=mode)
            for placements in [[Shard(2)], [Shard(3)], [Shard(2), Shard(3)]]:
                if len(placements) != mesh.ndim:
                    continue
                x = shard(torch.randn(2, 4, 24, 48), mesh, placements)
                x.requires_grad_()
                shardtensor.reset_comm_stats()
                y = resample(x)
                assert y.placements == x.placements
                y.square().mean().backward()
                stats = shardtensor.comm_stats()
                # The rows that a new one lies between, read up to six times.
                row = 2 * 4 * 72 * 4
                assert stats.bytes <= 12 * 2 * row, (to, mode, placements)
                assert stats.all_reduces <= mesh.ndim
