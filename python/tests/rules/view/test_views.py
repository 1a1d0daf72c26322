"""Views: the layout follows exactly, or the tensor is moved first."""

import pytest
import torch
from layouts import ALL, check, check_native, placements_of, sweep
from oracle import Repeated
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.tensor import Partial, Shard

import shardtensor

DIM_VIEWS = {
    "permute": lambda x: x.permute(2, 0, 3, 1),
    "transpose": lambda x: x.transpose(1, -1),
    "movedim": lambda x: x.movedim(0, 2),
    "mT": lambda x: x.mT,
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze_last": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x.squeeze(),
    "squeeze_dim": lambda x: x.squeeze(1),
    "squeeze_not": lambda x: x.squeeze(0),
    "squeeze_dims": lambda x: x.squeeze((0, 1)),
    "expand": lambda x: x.expand(2, 4, 5, 3, 3),
    "expand_as": lambda x: x.expand_as(torch.empty(2, 4, 2, 3, 3)),
    "expand_minus_one": lambda x: x.expand(-1, 6, -1, -1),
}


@ranks(*ALL)
@pytest.mark.parametrize("name", DIM_VIEWS)
def test_dims_move_appear_and_disappear(mesh, name):
    second_order = name in ("permute", "expand")
    check(mesh, (4, 1, 3, 3), DIM_VIEWS[name], second_order=second_order)


@ranks(*ALL)
def test_t_of_every_number_of_dims(mesh):
    check(mesh, (5, 3), lambda x: x.t())
    check(mesh, (5, 3), lambda x: x.T)
    check(mesh, (5,), lambda x: x.t())


RESHAPES = [
    ((4, 6), (24,)),
    ((4, 6), (2, 12)),
    ((4, 6), (8, 3)),
    ((4, 6), (2, 2, 6)),
    ((4, 6), (4, 3, 2)),
    ((24,), (4, 6)),
    ((24,), (2, 3, 4)),
    ((2, 3, 4), (6, 4)),
    ((2, 3, 4), (2, 12)),
    ((2, 1, 3, 4), (2, 3, 4)),
    ((2, 3, 4), (2, 1, 3, 1, 4)),
    ((2, 6, 4), (3, 4, 4)),
    ((2, 6, 5), (2, 2, 3, 5)),
    ((7,), (7, 1)),
    ((1, 7), (7,)),
    ((2, 0, 3), (0, 6)),
    ((3, 5), (5, 3)),
]


@ranks(*ALL)
@pytest.mark.parametrize(("before", "after"), RESHAPES)
def test_view_and_reshape(mesh, before, after):
    check(mesh, before, lambda x: x.view(after), second_order=len(before) == 2)
    check(mesh, before, lambda x: x.reshape(after))
    check(mesh, before, lambda x: (x * 2).reshape(after) * 3)


@ranks(2, 4, "2x2")
def test_reshape_with_minus_one_flatten_and_unflatten(mesh):
    check(mesh, (2, 3, 4, 5), lambda x: x.flatten(1, 2))
    check(mesh, (2, 3, 4, 5), lambda x: x.flatten())
    check(mesh, (2, 12, 5), lambda x: x.unflatten(1, (3, -1)))
    check(mesh, (2, 12, 5), lambda x: x.view(2, -1))
    check(mesh, (4, 6), lambda x: x.t().reshape(-1))
    check(mesh, (4, 6, 2), lambda x: x.transpose(0, 1).reshape(6, 8))


@ranks(2, 3, "2x2")
def test_merging_and_splitting_a_sharded_dim_moves_nothing(mesh):
    x = torch.randn(3, 8, 5, requires_grad=True)
    for sizes in partitions(8, mesh.size()):
        s = shard(x, mesh, placements_of(mesh, 1), {1: sizes})
        shardtensor.reset_comm_stats()
        rows = s.reshape(24, 5) * 2
        back = rows.view(3, 8, 5)
        back.backward(shard(x.detach(), mesh, placements_of(mesh, 1), {1: sizes}))
        assert shardtensor.comm_stats().exchanges == 0
        assert shardtensor.comm_stats().all_reduces == 0
        assert back._spec == s._spec
        assert s.grad._spec == s._spec
        assert_close(rows, x.reshape(24, 5) * 2)
        assert_close(s.grad, x.detach() * 2)


