"""Rings and halos of local tensors, and gradients that operators of one's own
need."""

from unittest import mock

import pytest
import rig
import torch
import torch.distributed as dist
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Replicate, Shard

from shardtensor import (
    ContiguousGrad,
    GradReducer,
    HaloConfig,
    RingPassingConfig,
    halo_padding,
    make_spec,
    perform_ring_iteration,
    perform_ring_iteration_async,
    ring_sum,
    ring_tour,
    unhalo_padding,
)

PRELOAD = ("torch._inductor.compile_fx",)


def piece(rank, requires_grad=False):
    """Rank r holds r + 1 rows of the number r."""
    x = torch.full((rank + 1, 3), float(rank), dtype=torch.float64)
    return x.requires_grad_(requires_grad)


def rings(mesh):
    """(config, this rank's place, the axis' ranks) of each axis and direction."""
    for axis in range(mesh.ndim):
        for direction in ("forward", "backward"):
            size = mesh.size(axis)
            config = RingPassingConfig(axis, size, direction)
            yield config, mesh.get_local_rank(axis), size


# ---- rings ------------------------------------------------------------------


@ranks(1, 2, 3, "2x2")
def test_a_ring_step_brings_the_neighbours_piece_and_its_gradient_back(mesh):
    for config, rank, size in rings(mesh):
        step = 1 if config.ring_direction == "forward" else -1
        before = (rank - step) % size
        x = piece(rank, requires_grad=True)
        y = perform_ring_iteration(x, mesh, config, recv_shape=piece(before).shape)
        assert torch.equal(y, piece(before))
        (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        torch.testing.assert_close(gradient, 3 * x**2)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        torch.testing.assert_close(second, 6 * x)


@ranks(1, 2, 3)
def test_a_ring_step_takes_any_memory_and_the_same_shape_by_default(mesh):
    config = RingPassingConfig(0, mesh.size())
    rank = mesh.get_local_rank()
    x = torch.arange(6.0).reshape(2, 3).t() + rank
    y = perform_ring_iteration(x, mesh, config)
    assert_close(y, x - rank + (rank - 1) % mesh.size())


@ranks(1, 2, 3)
def test_all_around_the_ring_everything_comes_by(mesh):
    config = RingPassingConfig(0, mesh.size(), communication_method="p2p")
    rank, size = mesh.get_local_rank(), mesh.size()
    held, total = piece(rank), 0.0
    for step in range(size):
        total += held.sum()
        source = (rank - step - 1) % size
        held = perform_ring_iteration(held, mesh, config, piece(source).shape)
    assert total == sum(piece(r).sum() for r in range(size))
    assert torch.equal(held, piece(rank))


@ranks(1, 2, 3, "2x2")
def test_a_tour_meets_every_piece(mesh):
    for axis in range(mesh.ndim):
        rank, size = mesh.get_local_rank(axis), mesh.size(axis)
        shapes = [piece(r).shape for r in range(size)]
        for told in (shapes, None):
            met = []
            ring_tour(piece(rank), lambda *stop: met.append(stop), mesh, axis, told)  # noqa: B023
            owners = [owner for owner, _ in met]
            assert owners == [(rank - i) % size for i in range(size)]
            assert all(torch.equal(block, piece(owner)) for owner, block in met)
        met = []
        number = torch.tensor(float(rank))
        ring_tour(number, lambda *stop: met.append(stop), mesh, axis)  # noqa: B023
        assert all(number == owner for owner, number in met)


@ranks(1, 2, 3)
def test_what_a_ring_calls_runs_under_the_programs_modes(mesh):
    x, devices, kept = torch.ones(3, device=rig.DEVICE), [], []

    def visit(owner, block):
        devices.append(torch.zeros(1).device.type)
        with torch.enable_grad():
            torch.ones(3, requires_grad=True).exp()

    def keep(tensor):
        kept.append(tensor)
        return tensor

    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.device("meta"), saved:
        ring_tour(x, visit, mesh)
    assert devices == ["meta"] * mesh.size() and len(kept) == mesh.size()


@ranks(1, 2, 3, "2x2")
def test_a_ring_sum_is_that_of_all_pieces_together(mesh):
    def pull(block, own):
        return torch.exp(-torch.cdist(own, block)) @ block

    axis = mesh.ndim - 1
    rank, size = mesh.get_local_rank(axis), mesh.size(axis)
    rows = [r + 1 for r in range(size)]
    every = torch.randn(sum(rows), 3, dtype=torch.float64)
    pieces = every.split(rows)
    whole = every.clone().requires_grad_(), (every * 2).requires_grad_()
    expected = pull(*whole)
    expected.square().sum().backward()
    for told in ([p.shape for p in pieces], None):
        block, own = pieces[rank].clone().requires_grad_(), pieces[rank] * 2
        out = ring_sum(
            pull, block, own.requires_grad_(), mesh=mesh, mesh_dim=axis, shapes=told
        )
        torch.testing.assert_close(out, expected.split(rows)[rank])
        out.square().sum().backward()
        torch.testing.assert_close(block.grad, whole[0].grad.split(rows)[rank])
        torch.testing.assert_close(own.grad, whole[1].grad.split(rows)[rank])


@ranks(1, 2, 3)
def test_what_a_visit_raises_is_an_error_on_all_ranks(mesh):
    rank, last = mesh.get_local_rank(), mesh.size() - 1

    def refuse(owner, block):
        if rank == last:
            raise TypeError("no such block")

    with pytest.raises(TypeError, match="no such block"):
        ring_tour(torch.ones(3), refuse, mesh)

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, block):
            return block.clone()

        @staticmethod
        def backward(ctx, grad):
            refuse(None, grad)
            return grad

    out = ring_sum(Refusing.apply, torch.ones(3, requires_grad=True), mesh=mesh)
    with pytest.raises(TypeError, match="no such block"):
        out.sum().backward()
    ring_tour(torch.ones(3), lambda owner, block: None, mesh)


