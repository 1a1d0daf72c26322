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
FORWARD = ("matrix_exp",)  # its formula fills a tensor of its own


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", MATRICES)
def test_batches_of_matrices(mesh, name):
    x = torch.randn(4, 5, 3, 3, dtype=torch.float64, requires_grad=name not in FORWARD)
    check_native(mesh, None, MATRICES[name], x=x)


@ranks(2)
def test_a_single_matrix(mesh):
    check(mesh, (4, 4), MATRICES["cholesky"])
    check(mesh, (2, 4, 4), linalg.svdvals)
    indefinite = shard(-torch.eye(3).expand(4, 3, 3), mesh, [Shard(0)])
    with pytest.raises(linalg.LinAlgError, match="positive-definite"):
        linalg.cholesky(indefinite)


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