@ranks(2)
def test_a_view_that_gathers_is_counted_and_refused_in_error_mode(mesh):
    whole = torch.arange(35.0)
    for cut in ({0: [3, 2]}, {0: [4, 1]}):  # none at a multiple of both 5 and 7
        x = shard(whole.view(5, 7), mesh, [Shard(0)], cut)
        shardtensor.reset_fallback_counts()
        with shardtensor.fallback_mode("silent"):
            assert_close(x.view(7, 5), whole.view(7, 5))
        assert [*shardtensor.fallback_counts()] == ["aten::view"]
        with shardtensor.fallback_mode("error"):
            with pytest.raises(NotImplementedError, match="aten::view has no rule"):
                x.view(7, 5)


@ranks(2)
def test_a_view_of_nothing_gathers_nothing(mesh):
    x = shard(torch.ones(5, 0, 3), mesh, [Shard(0)])
    with shardtensor.fallback_mode("error"):
        assert x.view(0, 7).flatten().sum().item() == 0


@ranks(2, 3, "2x2")
def test_a_view_that_moves_rows_keeps_every_axis_busy(mesh):
    whole = torch.randn(2, 4, 13, 16, dtype=torch.float64, requires_grad=True)
    cuts = [placements_of(mesh, 2), placements_of(mesh, 3), placements_of(mesh, 2, 3)]
    for placements in cuts:
        for sizes in ((2, 4, -1), (8, 13, 8, 2), (8, 26, 8), (-1, 16)):
            with shardtensor.fallback_mode("error"):
                x = sharded(whole, placements)
                check_op(torch.reshape, x, sizes, mesh=mesh, second_order=True)
                x = shard(whole.detach(), mesh, placements)
                shardtensor.reset_comm_stats()
                y = x.reshape(sizes)
            assert shardtensor.comm_stats().exchanges <= 1
            assert y.to_local().numel() < 1.3 * whole.numel() / mesh.size()


@ranks(2, 3, "2x2")
def test_a_cut_that_is_often_repeated_keeps_its_rhythm(mesh):
    """At a boundary of each period a row moves, and not the half of all."""
    pieces = mesh.size()
    sizes = Repeated([25] * (pieces - 1) + [100 - 25 * (pieces - 1)], 90)
    whole = torch.randn(9000, dtype=torch.float64, requires_grad=True)
    x = sharded(whole, placements_of(mesh, 0), {0: sizes})
    check_op(lambda x: x.reshape(-1, 2) * 2, x, mesh=mesh, second_order=True)
    part = shard(whole.detach(), mesh, placements_of(mesh, 0), {0: sizes})
    shardtensor.reset_comm_stats()
    part.reshape(-1, 2)
    assert shardtensor.comm_stats().bytes <= 90 * 8 * 2


# ---- slices -----------------------------------------------------------------

SLICES = {
    "front": lambda x: x[:3],
    "back": lambda x: x[-4:],
    "middle": lambda x: x[2:5],
    "step": lambda x: x[1::3],
    "step_end": lambda x: x[1:6:2],
    "one": lambda x: x[4:5],
    "none": lambda x: x[5:5],
    "reversed_bounds": lambda x: x[5:2],
    "beyond": lambda x: x[3:100],
    "all": lambda x: x[:],
    "narrow": lambda x: x.narrow(0, 2, 4),
    "two": lambda x: x[1:5, 1:],
    "twice": lambda x: x[1:7][::2],
    "select": lambda x: x[3],
    "select_last": lambda x: x.select(0, -1),
    "select_other": lambda x: x.select(1, 1),
    "select_both": lambda x: x[2, 1],
    "ellipsis": lambda x: x[..., 1:2],
    "new_dim": lambda x: x[2:6, None, :, None],
    "diagonal": lambda x: x.diagonal(),
    "diagonal_offset": lambda x: x.diagonal(-1, 1, 0),
    "unfold": lambda x: x.unfold(0, 3, 2),
    "unfold_other": lambda x: x.unfold(1, 2, 1),
    "tiles": lambda x: x.unfold(0, 2, 2),
    "tiles_apart": lambda x: x.unfold(0, 1, 3),
    "tiles_of_three": lambda x: x.unfold(0, 3, 3),
    "tiles_then_rest": lambda x: x.unfold(0, 2, 4),
    "one_tile": lambda x: x.unfold(0, 6, 6),
    "tiles_of_both": lambda x: x.unfold(0, 2, 2).unfold(1, 1, 2),
}


