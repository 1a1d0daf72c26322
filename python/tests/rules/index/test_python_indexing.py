"""x[...] and x[...] = v as a Python user writes them."""

import math
import re

import pytest
import torch
from layouts import ALL, check, sweep
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Replicate, Shard

import shardtensor

I = torch.tensor([3, 0, -1, 3])  # noqa: E741
J = torch.tensor([[1, 2], [0, -1]])
MASK = torch.tensor([True, False, True, True, False])
COLUMNS = torch.tensor([False, True, True, False])

READS = {
    "row": lambda x: x[3],
    "negative": lambda x: x[-2],
    "element": lambda x: x[2, 1, 0],
    "ellipsis": lambda x: x[..., 1],
    "none": lambda x: x[None, 1:, None],
    "true": lambda x: x[True],
    "list": lambda x: x[[0, 4]],
    "index": lambda x: x[I],
    "index_2d": lambda x: x[J],
    "index_other": lambda x: x[:, J],
    "index_two": lambda x: x[I, I % 4],
    "index_apart": lambda x: x[I, :, I % 3],
    "index_broadcast": lambda x: x[J[:, :1], J[:1] % 4],
    "index_and_slice": lambda x: x[1:, I % 4, 0],
    "index_zero_dim": lambda x: x[torch.tensor(2)],
    "index_empty": lambda x: x[I[:0]],
    "mask": lambda x: x[MASK],
    "mask_other": lambda x: x[:, COLUMNS],
    "mask_two": lambda x: x[MASK[:, None] & COLUMNS],
    "mask_and_index": lambda x: x[MASK, torch.tensor([0, 3, 2])],
    "mask_full": lambda x: x[x.detach() > 0],
    "mask_none": lambda x: x[x.detach() > 99],
    "masked_select": lambda x: x.masked_select(x.detach() < 0.3),
    "masked_select_broadcast": lambda x: x.masked_select(MASK[:, None, None]),
    "take": lambda x: x.take(I),
}


@ranks(*ALL)
@pytest.mark.parametrize("name", READS)
def test_reading(mesh, name):
    second_order = name in ("index", "mask")
    check(mesh, (5, 4, 3), READS[name], second_order=second_order)


VALUES = torch.randn(3, dtype=torch.float64)
SOURCE = torch.randn(70, dtype=torch.float64)
WRITES = {
    "number": lambda y: y.__setitem__(1, 2.5),
    "all": lambda y: y.__setitem__(..., 1.0),
    "slice": lambda y: y.__setitem__(slice(1, 4), VALUES),
    "step": lambda y: y.__setitem__((slice(None), slice(0, 4, 2)), 0.5),
    "element": lambda y: y.__setitem__((2, 1, 0), 9.0),
    "row_of_itself": lambda y: y.__setitem__(0, y[4] * 2),
    "slice_of_itself": lambda y: y.__setitem__(slice(0, 2), y[3:5] + 1),
    "index": lambda y: y.__setitem__(I, 3.0),
    "index_values": lambda y: y.__setitem__(torch.tensor([4, 0]), VALUES),
    "index_rows": lambda y: y.__setitem__(torch.tensor([4, 0]), y[1:3] * 2),
    "index_other": lambda y: y.__setitem__((slice(None), J[0]), VALUES),
    "index_two": lambda y: y.__setitem__((J, J % 4), VALUES),
    "index_apart": lambda y: y.__setitem__((J[0], slice(None), J[0]), 7.0),
    "mask": lambda y: y.__setitem__(MASK, -1.0),
    "mask_values": lambda y: y.__setitem__(MASK, VALUES),
    "mask_full": lambda y: y.__setitem__(y.detach() > 0, 0.0),
    "mask_other": lambda y: y.__setitem__((slice(None), COLUMNS), VALUES),
    "masked_scatter_of_itself": lambda y: y.masked_scatter_(y > 0, y.flip(0) * 2),
    "masked_scatter_rows": lambda y: y.masked_scatter_(MASK[:, None, None], y * 2),
    "masked_scatter_plain": lambda y: y.masked_scatter_(COLUMNS[:, None], SOURCE),
    "add": lambda y: y.__setitem__(1, y[1] + 1),
    "iadd": lambda y: y[1:3].add_(1),
    "index_put_accumulate": lambda y: y.index_put_((I,), VALUES, accumulate=True),
    "index_put_accumulate_two": lambda y: y.index_put_(
        (J, J % 4), VALUES, accumulate=True
    ),
    "masked_fill": lambda y: y.masked_fill_(y.detach() < 0, 0.0),
    "masked_scatter": lambda y: y.masked_scatter_(
        y.detach() < 0, torch.arange(60.0, dtype=torch.float64)
    ),
    "put": lambda y: y.put_(I, torch.ones(4, dtype=torch.float64)),
}


