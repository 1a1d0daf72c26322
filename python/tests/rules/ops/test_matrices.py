"""Batches of matrices, distances between rows: what is whole, what is cut."""

import pytest
import torch
from layouts import ALL, check, check_native, placements_of, sweep
from ranks import check_op, ranks, shard, sharded
from torch.distributed.tensor import Shard

import shardtensor

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


@ranks(2)
def test_a_single_matrix_and_bad_ones(mesh):
    check(mesh, (4, 4), MATRICES["cholesky"])
    check(mesh, (2, 4, 4), linalg.svdvals)
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


@ranks(2, 3)
@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd", "gelss"])
def test_residuals_of_a_batch(mesh, driver):
    """There are none where one matrix of the batch is of lower rank."""
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


@ranks(2, 3)
def test_distances_of_batches(mesh):
    y = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    check_native(mesh, (2, 4, 3), lambda x, y: torch.cdist(x, y, 1.0), y)
    check(mesh, (1, 4, 3), lambda x, y: torch.cdist(x, y, 1.0), y)