@ranks(*ALL)
@pytest.mark.parametrize("name", SLICES)
def test_slices(mesh, name):
    check(mesh, (7, 3), SLICES[name], second_order=name in ("step", "select"))


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("name", [n for n in SLICES if "tile" in n or "unfold" in n])
def test_windows_gather_nothing(mesh, name):
    check_native(mesh, (7, 3), SLICES[name])


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("offset", [-6, -1, 0, 2, 9])
def test_diagonals_gather_nothing(mesh, offset):
    check_native(mesh, (7, 3), lambda x: x.diagonal(offset), second_order=True)
    check_native(mesh, (5, 3, 6), lambda x: x.diagonal(offset, 2, 0))
    check(mesh, (4, 6), lambda x: x.diagonal_scatter(x.diagonal(offset) * 2, offset))


@ranks(2, 3)
def test_a_diagonal_of_a_cut_matrix_is_a_view_without_messages(mesh):
    """Into which a program writes, as into that of a covariance."""
    whole = torch.randn(6, 6, requires_grad=True)
    for dim in (0, 1):
        for sizes in partitions(6, mesh.size(), repeated=False):
            x = shard(whole, mesh, [Shard(dim)], {dim: sizes})
            matrix = x * 1
            shardtensor.reset_comm_stats()
            matrix.diagonal(1).mul_(3)
            matrix.square().backward(torch.ones(6, 6))
            assert shardtensor.comm_stats().messages == 0
            assert matrix.diagonal(1).placements == (Shard(0),)
            factor = 1 + 2 * torch.eye(6).roll(1, 1).triu()
            assert_close(matrix, whole.detach() * factor)
            assert_close(x.grad, 2 * whole.detach() * factor**2)


@ranks(3)
def test_overlapping_windows_take_one_message_from_a_neighbour(mesh):
    x = torch.arange(24.0).reshape(12, 2).requires_grad_()
    s = shard(x, mesh, [Shard(0)])
    shardtensor.reset_comm_stats()
    windows = s.unfold(0, 3, 1)
    assert shardtensor.comm_stats().messages <= 2
    assert windows.placements == (Shard(0),)
    assert windows.to_local().shape[0] in (3, 4)
    y, z = (w.square().sum() for w in (windows, x.unfold(0, 3, 1)))
    assert_close(y.full_tensor(), z)
    for got, expected in zip(*(second_order(t, u) for t, u in ((y, s), (z, x)))):
        assert_close(got.full_tensor(), expected)


def second_order(y, x):
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    return grad, *torch.autograd.grad(grad.pow(3).sum(), x)


@ranks(2)
def test_tiles_are_views(mesh):
    """Cuts between two tiles send nothing, and what is written arrives."""
    x = shard(torch.arange(8.0), mesh, [Shard(0)])
    shardtensor.reset_comm_stats()
    x.unfold(0, 2, 2).mul_(torch.tensor([1.0, -1.0]))
    assert shardtensor.comm_stats().messages == 0
    assert x.full_tensor().tolist() == [0, -1, 2, -3, 4, -5, 6, -7]
    x = shard(torch.arange(8.0), mesh, [Shard(0)], {0: [3, 5]})
    x.unfold(0, 2, 2).mul_(torch.tensor([1.0, -1.0]))
    assert x.full_tensor().tolist() == [0, -1, 2, -3, 4, -5, 6, -7]


