"""Compiled functions give results and gradients in any layout: Shard, Replicate and
Partial, called again with other layouts."""

import pytest
import torch
from oracle import every
from ranks import assert_close, ranks, shard, uneven
from torch.distributed.tensor import Replicate, Shard

PRELOAD = ("torch._inductor.compile_fx",)


def total(t):
    return (t**2).sum()


def mean_of_rows(t):
    return t.exp().mean(1)


def mean_of_columns(t):
    return t.exp().mean(0)


def product(t):
    return (t.transpose(0, 1) @ t).relu()


def in_one_row(t):
    return (t * 2).reshape(-1)


def on_every_rank(t):
    return t.redistribute(placements=[Replicate()] * t.device_mesh.ndim).sin()


def of_one_device(function, x):
    x = x.clone().requires_grad_()
    result = x.sin() if function is on_every_rank else function(x)
    result.square().sum().backward()
    return result.detach(), x.grad


def check(function, mesh, backend):
    x = torch.randn(7, 4, dtype=torch.float64)
    expected, gradient = of_one_device(function, x)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    rows, columns = (uneven(extent, mesh.size(0)) for extent in x.shape)
    one_rank = [7] + [0] * (mesh.size(0) - 1)
    for dim, sizes in ((0, rows), (0, rows), (1, columns), (0, one_rank)):
        placements = [Shard(dim)] + [Replicate()] * (mesh.ndim - 1)
        cut = {dim: sizes}
        given = shard(x, mesh, placements, cut).requires_grad_()
        result = compiled(given)
        result.square().sum().backward()
        assert_close(result, expected)
        assert_close(given.grad, gradient)
        assert given.grad.placements == given.placements


@ranks(2, 3, "2x2")
def test_results_and_gradients_keep_any_layout(mesh):
    functions = total, product, mean_of_rows, on_every_rank, mean_of_columns
    for function in every(2, functions, mesh.ndim - 1):
        check(function, mesh, "aot_eager")


@ranks(2)
def test_views_that_are_results_compile(mesh):
    check(in_one_row, mesh, "aot_eager")


@ranks(2)
def test_tensors_without_elements_compile(mesh):
    for shape in ((0, 4), (4, 0)):
        x = torch.randn(shape, dtype=torch.float64)
        given = shard(x, mesh, [Shard(0)]).requires_grad_()
        torch._dynamo.reset()
        compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
        result = compiled(given)
        result.backward()
        assert_close(result, total(x))
        assert_close(given.grad, x)


@pytest.mark.tail
@ranks(2)
def test_inductor_keeps_any_layout(mesh):
    check(in_one_row, mesh, "inductor")


@pytest.mark.tail
@ranks(2)
def test_inductor_sums_in_any_layout(mesh):
    for function in (total, mean_of_columns):
        check(function, mesh, "inductor")


@ranks(2)
def test_a_compiled_function_may_return_its_piece(mesh):
    x = torch.randn(7, 4, dtype=torch.float64)
    given = shard(x, mesh, [Shard(0)]).requires_grad_()
    compiled = torch.compile(
        lambda t: (t * 2).to_local(), fullgraph=True, backend="aot_eager"
    )
    piece = compiled(given)
    assert_close(piece, 2 * given.detach().to_local())
    piece.sum().backward()
    assert_close(given.grad, torch.full_like(x, 2.0))
