"""Operators that work along one dim, sharded there and elsewhere."""

import pytest
import rig
import torch
import torch.nn.functional as F
from layouts import ALL, check, placements_of, sweep
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

import shardtensor

ALONG = {
    "softmax": lambda x: torch.softmax(x, 0),
    "softmax_last": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "cumsum": lambda x: x.cumsum(0),
    "cumsum_": lambda x: (x * 1).cumsum_(1),
    "cumprod": lambda x: x.cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "cummax": lambda x: x.cummax(0),
    "cummin": lambda x: x.cummin(1),
    "sort": lambda x: x.sort(0),
    "sort_descending": lambda x: x.sort(1, descending=True),
    "sort_stable": lambda x: x.sort(dim=1, stable=True),
    "argsort": lambda x: x.argsort(1),
    "msort": lambda x: x.msort(),
    "topk": lambda x: x.topk(2, 0),
    "topk_smallest": lambda x: x.topk(2, 1, largest=False),
    "kthvalue": lambda x: x.kthvalue(2, 0),
    "kthvalue_keep": lambda x: x.kthvalue(3, 1, keepdim=True),
    "median": lambda x: x.median(1),
    "nanmedian": lambda x: x.nanmedian(0),
    "mode": lambda x: (x * 2).round().mode(0)[0],
    "diff": lambda x: x.diff(dim=0),
    "unflatten": lambda x: x.cumsum(1).flatten().cumsum(0),
}


@ranks(*ALL)
@pytest.mark.parametrize("name", ALONG)
def test_along_a_dim(mesh, name):
    second_order = name in ("softmax", "log_softmax", "cumsum", "sort")
    check(mesh, (5, 4), ALONG[name], second_order=second_order)


def index_of(*shape, high):
    return torch.randint(high, shape)


INDEXED = {
    "gather": (lambda x, i: x.gather(0, i), (5, 4)),
    "gather_smaller": (lambda x, i: x.gather(0, i), (3, 2)),
    "gather_longer": (lambda x, i: x.gather(1, i % 4), (5, 9)),
    "take_along_dim": (lambda x, i: x.take_along_dim(i, 0), (2, 4)),
    "scatter": (lambda x, i: x.scatter(0, i, x * 2), (5, 4)),
    "scatter_value": (lambda x, i: x.scatter(0, i, 3.0), (2, 3)),
    "scatter_smaller": (lambda x, i: x.scatter(1, i % 4, x[:3, :2]), (3, 2)),
    "scatter_add": (lambda x, i: x.scatter_add(0, i, x), (5, 4)),
    "scatter_add_": (lambda x, i: (x * 1).scatter_add_(0, i, x), (5, 4)),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(0, i, x, "amax"), (5, 4)),
    "index_select": (lambda x, i: x.index_select(0, i), (7,)),
    "index_select_other": (lambda x, i: x.index_select(1, i % 4), (3,)),
    "index_add": (lambda x, i: x.index_add(0, i, x[:3]), (3,)),
    "index_add_other": (lambda x, i: x.index_add(1, i % 4, x[:, :2]), (2,)),
    "index_copy": (
        lambda x, i: x.index_copy(0, i.unique(), x[: len(i.unique())]),
        (1,),
    ),
    "index_fill": (lambda x, i: x.index_fill(1, i % 4, 2.0), (2,)),
}


@ranks(*ALL)
@pytest.mark.parametrize("name", INDEXED)
def test_along_a_dim_with_an_index(mesh, name):
    fn, shape = INDEXED[name]
    check(mesh, (5, 4), fn, index_of(*shape, high=5))


@ranks(2, 3)
def test_a_sharded_index_follows(mesh):
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    index = index_of(5, 4, high=4)
    for sizes in partitions(5, mesh.size()):
        check_op(
            lambda x, i: x.gather(1, i),
            sharded(x, [Shard(1)]),
            sharded(index, [Shard(0)], {0: sizes}),
            mesh=mesh,
        )


@ranks(2, 3)
def test_a_batch_of_sharded_rows_moves_nothing(mesh):
    x = torch.randn(6, 4)
    for sizes in partitions(6, mesh.size()):
        s = shard(x, mesh, [Shard(0)], {0: sizes})
        shardtensor.reset_comm_stats()
        results = s.softmax(1), s.cumsum(1), s.sort(1)[0], s.topk(2, 1)[0]
        assert shardtensor.comm_stats().messages == 0
        assert all(r._spec.partition(0) == s._spec.partition(0) for r in results)
        assert_close(results[0], x.softmax(1))


EXTREMES = {
    "argmax": lambda x: x.argmax(0),
    "argmax_keep": lambda x: x.argmax(1, keepdim=True),
    "argmin": lambda x: x.argmin(1),
    "argmax_all": lambda x: x.argmax(),
    "argmin_all": lambda x: x.argmin(keepdim=True),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "aminmax_all": lambda x: torch.aminmax(x),
}