@ranks(2, 3)
def test_slicing_a_sharded_dim_moves_nothing(mesh):
    x = torch.randn(9, 2, requires_grad=True)
    for sizes in partitions(9, mesh.size(), repeated=False):
        s = shard(x, mesh, [Shard(0)], {0: sizes})
        shardtensor.reset_comm_stats()
        part = s[2:8:2]
        part.backward(torch.ones(3, 2))
        assert shardtensor.comm_stats().messages == 0
        assert s.grad.to_local().shape[0] <= 9


@ranks(2, 3)
def test_slices_of_a_repeated_partition(mesh):
    x = torch.randn(4, 5, requires_grad=True)
    for sizes in partitions(5, mesh.size()):
        for fn in (
            lambda x: x.flatten()[5:15],
            lambda x: x.flatten()[3:11],
            lambda x: x.flatten()[::3],
            lambda x: x.flatten()[7],
            lambda x: torch.stack(x.flatten().unbind()),
            lambda x: x.flatten().view(2, 10)[1],
        ):
            check_op(fn, sharded(x, [Shard(1)], {1: sizes}), mesh=mesh)


# ---- strides ----------------------------------------------------------------


STRIDES = {
    "itself": lambda x: x,
    "t": lambda x: x.transpose(0, 2),
    "rows": lambda x: x[1:4:2],
    "row": lambda x: x[:, 1],
    "diagonal": lambda x: x.diagonal(),
    "merged": lambda x: x.flatten(1),
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1),
    "copied": lambda x: x.transpose(0, 2).contiguous(),
    "unbound": lambda x: x.unbind(2)[1],
    "channels_last": lambda x: (
        x[None].contiguous(memory_format=torch.channels_last).relu()
    ),
}


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", STRIDES)
def test_strides_are_those_of_the_whole_tensor_on_every_rank(mesh, name):
    x = torch.randn(4, 3, 5)
    for placements, sizes in sweep(mesh, x.shape):
        y = STRIDES[name](shard(x, mesh, placements, sizes))
        assert y.stride() == STRIDES[name](x).stride()


@ranks(2, 3)
def test_a_view_across_strides_raises_on_every_rank(mesh):
    for sizes in partitions(4, mesh.size()):
        x = shard(torch.randn(3, 4), mesh, [Shard(1)], {1: sizes})
        with pytest.raises(RuntimeError, match="not compatible with input tensor's"):
            x.t().view(-1)
        assert_close(x.t().reshape(-1), x.full_tensor().t().reshape(-1))


# ---- written views ----------------------------------------------------------


def written(fn):
    """fn changes its argument in place; a function of a tensor of it."""

    def run(x):
        y = x * 1
        fn(y)
        return y

    return run