def written(write):
    def run(x):
        y = x * 1
        write(y)
        return y

    return run


@ranks(*ALL)
@pytest.mark.parametrize("name", WRITES)
def test_writing(mesh, name):
    if name == "index":  # equal values: the order of writes does not matter
        assert len(set(I.tolist())) < len(I)
    check(mesh, (5, 4, 3), written(WRITES[name]))


@ranks(*ALL)
def test_writing_sharded_values(mesh):
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)

    def rows(x, v):
        y = x * 1
        y[1:3] = v
        y[torch.tensor([4, 0])] = v * 2
        return y

    layouts = list(sweep(mesh, (5, 4)))
    for (p, s), (q, _) in zip(layouts, reversed(layouts), strict=True):
        check_op(rows, sharded(x, p, s), sharded(v, q), mesh=mesh)


@ranks(1, 2, 3)
def test_index_put_and_scatter_of_copies(mesh):
    check(mesh, (5, 4), lambda x: x.index_put((J,), x[0]), second_order=False)
    check(mesh, (5, 4), lambda x: x.slice_scatter(x[:2] * 2, 0, 1, 3))
    check(mesh, (5, 4), lambda x: x.select_scatter(x[0] * 2, 0, 3))
    check(mesh, (5, 4), lambda x: x.diagonal_scatter(x[0] * 2))


@ranks(1, 2, 3, "2x2")
def test_nonzero_len_and_iteration(mesh):
    x = (torch.randn(5, 4) > 0).float()
    for placements, sizes in sweep(mesh, (5, 4)):
        s = shard(x, mesh, placements, sizes)
        assert_close(s.nonzero(), x.nonzero())
        assert len(s) == 5
        assert [row.shape for row in s] == [(4,)] * 5
        for row, expected in zip(s, x, strict=True):
            assert_close(row, expected)
        for rows, expected in zip(
            s.nonzero(as_tuple=True), x.nonzero(as_tuple=True), strict=True
        ):
            assert_close(rows, expected)


@ranks(2, 3)
def test_a_mask_selects_rows_where_they_are(mesh):
    x = torch.randn(9, 4)
    for sizes in partitions(9, mesh.size(), repeated=False):
        s = shard(x, mesh, [Shard(0)], {0: sizes})
        chosen = s[s[:, 0] > 0]
        assert_close(chosen, x[x[:, 0] > 0])
        assert chosen.placements == (Shard(0),)


@ranks(2, 3)
def test_a_mask_selects_and_writes_without_a_gather(mesh):
    shardtensor.set_fallback_mode("error")

    def selected(x, y):
        return y.masked_scatter(y > 0, (x * 2)[y > 0]), x.masked_select(y > 0)

    x, y = (torch.randn(9, 4, dtype=torch.float64, requires_grad=True) for _ in "xy")
    for sizes in partitions(9, mesh.size(), repeated=False):
        arguments = [sharded(t, [Shard(0)], {0: sizes}) for t in (x, y)]
        check_op(selected, *arguments, mesh=mesh)
    s = shard(y.detach(), mesh, [Shard(0)])
    rows = s[s > 0]
    shardtensor.reset_comm_stats()
    s.masked_scatter_(s > 0, rows * 2)
    assert shardtensor.comm_stats().bytes <= 8 * mesh.size()  # a count


@ranks(2)
def test_masked_scatter_refuses_what_one_device_refuses(mesh):
    x = torch.randn(9, 4)
    s = shard(x, mesh, [Shard(0)])
    for wrong in (
        lambda x: x.masked_scatter_(x > -99, x[:5]),  # too few
        lambda x: x.masked_scatter_(x > 0, x.double()),
        lambda x: x.masked_scatter_(x, x),
        lambda x: x.masked_scatter_(x[:3] > 0, x),
    ):
        with pytest.raises(RuntimeError) as one:
            wrong(x)
        with pytest.raises(RuntimeError, match=re.escape(str(one.value))):
            wrong(s)
    plain = x.clone()
    plain.masked_scatter_(s > 0, s * 2)
    assert_close(plain, x.masked_scatter(x > 0, x * 2))


@ranks(2, 3)
def test_writing_by_index_moves_no_rows(mesh):
    x = torch.randn(9, 1000)
    for sizes in partitions(9, mesh.size(), repeated=False):
        s = shard(x, mesh, [Shard(0)], {0: sizes})
        shardtensor.reset_comm_stats()
        s[torch.tensor([1, 7])] = 2.0
        filled = s.index_fill(0, torch.tensor([-9, 3]), 5.0)
        assert shardtensor.comm_stats().bytes == 0
        expected = x.clone()
        expected[torch.tensor([1, 7])] = 2.0
        assert_close(s, expected)
        expected[torch.tensor([0, 3])] = 5.0
        assert_close(filled, expected)