@ranks(1, 2, 3, "2x2")
def test_an_asynchronous_step_is_valid_after_wait(mesh):
    for config, rank, size in rings(mesh):
        config.communication_method = "p2p"
        step = 1 if config.ring_direction == "forward" else -1
        expected = piece((rank - step) % size)
        y, works = perform_ring_iteration_async(
            piece(rank), mesh, config, recv_shape=expected.shape
        )
        for work in works:
            work.wait()
        assert torch.equal(y, expected)
        buffer = torch.empty_like(expected)
        y, works = perform_ring_iteration_async(
            piece(rank), mesh, config, recv_tensor=buffer
        )
        for work in works:
            work.wait()
        assert y is buffer and torch.equal(y, expected)


@ranks(1, 2, 3, "2x2")
def test_an_asynchronous_step_where_messages_cannot_name_the_memory(mesh):
    """As over gloo on a GPU: what an exchange brings is there at once."""
    with mock.patch("shardtensor.ring._sends_from", return_value=False):
        for config, rank, size in rings(mesh):
            config.communication_method = "p2p"
            step = 1 if config.ring_direction == "forward" else -1
            expected = piece((rank - step) % size)
            buffer = torch.empty_like(expected)
            y, works = perform_ring_iteration_async(
                piece(rank), mesh, config, recv_tensor=buffer
            )
            assert y is buffer and torch.equal(y, expected) and works == []


@ranks(2, 3)
def test_an_asynchronous_step_sends_nothing_of_an_empty_piece(mesh):
    config = RingPassingConfig(0, mesh.size(), communication_method="p2p")
    rank, size = mesh.get_local_rank(), mesh.size()
    rows = [0, 2, 1][:size]
    y, works = perform_ring_iteration_async(
        torch.full((rows[rank],), 1.0), mesh, config, recv_shape=[rows[rank - 1]]
    )
    for work in works:
        work.wait()
    assert torch.equal(y, torch.ones(rows[rank - 1]))


