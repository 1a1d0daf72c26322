"""Batches of matrices, distances between rows: what is whole, what is cut."""

import pytest
import torch
from layouts import ALL, check, check_native, placements_of, sweep
from ranks import assert_close, check_op, ranks, shard, sharded
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardTensor

linalg = torch.linalg


def definite(x):
    """Symmetric, positive definite, with distinct eigenvalues."""
    return x @ x.mT + torch.diag(torch.arange(1.0, x.shape[-1] + 1)).double()


MATRICES = {
    "inv": lambda x: linalg.inv(definite(x)),
    "cholesky": lambda x: linalg.cholesky(definite(x)),
    "qr": lambda x: linalg.qr(definite(x)),
    "matrix_exp": lambda x: linalg.matrix_exp(x / 4),
    "solve_triangular": lambda x: linalg.solve_triangular(
        definite(x).triu(), x, upper=True
    ),
    "cholesky_solve": lambda x: torch.cholesky_solve(x, linalg.cholesky(definite(x))),
    "det": lambda x: linalg.det(definite(x)),
    "slogdet": lambda x: linalg.slogdet(definite(x)).logabsdet,
    "lu": lambda x: linalg.lu(definite(x))[1:],
    "lu_factor": lambda x: linalg.lu_factor(definite(x))[0],
    "lu_solve": lambda x: linalg.lu_solve(*linalg.lu_factor(definite(x)), x),
}
ROWS = torch.arange(9.0).double().view(3, 3) / 9
MATRICES |= {
    "eigh": lambda x: sum(
        v.abs() @ torch.diag_embed(w) for w, v in [linalg.eigh(definite(x))]
    ),
    "eigvals": lambda x: linalg.eigvals(definite(x) + ROWS).abs(),
    "eig": lambda x: linalg.eig(definite(x) + ROWS)[1].abs(),
    "svd": lambda x: sum((u @ s.diag_embed() @ v).abs() for u, s, v in [linalg.svd(x)]),
    "svdvals": lambda x: linalg.svdvals(definite(x)),
    "norm": lambda x: linalg.matrix_norm(definite(x), 2),
    "solve": lambda x: linalg.solve(definite(x), x),
    "solve_vector": lambda x: linalg.solve(definite(x), x[..., 0]),
    "solve_shared": lambda x: linalg.solve(definite(x), ROWS),
    "pinv": lambda x: linalg.pinv(definite(x)[..., :2]),
    "lstsq": lambda x: linalg.lstsq(definite(x)[..., :2], x)[0],
    "lstsq_vector": lambda x: linalg.lstsq(definite(x), x[..., 0])[0],
    "ldl": lambda x: linalg.ldl_factor(definite(x))[0],
    "ldl_solve": lambda x: linalg.ldl_solve(*linalg.ldl_factor(definite(x)), x),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(linalg.cholesky(definite(x))),
    "qr_parts": lambda x: torch.geqrf(x)[1],
    "householder": lambda x: linalg.householder_product(*torch.geqrf(definite(x))),
    "ormqr": lambda x: torch.ormqr(*torch.geqrf(definite(x)), x),
}
FORWARD = (
    "matrix_exp",
    "ldl",
    "ldl_solve",
    "qr_parts",
    "householder",
    "ormqr",
)  # its formula fills a tensor of its own


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", MATRICES)
def test_batches_of_matrices(mesh, name):
    x = torch.randn(4, 5, 3, 3, dtype=torch.float64, requires_grad=name not in FORWARD)
    check_native(mesh, None, MATRICES[name], x=x)


