"""Operators that work along one dim: sharded there, and elsewhere."""

import pytest
import torch
from ranks import check_op, partitions, ranks, sharded
from torch.distributed.tensor import Shard

X = torch.rand(6, 7, 5, dtype=torch.double, generator=torch.Generator().manual_seed(3))
INDEX = torch.randint(0, 5, (6, 7, 5), generator=torch.Generator().manual_seed(4))

OPS = {
    "cumsum": lambda x, d: x.cumsum(d),
    "cumprod": lambda x, d: x.cumprod(d),
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
    "cummax": lambda x, d: x.cummax(d)[0],
    "sort": lambda x, d: x.sort(d)[0],
    "topk": lambda x, d: x.topk(3, d)[0],
    "kthvalue": lambda x, d: x.kthvalue(2, d)[0],
    "median": lambda x, d: x.median(d)[0],
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "flip": lambda x, d: x.flip([d]),
    "roll": lambda x, d: x.roll(2, d),
    "index_select": lambda x, d: x.index_select(d, torch.tensor([3, 0, 3])),
    "tril": lambda x, d: x.tril(),
    "renorm": lambda x, d: x.renorm(2, d, 3.3),
    "renorm_": lambda x, d: x.clone().renorm_(3, d, 1.6),
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", OPS)
def test_along_every_dim_of_every_layout(mesh, name):
    for cut in range(3):
        for sizes in partitions(X.size(cut), mesh.size()):
            for dim in range(3):
                x = X.clone().requires_grad_()
                check_op(
                    lambda a, d=dim: OPS[name](a, d),
                    sharded(x, [Shard(cut)], {cut: sizes}),
                    mesh=mesh,
                )


@ranks("2x2")
@pytest.mark.parametrize("name", OPS)
def test_on_a_two_dimensional_mesh(mesh, name):
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)]):
        for dim in range(3):
            check_op(
                lambda a, d=dim: OPS[name](a, d),
                sharded(X.clone().requires_grad_(), placements),
                mesh=mesh,
                second_order=name in ("softmax", "cumsum"),
            )


@ranks(2, 3)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gather_and_scatter(mesh, dim):
    for cut in range(3):
        x = sharded(X.clone().requires_grad_(), [Shard(cut)])
        index = sharded(INDEX, [Shard(cut)])
        check_op(lambda a, i: a.gather(dim, i), x, index, mesh=mesh)
        check_op(lambda a, i: a.scatter_add(dim, i, a * 2), x, index, mesh=mesh)
        check_op(lambda a, i: a.gather(dim, i[:3, :2, :4]), x, index, mesh=mesh)


@ranks(2)
def test_sharding_moves_to_another_dim(mesh):
    from ranks import shard

    moved = shard(X, mesh, [Shard(1)]).cumsum(1)
    assert moved.placements == (Shard(0),)