WRITES = {
    "row": lambda y: y[2].fill_(5.0),
    "row_twice": lambda y: y[2].mul_(2).add_(1),
    "element": lambda y: y[1, 2].zero_(),
    "slice": lambda y: y[1:4].mul_(3),
    "step": lambda y: y[::2].neg_(),
    "column": lambda y: y[:, 1].add_(1),
    "view": lambda y: y.view(3, 8).mul_(torch.arange(8.0)),
    "view_moves": lambda y: y.view(2, 2, 3, 2)[1, 0].mul_(2),
    "transpose": lambda y: y.t()[1].mul_(2),
    "flat": lambda y: y.view(-1)[3:15:2].exp_(),
    "diagonal": lambda y: y.diagonal().fill_(1.5),
    "unbind": lambda y: y.unsqueeze(0).squeeze(0)[3].sub_(1),
    "assign_row": lambda y: y.__setitem__(1, torch.arange(6.0)),
    "assign_slice": lambda y: y.__setitem__(slice(1, 3), 7.0),
    "assign_column": lambda y: y.__setitem__((..., 2), torch.arange(4.0)),
    "assign_itself": lambda y: y.__setitem__(0, y[3]),
    "squeeze_": lambda y: y.unsqueeze(1).squeeze_(1).mul_(2),
    "transpose_": lambda y: y.transpose(0, 1).transpose_(0, 1).mul_(2),
    "window": lambda y: y.unfold(0, 3, 1)[1].mul_(2),
    "windows": lambda y: y.unfold(1, 3, 1)[:, 1::3].add_(torch.arange(3.0)),
    "window_of_windows": lambda y: y.unfold(1, 4, 1).unfold(2, 2, 1)[:, 2, 1].neg_(),
    "window_assigned": lambda y: y.unfold(1, 4, 1)[:, 2].__setitem__((..., 0), -0.0),
    "window_indexed": lambda y: y.unfold(1, 3, 2)[:, 0][torch.tensor([1])].mul_(2),
    "window_put": lambda y: y.unfold(0, 2, 1)[2].__setitem__(torch.tensor([3]), 5.0),
    "window_merged": lambda y: y.unfold(1, 3, 2)[:, 1].reshape(-1).mul_(2),
    "window_out": lambda y: torch.exp(y[1], out=y.unfold(0, 2, 1)[2, :, 0]),
    "windows_copied": lambda y: y.unfold(1, 3, 1).contiguous().mul_(2),
    "windows_cloned": lambda y: y.unfold(0, 3, 1).clone().reshape(-1).zero_(),
    "windows_reshaped": lambda y: y.unfold(0, 3, 1).reshape(-1).zero_(),
    "expanded": lambda y: y[:, :1].unsqueeze(0).expand(2, 4, 6)[..., 1, 2].fill_(3),
}
NO_GRADIENT = ("window_out", "expanded")  # nor on one device


@ranks(*ALL)
@pytest.mark.parametrize("name", WRITES)
def test_writing_into_a_view_writes_into_its_base(mesh, name):
    if name not in NO_GRADIENT:
        check(mesh, (4, 6), lambda x: written(WRITES[name])(x.float()))
    with torch.no_grad():
        x = torch.randn(4, 6)
        for placements, sizes in sweep(mesh, (4, 6)):
            expected = x.clone()
            WRITES[name](expected)
            actual = shard(x, mesh, placements, sizes)
            WRITES[name](actual)
            assert_close(actual, expected)


OVERLAPPING_WRITES = {
    "fill_": lambda w: w.fill_(2),
    "mul_": lambda w: w.mul_(2),
    "copy_": lambda w: w.copy_(torch.zeros(2)),
    "index_put_": lambda w: w.index_put_((torch.tensor([0, 1]),), torch.tensor(1.0)),
    "out": lambda w: torch.neg(w, out=w),
    "assigned": lambda w: w.__setitem__(slice(1, 4), 3.0),
    "permuted": lambda w: w.transpose(0, 2).zero_(),
}


@ranks(2, 3)
def test_windows_that_overlap_are_not_written_at_once(mesh):
    x = torch.arange(18.0).reshape(6, 3)
    for sizes in partitions(6, mesh.size()):
        s = shard(x, mesh, [Shard(0)], {0: sizes})
        windows = s.unfold(0, 2, 1)
        assert windows._base is s
        assert not windows.is_contiguous()
        for write in OVERLAPPING_WRITES.values():
            with pytest.raises(RuntimeError, match="windows of a dim that is cut"):
                write(windows)
            assert_close(s, x)
            assert_close(windows, x.unfold(0, 2, 1))


