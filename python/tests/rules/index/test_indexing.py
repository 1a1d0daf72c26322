"""Reading and writing at index tensors, masks and embeddings."""

import pytest
import rig
import torch
import torch.nn.functional as F
from layouts import placements_of
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

import shardtensor

X = torch.rand(6, 7, 5, dtype=torch.double, generator=rig.generator(3))
ROWS = torch.tensor([[3, 0], [2, 2]])
J = torch.tensor([1, 4])

READS = {
    "first": lambda x: x[ROWS],
    "middle": lambda x: x[:, ROWS],
    "neighbours": lambda x: x[:, J, J],
    "apart": lambda x: x[J, :, J],
    "with_slice": lambda x: x[1:5, J],
    "with_integer": lambda x: x[2, :, J],
    "mask": lambda x: x[x.detach() > 0.5],
    "row_mask": lambda x: x[torch.tensor([True, False] * 3)],
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", READS)
def test_reads(mesh, name):
    for cut in range(3):
        for sizes in partitions(X.size(cut), mesh.size()):
            check_op(
                READS[name],
                sharded(X.clone().requires_grad_(), [Shard(cut)], {cut: sizes}),
                mesh=mesh,
            )


@ranks(2, "2x2")
def test_a_number_has_one_row(mesh):
    number = X[0, 0, 0].clone().requires_grad_()
    index = sharded(torch.tensor([0]), [Shard(0)] + [Replicate()] * (mesh.ndim - 1))
    check_op(lambda x, i: x.gather(0, i), number, index, mesh=mesh)
    check_op(lambda x, i: x.index_select(0, i), number, index, mesh=mesh)


def write(x, where, value):
    y = x * 1
    y[where] = value
    return y


WRITES = {
    "rows": (J,),
    "columns": (slice(None), J),
    "both": (slice(None), J, J),
    "slice": (slice(1, 4),),
    "mask": (torch.tensor([True, False] * 3),),
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", WRITES)
def test_writes(mesh, name):
    for cut in range(3):
        x = sharded(X.clone().requires_grad_(), [Shard(cut)])
        check_op(lambda a: write(a, WRITES[name], 7.0), x, mesh=mesh)
        value = torch.rand(X[WRITES[name]].shape, dtype=torch.double)
        check_op(
            lambda a, v: write(a, WRITES[name], v), x, value.requires_grad_(), mesh=mesh
        )


FLAT = torch.tensor([[17, 0, 209], [100, -1, 17]])
# On a GPU any of the values that are put in one place may stay.
PUT = torch.tensor([[17, 0, 209], [100, -2, 16]]) if rig.DEVICE == "cuda" else FLAT
NEAR = torch.tensor([[0, -6, 9], [5, 2, 2]])
WITHOUT_GATHER = {
    "take": lambda x: x.take(FLAT),
    "take_all": lambda x: x.take(torch.arange(210).flip(0)),
    "put": lambda x: x.put(PUT, x[0, :2, :3] * 2),
    "put_accumulating": lambda x: x.put(FLAT, x[0, :2, :3], accumulate=True),
    "put_in_place": lambda x: (x * 1).put_(PUT, x[0, :2, :3]),
    "fill": lambda x: x.index_fill(1, J, x[0, 0, 0]),
    "fill_in_place": lambda x: (x * 1).index_fill_(0, J, x.sum()),
    "masked": lambda x: torch.ops.aten._unsafe_masked_index(
        x, NEAR[..., None, None].abs() < 6, [NEAR], 3.0
    ),
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", WITHOUT_GATHER)
def test_reads_and_writes_of_single_elements(mesh, name):
    for cut in range(3):
        for sizes in partitions(X.size(cut), mesh.size()):
            x = sharded(X.clone().requires_grad_(), [Shard(cut)], {cut: sizes})
            check_op(WITHOUT_GATHER[name], x, mesh=mesh)


@ranks(2)
def test_accumulating_writes(mesh):
    twice = torch.tensor([1, 1, 4])
    for cut in range(3):
        check_op(
            lambda a, v: a.index_put((twice,), v, accumulate=True),
            sharded(X.clone().requires_grad_(), [Shard(cut)]),
            torch.rand(3, 7, 5, dtype=torch.double, requires_grad=True),
            mesh=mesh,
        )


@ranks(1, 2, 3)
def test_embedding_of_sharded_tokens(mesh):
    tokens = torch.randint(0, 9, (5, 4), generator=rig.generator(1))
    for cut in (0, 1):
        for sizes in partitions(tokens.size(cut), mesh.size()):
            check_op(
                lambda t, w: F.embedding(t, w),
                sharded(tokens, [Shard(cut)], {cut: sizes}),
                torch.rand(9, 3, dtype=torch.double, requires_grad=True),
                mesh=mesh,
            )


@pytest.mark.skipif(rig.DEVICE != "cpu", reason="a device's kernels check nothing")
@ranks(2, 3, "2x2")
def test_tokens_outside_of_a_table_are_an_error_on_every_rank(mesh):
    for placement in Shard(0), Shard(1):  # tokens are cut in place of rows
        table = shard(torch.rand(4, 4), mesh, [placement] * mesh.ndim)
        for tokens in torch.tensor([0, 1, 2, 4]), torch.tensor([[0, 1]] * 3 + [[1, 7]]):
            with pytest.raises(IndexError, match="index [47] is out of bounds"):
                F.embedding(tokens, table)


@ranks(2)
@pytest.mark.parametrize("write", [False, True])
def test_every_gathered_mask_counts_as_a_fallback(mesh, write):
    import shardtensor as st

    x = shard(X, mesh, [Shard(1)])
    rows = shard(torch.arange(6) == 2, mesh, [Shard(0)])

    def mask():
        if write:
            x[rows, torch.tensor([1, 2])] = 1.0
        else:
            x[rows, torch.tensor([1, 2])]

    st.set_fallback_mode("silent")
    st.reset_fallback_counts()
    mask()
    mask()
    assert [calls for calls, _ in st.fallback_counts().values()] == [2]
    # What was decided for this layout before must not hide a later mode.
    st.set_fallback_mode("error")
    with pytest.raises(NotImplementedError, match="fallback mode 'error'"):
        mask()
    st.set_fallback_mode("warn")
    st.reset_fallback_counts()
    with pytest.warns(UserWarning, match="The result is right"):
        mask()


READS_OF_A_WHOLE_DIM = {
    "index": lambda x: x[..., torch.arange(12) % 5],
    "several": lambda x: x[:, torch.arange(3), :, torch.arange(3)],
    "matrix": lambda x: x[:, torch.arange(6).view(2, 3)],
    "mask": lambda x: x[..., torch.arange(8) % 2 == 0],
    "index_select": lambda x: x.index_select(-1, torch.arange(12) % 5),
    "take_along_dim": lambda x: x.take_along_dim(torch.zeros(1, 1, 1, 4).long(), -1),
}


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", READS_OF_A_WHOLE_DIM)
def test_gradients_of_reads_along_a_whole_dim_stay_where_they_are(mesh, name):
    read = READS_OF_A_WHOLE_DIM[name]
    x = torch.randn(4, 6, 8, 8, requires_grad=True)
    cut = {2: [*range(1, mesh.size()), 8 - sum(range(1, mesh.size()))]}
    placements = [Shard(2)] if mesh.ndim == 1 else [Shard(2), Shard(0)]
    sizes = cut if mesh.ndim == 1 else None
    part = shard(x.detach(), mesh, placements, sizes).requires_grad_()
    result = read(part)
    ones = torch.ones_like(result)
    shardtensor.reset_comm_stats()
    (grad,) = torch.autograd.grad(result, part, ones)
    stats = shardtensor.comm_stats()
    assert (stats.exchanges, stats.all_reduces) == (0, 0)
    assert grad._spec == part._spec
    check_op(read, sharded(x, placements, sizes), mesh=mesh, second_order=True)


@ranks(2, 3, "2x2")
def test_rows_that_are_repeated_as_often_as_cut_counts_say(mesh):
    """No rank is told of others' counts."""
    counts = torch.tensor([2, 0, 1, 3, 0, 0, 4, 1, 1, 2, 0, 5])
    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    dims = placements_of(mesh, 0)
    for sizes in partitions(12, mesh.size()):
        cut = sharded(counts, dims, {0: sizes})
        with shardtensor.fallback_mode("error"):
            for given in (sharded(x, dims, {0: sizes}), x):
                check_op(
                    lambda x, n: x.repeat_interleave(n, 0),
                    given,
                    cut,
                    mesh=mesh,
                    second_order=True,
                )
            check_op(torch.repeat_interleave, sharded(counts.int(), dims), mesh=mesh)
        part = shard(counts, mesh, dims, {0: sizes})
        rows = part.repeat_interleave(part, output_size=19)
        assert_close(rows, counts.repeat_interleave(counts))
        with pytest.raises(RuntimeError, match="output_size 18, expected 19"):
            torch.repeat_interleave(part, output_size=18)
        with pytest.raises(RuntimeError, match="repeats can not be negative"):
            torch.repeat_interleave(part - 1)


@ranks("2x2")
@pytest.mark.parametrize("columns", [0, 3])
def test_rows_made_beside_a_dim_that_both_axes_cut(mesh, columns):
    """One of them cuts the rows, the other what the source had of its dim."""
    x = torch.randn(4, 2, columns, dtype=torch.float64, requires_grad=True)
    first = torch.tensor([0])
    check_op(
        lambda x: x.tanh().index_add(1, first, x.tanh()[:, first]),
        sharded(x, [Shard(0), Shard(1)]),
        mesh=mesh,
        second_order=True,
    )