@ranks(*ALL)
@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("values", ["random", "equal", "nan"])
def test_extremes_are_the_first_of_equals(mesh, name, values):
    x = torch.randn(5, 4)
    if values == "equal":
        x = torch.tensor([1.0, 3.0, 3.0, 1.0, 3.0]).unsqueeze(1).expand(5, 4).clone()
    if values == "nan":
        x[3, 1] = x[1, 2] = float("nan")
    check(mesh, None, EXTREMES[name], x=x)
    for placements, sizes in sweep(mesh, (5, 4)):
        s = shard(x, mesh, placements, sizes).flatten()
        assert_close(s.argmax(), x.argmax())


@ranks(1, 2, 3, "2x2")
def test_values_looked_up_in_a_sorted_sequence(mesh):
    x = torch.randn(5, 4)
    ends = torch.tensor([-1.0, 0.0, 0.5])
    check(mesh, None, lambda x: torch.bucketize(x, ends), x=x)
    check(mesh, None, lambda x: torch.searchsorted(ends, x), x=x)
    check(mesh, None, lambda x: torch.searchsorted(x.sort(1)[0], x), x=x)
    check(mesh, None, lambda x: torch.searchsorted(x.flatten().sort()[0], 0.3), x=x)
    check(mesh, None, lambda x: torch.isin(x.round(), ends.round()), x=x)


@ranks(*ALL)
@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}]
)
def test_embedding(mesh, options):
    indices = torch.randint(7, (6, 2))
    for placements, sizes in sweep(mesh, (6, 2)):
        table = torch.nn.Embedding(7, 3, **options).double()
        check_op(table, sharded(indices, placements, sizes), mesh=mesh)
    table = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    check(mesh, None, lambda w: F.embedding(indices, w), x=table)


@ranks(1, 2)
def test_wrong_dims_raise(mesh):
    x = shard(torch.zeros(4, 3), mesh, [Shard(0)])
    with pytest.raises(IndexError, match="out of range"):
        x.cumsum(2)
    with pytest.raises(RuntimeError, match="k not in range|out of range"):
        x.topk(9, 0)
    with pytest.raises(IndexError, match="expected at least one element"):
        x[:0].argmax()


@ranks(2, 3, "2x2")
def test_an_index_out_of_bounds_is_every_ranks_error(mesh):
    x = torch.zeros(4, 3, dtype=torch.float64)
    index = torch.zeros(4, 3, dtype=torch.int64)
    index[3, 2] = 7  # one rank's
    for cut in (0, 1):
        s = shard(x, mesh, placements_of(mesh, cut))
        i = shard(index, mesh, placements_of(mesh, cut))
        for call in (
            lambda s=s: s.gather(1, index),
            lambda i=i: x.gather(1, i),
            lambda s=s, i=i: s.gather(1, i),
            lambda s=s, i=i: s.scatter(1, i, 2.0),
            lambda s=s: s.clone().scatter_add_(1, index, x),
        ):
            with pytest.raises(RuntimeError, match="index 7 is out of bounds"):
                call()
        for call in (
            lambda i=i: x[i],
            lambda i=i: F.embedding(i, x),
            lambda i=i: shard(x, mesh, placements_of(mesh, 1))[i],
        ):
            with pytest.raises(IndexError, match="index 7 is out of bounds"):
                call()


@ranks(2, 3)
def test_ranks_ask_once_whether_an_index_is_within_bounds(mesh):
    x = shard(torch.randn(4, 3), mesh, [Shard(0)]).requires_grad_()
    index = shard(torch.ones(4, 3, dtype=torch.int64), mesh, [Shard(0)])

    def all_reduces():
        shardtensor.reset_comm_stats()
        x.gather(1, index).sin().backward(x.detach())
        return shardtensor.comm_stats().all_reduces

    assert [all_reduces(), all_reduces()] == [1, 0]
    index.add_(1)
    assert all_reduces() == 1
    index.add_(1)
    with pytest.raises(RuntimeError, match="index 3 is out of bounds"):
        x.gather(1, index)


@ranks(2, 3)
def test_index_tensors_without_dims(mesh):
    x = torch.randn((), dtype=torch.float64, requires_grad=True)
    y = torch.randn(1, dtype=torch.float64)
    check_op(
        lambda x, y: x.index_add(0, torch.tensor([0]), y[0]),
        sharded(x, [Replicate()]), sharded(y, [Shard(0)]), mesh=mesh,
    )  # fmt: skip


@ranks(2, 3)
def test_index_add_wants_a_source_of_selfs_shape(mesh):
    s = shard(torch.zeros(5, 4), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"sizes \[5, 4\], source of sizes \[2, 3\]"):
        s.index_add(0, torch.tensor([1, 2]), torch.ones(2, 3))


# ---- every dim of three -------------------------------------------------------

X = torch.rand(6, 7, 5, dtype=torch.double, generator=rig.generator(3))
INDEX = torch.randint(0, 5, (6, 7, 5), generator=rig.generator(4))

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
    moved = shard(X, mesh, [Shard(1)]).cummax(1)[0]
    assert moved.placements == (Shard(0),)