SHOWN_OTHERWISE = {
    "t_": lambda v: v.t_(),
    "transpose_": lambda v: v.transpose_(0, 1),
    "swapaxes_": lambda v: v.swapaxes_(1, 0),
    "unsqueeze_": lambda v: v.unsqueeze_(1),
    "squeeze_": lambda v: v[:, :1].squeeze_(),
    "squeeze_ dim": lambda v: v[:, :1].squeeze_(1),
    "squeeze_ dims": lambda v: torch.ops.aten.squeeze_.dims(v[:, :1], [1, 0]),
    "twice": lambda v: v.t_().unsqueeze_(0),
}
THEN = {
    "base": lambda y, v: y.mul_(torch.linspace(1, 2, y.shape[1]).to(y)),
    "view": lambda y, v: v.mul_(torch.arange(1.0, 1 + v.shape[-1]).to(v)),
    "part": lambda y, v: v[0].mul_(3),
}


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("then", THEN)
def test_gradients_of_views_that_are_shown_otherwise(mesh, then):
    """Autograd goes from the base to such a view again after a write."""

    def changed(x, name):
        y = x * 1
        v = SHOWN_OTHERWISE[name](y[:3, 1:4])
        THEN[then](y, v)
        return v.sin(), y.cos()

    for name in SHOWN_OTHERWISE:
        check(mesh, (4, 5), lambda x, name=name: changed(x, name))
    x = torch.randn(4, 5, dtype=torch.float64)
    y = shard(x, mesh, [Shard(0)] * mesh.ndim).requires_grad_() * 1
    for view in (y.t().t_(), y.unsqueeze(0).squeeze_(0)):
        assert_close(view._rev_view_func_unsafe(y), x)


@ranks(1, 2, 3)
@pytest.mark.parametrize("inference", [False, True])
def test_a_view_sees_what_is_written_into_its_base(mesh, inference):
    x = torch.arange(12.0).reshape(4, 3)
    for sizes in partitions(4, mesh.size()):
        with torch.inference_mode(inference):
            expected = x.clone()
            actual = shard(x, mesh, [Shard(0)], {0: sizes})
            rows = actual[2], expected[2]
            again = actual[2][1:], expected[2][1:]
            windows = actual.unfold(0, 3, 1), expected.unfold(0, 3, 1)
            for base in (actual, expected):
                base.mul_(2)
            assert_close(*rows)
            assert_close(*again)
            for row in rows:
                row[1:].add_(10)
            assert_close(actual, expected)
            assert_close(*again)
            assert_close(*windows)
            for window in windows:
                window[1].mul_(3)
            assert_close(actual, expected)
            assert_close(*windows)
            assert_close(*again)