@ranks(2, "2x2")
def test_ring_steps_refuse_what_they_cannot_do(mesh):
    with pytest.raises(IndexError, match="mesh_dim: expected an axis of .*, got 7"):
        perform_ring_iteration(torch.ones(2), mesh, RingPassingConfig(7, 2))
    with pytest.raises(ValueError, match="ring_direction: expected one of"):
        RingPassingConfig(0, 2, "left")
    with pytest.raises(ValueError, match="communication_method: expected one of"):
        RingPassingConfig(0, 2, communication_method="pigeon")
    config = RingPassingConfig(0, 2)
    with pytest.raises(ValueError, match="expected communication_method 'p2p'"):
        perform_ring_iteration_async(torch.ones(2), mesh, config)
    config = RingPassingConfig(0, 2, communication_method="p2p")
    with pytest.raises(ValueError, match="not contiguous"):
        perform_ring_iteration_async(torch.ones(2, 3).t(), mesh, config)


@ranks(1)
def test_a_ring_of_one_rank_receives_what_it_sends(mesh):
    config = RingPassingConfig(0, 1, communication_method="p2p")
    for step in (perform_ring_iteration, perform_ring_iteration_async):
        with pytest.raises(ValueError, match=r"sends to itself receives .*2, 3\]"):
            step(torch.ones(2, 3), mesh, config, recv_shape=(3, 2))


# ---- halos ------------------------------------------------------------------


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("edge", [0, 2])
def test_halo_padding_brings_neighbours_rows_and_their_gradients_back(mesh, edge):
    for axis in range(mesh.ndim):
        rank, size = mesh.get_local_rank(axis), mesh.size(axis)
        rows = [3, 2, 4][:size]
        begin = sum(rows[:rank])
        whole = torch.randn(2, sum(rows), 3, dtype=torch.float64)
        x = whole[:, begin : begin + rows[rank]].clone().requires_grad_()
        config = HaloConfig(axis, 1, halo_size=2, edge_padding_size=edge)
        y = halo_padding(x, mesh, config)

        padded = torch.nn.functional.pad(whole, (0, 0, 2, 2))
        before = 2 if rank else edge
        after = 2 if rank < size - 1 else edge
        expected = padded[:, begin + 2 - before : begin + rows[rank] + 2 + after]
        assert_close(y, expected)
        assert_close(unhalo_padding(y, mesh, config), x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=False)
        count = torch.ones_like(x)
        count[:, :2] += 1 if rank else 0
        count[:, rows[rank] - 2 :] += 1 if rank < size - 1 else 0
        assert_close(gradient, count)
        inside = unhalo_padding(halo_padding(x, mesh, config), mesh, config)
        (gradient,) = torch.autograd.grad(inside.sum(), x)
        assert_close(gradient, torch.ones_like(x))


@ranks(2, 3)
def test_a_halo_wider_than_a_neighbours_piece_is_an_error_on_all_ranks(mesh):
    x = torch.ones(1 if mesh.get_local_rank() == 1 else 5)
    with pytest.raises(
        ValueError, match=r"x has sizes \[1\], expected at least 2 rows"
    ):
        halo_padding(x, mesh, HaloConfig(0, 0, 2))


@ranks(1)
def test_a_rank_without_neighbours_sends_no_rows(mesh):
    padded = halo_padding(torch.ones(1), mesh, HaloConfig(0, 0, 2, edge_padding_size=3))
    assert padded.tolist() == [0.0] * 3 + [1.0] + [0.0] * 3


def test_halo_configurations_are_checked():
    with pytest.raises(ValueError, match="expected 'a2a' or 'p2p', got 'x'"):
        HaloConfig(0, 0, 1, communication_method="x")
    with pytest.raises(ValueError, match="async_op needs"):
        HaloConfig(0, 0, 1, async_op=True, communication_method="p2p")
    assert HaloConfig(0, 0, 1, async_op=True).edge_padding_size == 0


# ---- gradients --------------------------------------------------------------


@ranks(1, 2, 3, "2x2")
def test_grad_reducer_sums_over_the_axes_that_cut_the_other_operand(mesh):
    placements = [Shard(0), Replicate()][: mesh.ndim]
    spec = make_spec(mesh, (6, 2), placements)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    y = GradReducer.apply(x, spec)
    assert torch.equal(y, x) and y.data_ptr() == x.data_ptr()
    (y * (1 + mesh.get_local_rank(0))).sum().backward()
    assert_close(x.grad, torch.full_like(x, sum(range(1, mesh.size(0) + 1))))
    assert type(x.grad) is torch.Tensor