@ranks(2, 3)
@pytest.mark.parametrize("name", MATRICES)
def test_what_is_a_view_and_what_a_copy_is_as_on_one_device(mesh, name):
    """Most results are column-major: rows that are flattened are copied."""
    for sizes in ((4, 3, 3), (3, 3)):
        whole = torch.randn(sizes, dtype=torch.float64)
        given = shard(whole, mesh, [Shard(0)])
        given_turned = shard(whole.mT, mesh, [Shard(0)]).mT
        for x in (given, given_turned):
            one = whole if x is given else whole.mT.contiguous().mT
            for y, expected in zip(*(outputs(MATRICES[name](a)) for a in (x, one))):
                assert y.stride() == expected.stride(), (sizes, y.stride())
                written, same = y.clone(), expected.clone()
                written.flatten()[:2].mul_(3)
                same.flatten()[:2].mul_(3)
                assert_close(written, same)


def outputs(result):
    return [result] if isinstance(result, torch.Tensor) else result


@ranks(2)
def test_a_single_matrix(mesh):
    check(mesh, (4, 4), MATRICES["cholesky"])
    check(mesh, (2, 4, 4), linalg.svdvals)


@ranks(2)
def test_bad_matrices(mesh):
    broken = torch.eye(3).repeat(4, 1, 1)
    broken[3, 0, 0] = torch.nan
    ones = torch.ones(4, 3, 3)
    for call, x in (
        (linalg.svdvals, broken),
        (linalg.pinv, broken),
        (lambda x: linalg.solve(x, ones), ones),
    ):
        for cut in (x, *(shard(x, mesh, [Shard(dim)]) for dim in range(3))):
            with pytest.raises(linalg.LinAlgError, match="Batch element"):
                call(cut)
    indefinite = shard(-torch.eye(3).expand(4, 3, 3), mesh, [Shard(0)])
    with pytest.raises(linalg.LinAlgError, match="positive-definite"):
        linalg.cholesky(indefinite)


@ranks(1, 2)
def test_pieces_that_lie_by_columns(mesh):
    """LU factors are those of the transposed matrix where it is contiguous."""
    x = torch.randn(4, 3, 3, dtype=torch.float64, requires_grad=True)
    part = shard(x, mesh, [Shard(0)])
    local = part.to_local().detach().mT.contiguous().mT
    part = ShardTensor.from_spec(local, part._spec).requires_grad_()
    for fn in (linalg.det, torch.logdet, lambda x: linalg.solve(x, ROWS)):
        for whole, cut in ((x, part), (x.mT, part.mT)):
            (expected,) = torch.autograd.grad(fn(whole).exp().nansum(), x)
            (actual,) = torch.autograd.grad(fn(cut).exp().nansum(), part)
            assert_close(actual, expected)


def lower(a):
    return linalg.cholesky(a @ a.mT + torch.eye(4, dtype=a.dtype))


def turned(a):
    return torch.geqrf(a.detach())


COLUMNS = {
    "solve_triangular": lambda a, x: linalg.solve_triangular(lower(a), x, upper=False),
    "solve_triangular_right": lambda a, x: linalg.solve_triangular(
        lower(a), x.mT, upper=False, left=False
    ),
    "cholesky_solve": lambda a, x: torch.cholesky_solve(x, lower(a)),
    "triangular_solve": lambda a, x: torch.triangular_solve(x, lower(a), False)[0],
    "lu_solve": lambda a, x: linalg.lu_solve(*linalg.lu_factor(a), x),
    "lu_solve_right": lambda a, x: linalg.lu_solve(
        *linalg.lu_factor(a), x.mT, left=False, adjoint=True
    ),
    "ldl_solve": lambda a, x: linalg.ldl_solve(
        *linalg.ldl_factor(lower(a).detach()), x.detach()
    ),
    "ormqr": lambda a, x: torch.ormqr(*turned(a), x.detach()),
    "ormqr_right": lambda a, x: torch.ormqr(*turned(a), x.detach().mT, left=False),
}
UNBATCHED = ("ldl_solve", "ormqr", "ormqr_right")  # take no broadcast batch


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_solved_where_they_are(mesh, name):
    a = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    solve = COLUMNS[name]
    for shape in ((4, 6), (2, 4, 5)):
        if len(shape) == 3 and name in UNBATCHED:
            continue
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for placements, sizes in sweep(mesh, shape, dims=[len(shape) - 1]):
            if not sizes:
                continue
            with shardtensor.fallback_mode("error"):
                check_op(solve, a, sharded(x, placements, sizes), mesh=mesh)
    columns = placements_of(mesh, 1)
    found = solve(a, shard(torch.randn(4, 6).double(), mesh, columns))
    assert all(p.is_shard() for p in found.placements)