@ranks(2)
def test_wrong_indices_raise(mesh):
    s = shard(torch.zeros(4, 6), mesh, [Shard(0)])
    for text, error, call in (
        ("out of bounds for dim 0 of size 4", IndexError, lambda: s[torch.tensor([4])]),
        ("out of bounds for dim 0 of size 4", IndexError,
         lambda: s.index_put_((torch.tensor([-5]),), torch.tensor(1.0))),
        ("does not match the indexed tensor", IndexError,
         lambda: s[torch.ones(3, 6) > 0]),
        ("too many indices", IndexError, lambda: torch.ops.aten.index(s, [I % 4] * 3)),
        ("too many indices", IndexError,
         lambda: s[0, 0].index_put_((I % 4,), s[0, 0], accumulate=True)),
        ("too many indices", IndexError,
         lambda: torch.ops.aten.index_put_(s, [None, None, I % 4], s[0, 0], True)),
        ("must be long, int, byte or bool", IndexError,
         lambda: torch.ops.aten.index(s, [torch.ones(2)])),
        ("values of dtype", RuntimeError,
         lambda: s.index_put_((torch.tensor([0, 1]),), torch.ones(2, 6).double())),
        ("expected a bool mask", RuntimeError, lambda: s.masked_select(s)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()


ONES = torch.ones(6, 4)
BY_INTEGERS = {
    "index": lambda s, i: s[i],
    "index_put": lambda s, i: s.index_put((i,), torch.tensor(1.0)),
    "added": lambda s, i: s.index_put((i,), ONES, accumulate=True),
    "index_select": lambda s, i: s.index_select(0, i),
    "index_add": lambda s, i: s.index_add(0, i, ONES),
    "gather": lambda s, i: s.gather(0, i.unsqueeze(1).expand(6, 4)),
    "scatter": lambda s, i: s.scatter(0, i.unsqueeze(1).expand(6, 4), 1.0),
    "scatter_add": lambda s, i: s.scatter_add(0, i.unsqueeze(1).expand(6, 4), ONES),
    "index_fill": lambda s, i: s.index_fill(0, i, 1.0),
}


@ranks(2, 3)
def test_indices_of_types_that_pytorch_refuses(mesh):
    refused = [(torch.int8, name) for name in BY_INTEGERS]
    refused += [(torch.int16, name) for name in BY_INTEGERS]
    refused += [(torch.int32, "index_fill")]
    for dtype, name in refused:
        index = torch.arange(6).to(dtype)
        for i in (index, shard(index, mesh, [Shard(0)])):
            for dim in (0, 1):
                s = shard(torch.randn(6, 4), mesh, [Shard(dim)])
                with pytest.raises((IndexError, RuntimeError), match="ndex|indices"):
                    BY_INTEGERS[name](s, i)
                    pytest.fail(f"{name} {dtype} {dim}")


@ranks(1, 2)
@pytest.mark.parametrize("chosen", [True, False])
def test_a_mask_without_dims(mesh, chosen):
    for shape in [(), (4, 3)]:
        x = torch.arange(12.0)[: math.prod(shape)].reshape(shape)
        mask = torch.tensor(chosen)
        s = shard(x, mesh, [Shard(0)] if shape else [Replicate()])
        assert_close(s[mask], x[mask])
        assert_close(s.masked_select(mask), x.masked_select(mask))
        for y in (s := s.clone(), x := x.clone()):
            y[mask] = 7.0
        assert_close(s, x)
    with pytest.raises(NotImplementedError, match="a mask without dims beside"):
        torch.ops.aten.index(s, [torch.tensor([0]), mask])


@ranks(2, 3)
def test_masks_of_bytes(mesh):
    """Taken with PyTorch's warning, and for what is filled refused as there."""
    whole = torch.arange(24.0).reshape(8, 3)
    bytes_ = (torch.arange(8) % 3 == 0).to(torch.uint8)
    x, mask = shard(whole, mesh, [Shard(0)]), shard(bytes_, mesh, [Shard(0)])
    for index in (mask, bytes_):
        with pytest.warns(UserWarning, match="torch.uint8 is now deprecated"):
            found = x[index]
        assert_close(found, whole[bytes_.bool()])
        with pytest.raises(RuntimeError, match="only supports boolean masks"):
            x.clone()[index] = 1.0