@ranks(2)
def test_grad_reducer_completes_the_gradient_of_a_weight(mesh):
    x, w = torch.randn(6, 2), torch.randn(2, requires_grad=True)
    s = shard(x, mesh, [Shard(0)], {0: [4, 2]})
    out = (s.to_local() * GradReducer.apply(w, s._spec)).square().sum()
    out.backward()
    (expected,) = torch.autograd.grad((x * w).square().sum(), w)
    assert_close(w.grad, expected)


@ranks(1)
def test_contiguous_grad(mesh):
    x = torch.randn(2, 3).t().requires_grad_()
    y = ContiguousGrad.apply(x)
    assert y.stride() == x.stride() and y.data_ptr() == x.data_ptr()
    seen = []
    leaf = torch.randn(3, 2, requires_grad=True)
    between = leaf * 1
    between.register_hook(lambda g: seen.append(g.is_contiguous()))
    ContiguousGrad.apply(between).backward(torch.ones(2, 3).t())
    assert seen == [True]


# ---- torch.compile ----------------------------------------------------------


@ranks(2)
def test_rings_halos_and_guards_trace_whole(mesh):
    ring = RingPassingConfig(0, mesh.size())
    halo = HaloConfig(0, 0, 1)
    spec = make_spec(mesh, (6, 2), [Shard(0)])
    for fn in (
        lambda x: perform_ring_iteration(x, mesh, ring).sin(),
        lambda x: halo_padding(x, mesh, halo).sin(),
        lambda x: unhalo_padding(x, mesh, halo).sin(),
        lambda x: GradReducer.apply(x, spec).sin(),
        lambda x: ContiguousGrad.apply(x).sin(),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        torch.manual_seed(dist.get_rank())
        x = torch.randn(4, 2, requires_grad=True)
        expected, actual = fn(x), compiled(x)
        assert_close(actual, expected)
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (expected, actual)]
        assert_close(*gradients)


@ranks(2)
def test_arguments_of_another_kind(mesh):
    block = torch.ones(3)
    with pytest.raises(TypeError, match="ring_sum: expected a function of a"):
        ring_sum(None, block, mesh=mesh)
    with pytest.raises(TypeError, match="ring_tour: expected a function of a piece"):
        ring_tour(block, block, mesh)
    config = HaloConfig(mesh_dim=0, tensor_dim=0, halo_size=2, edge_padding_size=2)
    with pytest.raises(ValueError, match=r"expected at least 2 \+ 2 rows of padding"):
        unhalo_padding(block, mesh, config)
    with pytest.raises(TypeError, match="expected a tensor, got None"):
        unhalo_padding(None, mesh, config)


@ranks(1, 2, 3)
def test_modes_in_which_a_ring_sum_has_no_derivative(mesh):
    def total(block, own):
        return ring_sum(torch.mul, block, own, mesh=mesh)

    x = torch.ones(3)
    transformed = "ring_sum: expected tensors outside of torch.func's transforms"
    for call in (
        lambda: torch.func.grad(lambda block: total(block, x).sum())(x),
        lambda: torch.func.grad(lambda own: total(x, own).sum())(x),
        lambda: torch.func.jvp(lambda own: total(x, own), (x,), (x,)),
        lambda: torch.func.vmap(lambda block: total(block, block))(x.expand(2, 3)),
    ):
        with pytest.raises(RuntimeError, match=transformed):
            call()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="a block without a forward-mode tang"):
            total(dual, x)
        of_own = torch.autograd.forward_ad.unpack_dual(total(x, dual)).tangent
    torch.testing.assert_close(of_own, mesh.size() * x)
    with pytest.raises(RuntimeError, match="ring_tour: expected tensors outside"):
        torch.func.vmap(lambda b: ring_tour(b, lambda *_: None, mesh))(x.expand(2, 3))
    torch.testing.assert_close(total(x, x), mesh.size() * x)