@ranks(2, 3, "2x2")
def test_one_matrix_for_a_batch_of_right_sides(mesh):
    for matrix in ((3, 3), (1, 3, 3)):
        a = torch.randn(matrix, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 3, 2), (3, 3, 2), (2, 4, 3, 1)):
            x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            for layout in sweep(mesh, shape, dims=range(len(shape) - 2)):
                right = sharded(x, *layout)
                for solve in (linalg.solve, linalg.solve_ex):
                    with shardtensor.fallback_mode("silent"):
                        check_op(solve, a, right, mesh=mesh, second_order=True)


@ranks(2, 4)
def test_right_sides_that_look_like_vectors_in_a_piece(mesh):
    """PyTorch tells them by sizes, which are others in a piece."""
    a = torch.randn(4 * mesh.size(), 4, 4, dtype=torch.float64)
    check_op(linalg.solve, sharded(a, [Shard(0)]), torch.rand(4, 4).double(), mesh=mesh)
    wide = torch.rand(4, 4 * mesh.size()).double()
    check_op(linalg.solve, a[:4], sharded(wide, [Shard(1)]), mesh=mesh)


@ranks(2, 3)
@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd", "gelss"])
def test_residuals_of_a_batch(mesh, driver):
    """There are none where one matrix of the batch is of lower rank."""
    if mesh.device_type == "cuda" and driver != "gels":
        pytest.skip("CUDA has one driver")
    x, y = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    flat = x.clone()
    flat[3] = 0
    for a in (x, flat) if driver != "gels" else (x,):
        parts = [shard(t, mesh, [Shard(0)]) for t in (a, y)]
        expected = linalg.lstsq(a, y, driver=driver)
        found = linalg.lstsq(*parts, driver=driver)
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one.full_tensor(), other)


@ranks(*ALL)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_distances_of_all_rows(mesh, p):
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    mode = "donot_use_mm_for_euclid_dist"

    def distances(x, y):
        return torch.cdist(x, y, p, mode)

    others = [y, sharded(y, placements_of(mesh, 0)), sharded(y, placements_of(mesh, 1))]
    with shardtensor.fallback_mode("error"):
        for layout in sweep(mesh, x.shape):
            for other in others:
                check_op(distances, sharded(x, *layout), other, mesh=mesh)
                check_op(distances, other, sharded(x, *layout), mesh=mesh)


@ranks(2, 3, "2x2")
def test_euclidean_distances_of_many_rows(mesh):
    """Beyond 25 rows PyTorch takes them from a product."""
    y = torch.randn(27, 3, dtype=torch.float64, requires_grad=True)
    batch = torch.randn(2, 27, 3, dtype=torch.float64, requires_grad=True)
    same = torch.arange(81.0).double().view(27, 3).requires_grad_()  # exact
    with shardtensor.fallback_mode("error"):
        for layout in sweep(mesh, (6, 3)):
            x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
            for other in (y, sharded(y, placements_of(mesh, 0))):
                pair = sharded(x, *layout), other
                check_op(torch.cdist, *pair, mesh=mesh, second_order=True)
                check_op(torch.cdist, *pair[::-1], mesh=mesh)
        for layout in sweep(mesh, same.shape, dims=[0]):
            check_op(torch.cdist, sharded(same, *layout), same, mesh=mesh)
        check(mesh, (2, 4, 3), torch.cdist, batch, dims=[0, 1], second_order=True)


@ranks(2, 3)
def test_distances_of_batches(mesh):
    y = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    check_native(mesh, (2, 4, 3), lambda x, y: torch.cdist(x, y, 1.0), y)
    check(mesh, (1, 4, 3), lambda x, y: torch.cdist(x, y, 1.0), y)