class WritesIntoItsView(torch.nn.Module):
    """A tensor that needs no gradient gets one by what is written into a view
    of a view of it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(3.0, dtype=torch.double))

    def forward(self, x):
        x = x.detach().clone()
        view = x.view(-1).view(2, 2, -1)
        view.mul_(self.weight)
        x.add_(1)
        assert x.requires_grad and view.requires_grad
        return (x * x).sum() + view.sum()


@ranks(1, 2)
def test_autograd_knows_the_views_of_what_needs_no_gradient(mesh):
    x = torch.arange(24.0, dtype=torch.double).reshape(4, 6)
    check_op(WritesIntoItsView(), sharded(x, [Shard(0)]), mesh=mesh)
    part = shard(x, mesh, [Shard(0)])
    with torch.no_grad():
        view = part.view(2, 2, 6)
    with pytest.raises(RuntimeError, match="created in no_grad mode"):
        view.mul_(torch.ones((), dtype=torch.double, requires_grad=True))
    assert part.view(24)._base is part


@ranks(2)
def test_writing_into_a_view_of_a_partial_sum(mesh):
    x = torch.randn(4, 6)
    for write in (lambda y: y[1].fill_(3.0), lambda y: y[1:3].relu_()):
        expected = x.sum(0)
        actual = shard(x, mesh, [Shard(0)]).sum(0)
        assert actual.placements[0].is_partial()
        write(expected)
        write(actual)
        assert_close(actual, expected)


@ranks(1, 2, 3)
def test_in_place_changes_of_shape(mesh):
    x = torch.randn(1, 4, 3)
    for sizes in partitions(4, mesh.size()):
        s = shard(x, mesh, [Shard(1)], {1: sizes})
        assert s.squeeze_() is s
        assert_close(s, x.squeeze())
        assert_close(s.t_(), x.squeeze().t())
        assert_close(s.unsqueeze_(1), x.squeeze().t().unsqueeze(1))
        assert_close(s.transpose_(0, 2), x.squeeze().t().unsqueeze(1).transpose(0, 2))
    one = shard(torch.ones(1, 2), mesh, [Shard(0)])
    assert_close(one.squeeze_(0), torch.ones(2))


# ---- element types and refusals ---------------------------------------------


@ranks(1, 2, 3, "2x2")
def test_views_of_other_element_types(mesh):
    x = torch.randn(4, 6)
    for placements, sizes in sweep(mesh, (4, 6)):
        s = shard(x, mesh, placements, sizes)
        assert_close(s.view(torch.int32), x.view(torch.int32))
        assert_close(s.view(torch.int16), x.view(torch.int16))
        assert_close(s.view(torch.complex64), x.view(torch.complex64))
        pairs = s.view(4, 3, 2), x.view(4, 3, 2)
        assert_close(*map(torch.view_as_complex, pairs))
    check(mesh, (4, 3, 2), lambda x: torch.view_as_real(torch.view_as_complex(x)))
    terms = shard(x, mesh, [Partial()] * mesh.ndim)
    bits = terms.view(torch.int32)
    assert_close(bits, terms.full_tensor().view(torch.int32))
    bits.bitwise_and_(0x7FFFFFFF)
    assert_close(terms, x.abs(), atol=1e-5, rtol=1e-5)
    same = shard(x, mesh, [Partial()] * mesh.ndim).view(torch.float32)
    assert all(placement.is_partial() for placement in same.placements)


@ranks(2)
def test_wrong_views_raise(mesh):
    s = shard(torch.zeros(4, 6), mesh, [Shard(0)])
    as_strided = torch.ops.aten.as_strided
    with pytest.raises(NotImplementedError, match="full_tensor.. or to_local"):
        as_strided(s, (2, 2), (1, 1))
    assert_close(as_strided(s, (4, 6), (6, 1)), torch.zeros(4, 6))
    assert_close(as_strided(s[2:], (2, 6), (6, 1)), torch.zeros(2, 6))
    with pytest.raises(NotImplementedError, match="full_tensor.. or to_local"):
        as_strided(s[2:], (2, 6), (6, 1), 0)
    with pytest.raises(NotImplementedError, match="full_tensor.. or to_local"):
        torch.ops.aten.as_strided_(s, (2, 2), (1, 1))
    with pytest.raises(NotImplementedError, match="no memory of its global sizes"):
        torch.ops.aten.resize_(s, (2, 2))
    assert torch.ops.aten.resize_(s, (4, 6)) is s
    for text, error, call in (
        ("shape '.5, 5.' is invalid", RuntimeError, lambda: s.view(5, 5)),
        ("an index in .-4, 3.", IndexError, lambda: s.select(0, 4)),
        ("with dims, got a 0-d", IndexError, lambda: s.sum().select(0, 0)),
        ("step of at least 1", ValueError, lambda: torch.ops.aten.slice(s, 0, 0, 4, 0)),
        ("expected 2 dims", RuntimeError, lambda: s.permute(0)),
        ("appears twice", RuntimeError, lambda: s.permute(0, 0)),
        ("at most 2 dims", RuntimeError, lambda: s.unsqueeze(0).t()),
        ("sum to 4", RuntimeError, lambda: s.split([1, 2])),
        ("sum to 4", RuntimeError, lambda: s.split([3, 2])),
        ("split size of at least 1", RuntimeError, lambda: s.split(0)),
        ("expected at least 2 sizes", RuntimeError, lambda: s.expand(6)),
        ("two different dims", RuntimeError, lambda: s.diagonal(0, 1, 1)),
        ("a window of at most 4", RuntimeError, lambda: s.unfold(0, 5, 1)),
        ("a last dimension of size 2", RuntimeError, lambda: torch.view_as_complex(s)),
        ("divisible by 2", RuntimeError, lambda: s[:, :5].view(torch.float64)),
        ("unbind: expected a tensor with dims", IndexError, lambda: s.sum().unbind()),
        ("slice: expected a tensor with dims", IndexError,
         lambda: torch.ops.aten.slice(s.sum(), 0, 0, 1)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()
