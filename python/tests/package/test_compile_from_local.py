"""from_local inside compiled functions: one graph, any placement, with gradients."""

import pytest
import torch
from ranks import assert_close, from_spec, piece, ranks, uneven
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor, make_spec

PRELOAD = ("torch._inductor.compile_fx",)


def local_of(x, spec):
    return from_spec(x, spec)._local_tensor


def check(mesh, x, placements, sizes, backend, by_spec=False):
    """Compiled it gives the eager values and the eager gradient of the piece."""
    spec = make_spec(mesh, x.shape, placements, sizes)
    shapes = {axis: list(map(list, s)) for axis, s in spec.sharding_shapes().items()}

    def from_pieces(local):
        if by_spec:
            made = ShardTensor.from_spec(local * 2, spec)
        else:
            made = ShardTensor.from_local(local * 2, mesh, placements, shapes)
        return made.sin(), (made * made).sum()

    def run(function):
        local = local_of(x, spec).requires_grad_()
        whole, total = function(local)
        (whole.sum() + total).backward()
        return whole, total, local.grad

    torch._dynamo.reset()
    whole, total, gradient = run(
        torch.compile(from_pieces, fullgraph=True, backend=backend)
    )
    assert_close(whole, (2 * x).sin())
    assert_close(total, (4 * x * x).sum())
    torch.testing.assert_close(gradient, run(from_pieces)[2])
    return gradient


def check_placements(mesh, backend):
    others = [Replicate()] * (mesh.ndim - 1)
    x = torch.randn(7, 4, dtype=torch.float64)
    for extent in (7, 6):
        rows = {0: uneven(extent, mesh.size(0))}
        x = torch.randn(extent, 4, dtype=torch.float64)
        gradient = check(mesh, x, [Shard(0), *others], rows, backend)
        spec = make_spec(mesh, x.shape, [Shard(0), *others], rows)
        torch.testing.assert_close(gradient, piece(2 * (2 * x).cos() + 8 * x, spec))
    check(mesh, x, [Shard(1), *others], None, backend)
    check(mesh, x, [Replicate()] * mesh.ndim, None, backend)
    check(mesh, x, [Partial(), *others], None, backend)
    check(mesh, x, [Shard(1), *others], None, backend, by_spec=True)


@ranks(2, 3, "2x2")
def test_pieces_become_a_tensor_in_the_graph(mesh):
    check_placements(mesh, "aot_eager")


@pytest.mark.tail
@ranks(2)
def test_inductor(mesh):
    x = torch.randn(7, 4, dtype=torch.float64)
    check(mesh, x, [Shard(0)], {0: [5, 2]}, "inductor")


@pytest.mark.tail
@ranks(2)
def test_inductor_of_any_placement(mesh):
    check_placements(mesh, "inductor")


@ranks(2)
def test_equal_pieces_and_told_shapes(mesh):
    local = torch.randn(3, 4)
    for options in ({"global_shape": (6, 4)}, {}):

        def from_pieces(local, options=options):
            return ShardTensor.from_local(
                local, mesh, [Shard(0)], sharding_shapes="chunk", **options
            )

        compiled = torch.compile(from_pieces, fullgraph=True, backend="aot_eager")
        assert compiled(local)._spec == from_pieces(local)._spec


@ranks(2)
def test_another_extent_is_another_layout(mesh):
    """The compiler would keep the second size open."""

    def from_pieces(local):
        return ShardTensor.from_local(local * 2, mesh, [Shard(0)], "chunk").sum(1)

    torch._dynamo.reset()
    compiled = torch.compile(from_pieces, fullgraph=True, backend="aot_eager")
    for rows in (2, 3, 5):
        local = torch.randn(rows, 4, requires_grad=True)
        made = compiled(local)
        assert made._spec == from_pieces(local)._spec
        assert_close(made, from_pieces(local).full_tensor())
        made.square().sum().backward()
        assert local.grad.shape == local.shape


@ranks(2)
def test_a_layout_that_ranks_ask_for_breaks_the_graph(mesh):
    """For the answer may be another one in the next call."""

    def from_pieces(local):
        return ShardTensor.from_local(local * 2, mesh, [Shard(0)]) + 1

    compiled = torch.compile(from_pieces, backend="aot_eager")
    own = torch.ones(2, 3)
    assert compiled(own).shape == (4, 3)
    others = own if mesh.get_local_rank() == 0 else torch.ones(5, 3)
    assert compiled(others).shape == (7, 3)


@ranks(2)
def test_errors_are_those_of_eager_calls(mesh):
    def from_pieces(local):
        return ShardTensor.from_local(
            local, mesh, [Shard(0)], "chunk", global_shape=(9, 3)
        )

    compiled = torch.compile(from_pieces, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="expected sizes|local"):
        compiled(torch.ones(2, 3))
