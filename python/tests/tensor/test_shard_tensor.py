"""The class: making one, leaving it, its layout, moving it."""

import pytest
import rig
import torch
import torch.distributed as dist
from layouts import LAYOUTS_1D, LAYOUTS_2D, numbered, sweep
from ranks import (
    assert_close,
    check_op,
    from_spec,
    partitions,
    ranks,
    run_isolated,
    shard,
    sharded,
    uneven,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor, make_spec

# ---- from_local -------------------------------------------------------------


@ranks(1, 2, 3, 4)
def test_from_local_infers_uneven_and_empty_pieces(mesh):
    x = numbered(10, 3)
    for sizes in partitions(10, mesh.size(), repeated=False):
        mine = x.split(sizes)[mesh.get_rank()]
        y = ShardTensor.from_local(mine, mesh, (Shard(0),))
        assert type(y) is ShardTensor and isinstance(y, torch.Tensor)
        assert y.shape == (10, 3) and y.placements == (Shard(0),)
        assert y.device_mesh is mesh and y._spec.sizes() == {0: sizes}
        assert_close(y, x)


@ranks("2x2", "1x2", "2x1")
def test_from_local_infers_two_sharded_dims(mesh):
    x = numbered(7, 5)
    rows, columns = uneven(7, mesh.size(0)), uneven(5, mesh.size(1))
    r, c = mesh.get_coordinate()
    mine = x.split(rows)[r].split(columns, 1)[c]
    y = ShardTensor.from_local(mine, mesh, (Shard(0), Shard(-1)))
    assert y.placements == (Shard(0), Shard(1))
    assert y._spec.sizes() == {0: rows, 1: columns}
    assert_close(y, x)


@ranks("2x2")
def test_from_local_infers_two_axes_on_one_dim(mesh):
    x = numbered(10, 2)
    sizes = [4, 3, 0, 3]
    y = ShardTensor.from_local(
        x.split(sizes)[dist.get_rank()], mesh, (Shard(0), Shard(0))
    )
    assert y._spec.sizes() == {0: sizes}
    assert_close(y, x)


@ranks(1, 2, 3)
def test_from_local_takes_replicate_by_default(mesh):
    x = numbered(4, 2)
    y = ShardTensor.from_local(x, mesh)
    assert y.placements == (Replicate(),)
    assert_close(y, x)
    terms = ShardTensor.from_local(x, mesh, [Partial()])
    assert_close(terms, x * mesh.size())


@ranks(1, 2, 3, 4)
def test_from_local_chunk_does_not_communicate(mesh):
    x = numbered(10, 3)
    rank, count = mesh.get_rank(), mesh.size()
    spec = make_spec(mesh, (10, 3), [Shard(0)])
    begin, end = spec.interval(0)
    shardtensor.reset_comm_stats()
    y = ShardTensor.from_local(
        x[begin:end], mesh, [Shard(0)], sharding_shapes="chunk", global_shape=(10, 3)
    )
    assert y._spec == spec
    assert_close(y, x)
    even = ShardTensor.from_local(x, mesh, [Shard(0)], sharding_shapes="chunk")
    assert even.shape == (10 * count, 3)
    assert even.offsets() == (10 * rank,)
    assert shardtensor.comm_stats().bytes == 0


@ranks(1, 2, 3)
def test_from_local_takes_the_shapes_along_a_mesh_dim(mesh):
    x = numbered(3, 8)
    sizes = uneven(8, mesh.size())
    mine = x.split(sizes, 1)[mesh.get_rank()]
    shapes = {0: [(3, n) for n in sizes]}
    y = ShardTensor.from_local(mine, mesh, [Shard(1)], sharding_shapes=shapes)
    assert_close(y, x)
    again = ShardTensor.from_local(
        mine, mesh, [Shard(1)], sharding_shapes=y._spec.sharding_shapes()
    )
    assert again._spec == y._spec


@ranks(2)
def test_from_local_is_differentiable(mesh):
    local = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    y = ShardTensor.from_local(local, mesh, [Shard(0)])
    assert y.requires_grad and not y.is_leaf
    (y * (dist.get_rank() + 1)).to_local().sum().backward()
    assert type(local.grad) is torch.Tensor
    assert local.grad.tolist() == [[dist.get_rank() + 1.0] * 3] * 2


@ranks(2)
def test_from_local_moves_what_is_on_another_kind_of_device(mesh):
    local = numbered(2, 3).cpu().requires_grad_()
    for how in ("infer", "chunk"):
        y = ShardTensor.from_local(local, mesh, [Shard(0)], how)
        assert y.device.type == y.to_local().device.type == mesh.device_type
        assert_close(y, torch.cat([numbered(2, 3)] * 2))
        y.square().sum().backward()
        assert torch.equal(local.grad, 2 * local)
        local.grad = None


@ranks(2)
def test_from_local_refuses_what_does_not_fit(mesh):
    rank = dist.get_rank()
    x = torch.zeros(2, 3)
    cases = [
        (lambda: [x], (Shard(0), Shard(1)), ValueError, "each of the 1 mesh axes"),
        (lambda: [x], (Shard(2),), IndexError, "2 dims"),
        (lambda: [torch.zeros(2, 3 + rank)], (Shard(0),), ValueError, "dim 1 must"),
        (lambda: [torch.zeros([2] * (1 + rank))], (Shard(0),), ValueError, "of 1 dims"),
        (lambda: [x.to([x.dtype, torch.half][rank])], (Shard(0),), ValueError, "Half"),
        (lambda: [x], ([Shard(0), Shard(1)][rank],), ValueError, "same call"),
        (lambda: [x, {0: [(2, 3)]}], (Shard(0),), ValueError, "expected 2 shapes"),
        (lambda: [x, "even"], (Shard(0),), ValueError, "expected 'infer', 'chunk'"),
        (lambda: [x, "infer", (5, 3)], (Shard(0),), ValueError, r"\(4, 3\), expect"),
        (lambda: [x, "chunk", (9, 3)], (Shard(0),), ValueError, r"sizes \[2, 3\]"),
        (lambda: [x], ("rows",), TypeError, "expected Shard, Replicate or Partial"),
        (lambda: [x], ([Shard(0)],), TypeError, "expected Shard, Replicate or Partial"),
    ]
    for make, placements, error, message in cases:
        local, *options = make()
        with pytest.raises(error, match=message):
            ShardTensor.from_local(local, mesh, placements, *options)
    with pytest.raises(TypeError, match="got a ShardTensor"):
        ShardTensor.from_local(shard(x, mesh, [Shard(0)]), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="no default one"):
        ShardTensor.from_local(x)
    with pytest.raises(TypeError, match="made by ShardTensor.from_local"):
        ShardTensor(x)


# ---- leaving ----------------------------------------------------------------


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("placements", LAYOUTS_1D, ids=str)
def test_full_tensor_gathers_and_differentiates(mesh, placements):
    x = numbered(7, 5).requires_grad_()
    y = shard(x, mesh, placements)
    full = y.full_tensor()
    assert type(full) is torch.Tensor
    assert torch.equal(full, x)
    (full * full).sum().backward()
    assert type(y.grad) is ShardTensor
    assert_close(y.grad, 2 * x)


@ranks("2x2", "1x2", "2x1")
@pytest.mark.parametrize("placements", LAYOUTS_2D, ids=str)
def test_full_tensor_on_two_axes(mesh, placements):
    x = numbered(7, 5).requires_grad_()
    y = shard(x, mesh, placements)
    full = y.full_tensor()
    assert torch.equal(full, x)
    full.square().sum().backward()
    assert_close(y.grad, 2 * x)


@ranks(2, 3)
def test_to_local_gives_this_ranks_piece(mesh):
    x = numbered(8, 2).requires_grad_()
    sizes = uneven(8, mesh.size())
    y = shard(x, mesh, [Shard(0)], {0: sizes})
    local = y.to_local()
    assert type(local) is torch.Tensor
    assert torch.equal(local, x.split(sizes)[mesh.get_rank()])
    local.square().sum().backward()
    assert_close(y.grad, 2 * x)


@ranks(2, 3)
def test_grad_placements_say_what_local_gradients_mean(mesh):
    x = numbered(3).requires_grad_()
    y = shard(x, mesh, [Replicate()])
    factor = mesh.get_rank() + 1.0
    total = mesh.size() * (mesh.size() + 1) / 2
    (y.to_local(grad_placements=[Partial()]) * factor).sum().backward()
    assert y.grad.to_local().tolist() == [total] * 3
    y.grad = None
    (y.full_tensor(grad_placements=[Partial()]) * factor).sum().backward()
    assert y.grad.to_local().tolist() == [total] * 3


@ranks(2, 3)
def test_terms_of_an_average_have_their_part_of_its_gradient(mesh):
    rank, count = mesh.get_rank(), mesh.size()
    terms = [(numbered(3) + r).requires_grad_() for r in range(count)]
    mean = torch.stack(terms).mean(0)
    wanted = torch.autograd.grad(mean.pow(3).sum(), terms, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in wanted), terms)
    x = (numbered(3) + rank).requires_grad_()
    average = ShardTensor.from_local(x, mesh, [Partial("avg")])
    once = (
        ShardTensor.from_local(average.to_local() * 1, mesh, [Partial("avg")]),
        average.to_dtensor(),
    )
    twice = (average, average.redistribute(placements=[Shard(0)]))
    for y in (*twice, *once):
        cubes = y.redistribute(placements=[Replicate()]).pow(3)
        (g,) = torch.autograd.grad(
            cubes.sum(), x, create_graph=any(y is t for t in twice), retain_graph=True
        )
        torch.testing.assert_close(g, wanted[rank])
        if g.requires_grad:
            (gg,) = torch.autograd.grad(g.square().sum(), x)
            torch.testing.assert_close(gg, second[rank])


@ranks(2)
def test_terms_of_a_maximum_have_no_gradient(mesh):
    x = numbered(3).requires_grad_()
    y = ShardTensor.from_local(x, mesh, [Partial("max")])
    with pytest.raises(NotImplementedError, match=r"the terms of .*Partial\(max\)"):
        y.full_tensor().sum().backward()


@ranks(1, 2, 3)
def test_a_dtensor_comes_and_goes(mesh):
    x = numbered(6, 5)
    for placement in (Shard(0), Shard(1), Replicate()):
        d = dist.tensor.distribute_tensor(x, mesh, [placement]).requires_grad_()
        y = ShardTensor.from_dtensor(d)
        assert y.placements == (placement,)
        assert_close(y, x)
        back = y.square().to_dtensor()
        assert isinstance(back, DTensor)
        assert torch.equal(back.full_tensor(), x.square())
        back.full_tensor().sum().backward()
        assert torch.equal(d.grad.full_tensor(), 2 * x)


@ranks(2, 3)
def test_an_uneven_tensor_is_chunked_for_dtensor(mesh):
    x = numbered(8, 2)
    d = shard(x, mesh, [Shard(0)], {0: [8] + [0] * (mesh.size() - 1)}).to_dtensor()
    chunk = x.chunk(mesh.size())[mesh.get_rank()]
    assert torch.equal(d.to_local(), chunk)
    assert torch.equal(d.full_tensor(), x)


# ---- layout -----------------------------------------------------------------


@ranks("2x2")
def test_the_spec_answers_what_handlers_ask(mesh):
    x = numbered(7, 5)
    y = shard(x, mesh, [Shard(0), Shard(1)], {0: [4, 3], 1: [5, 0]})
    spec, (r, c) = y.spec, mesh.get_coordinate()
    assert spec == y._spec
    assert spec.mesh is mesh and spec.placements == (Shard(0), Shard(1))
    assert spec.local_shape == ([4, 3][r], [5, 0][c])
    assert spec.local_shape == y._local_tensor.shape
    assert spec.sharding_shapes() == {
        0: (torch.Size((4, [5, 0][c])), torch.Size((3, [5, 0][c]))),
        1: (torch.Size(([4, 3][r], 5)), torch.Size(([4, 3][r], 0))),
    }
    assert spec.sharding_shapes(0) == spec.sharding_shapes()[0]
    assert spec.offsets() == y.offsets() == ([0, 4][r], [0, 5][c])
    assert y.offsets(0) == [0, 4][r]
    assert spec.tensor_meta.shape == (7, 5)
    assert spec.tensor_meta.stride == x.stride()
    assert spec.tensor_meta.dtype == torch.float64
    assert spec.is_sharded() and spec.is_sharded(0) and not spec.is_replicated()
    assert spec.shape == (7, 5) and spec.ndim == 2
    assert spec == y.clone()._spec and hash(spec) == hash(y.clone()._spec)
    assert spec != y.redistribute(placements=[Shard(0), Replicate()])._spec
    assert repr(spec).startswith("ShardTensorSpec((7, 5) on Mesh(2x2")


@ranks(2)
def test_make_spec_refuses_sizes_that_do_not_fit(mesh):
    for placements, sizes, message in [
        ([Shard(0)], {1: [2, 3]}, "dim 1 is not sharded"),
        ([Shard(0)], {0: [2, 3]}, "4"),
        ([Shard(0)], {0: [1, 1, 2]}, "2"),
        ([Replicate()], [2, 2], "needs one sharded dim"),
        ([Shard(0)], {0: [-1, 5]}, "-1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_spec(mesh, (4, 5), placements, sizes)
    assert make_spec(mesh, (4, 5), [Shard(0)], [1, 3]).sizes() == {0: [1, 3]}
    assert make_spec(mesh, (4, 5), [Shard(-1)]).placements == (Shard(1),)


# ---- autograd ---------------------------------------------------------------


@ranks(2, 3)
def test_a_partial_result_is_reduced_when_it_is_looked_at(mesh):
    x = numbered(6, 2)
    total = shard(x, mesh, [Shard(0)]).sum()
    assert total.item() == x.sum().item()
    assert float(total) == x.sum().item()
    assert bool(total > 0)
    assert f"{total:.1f}" == f"{x.sum():.1f}"


@ranks(2, 3)
def test_results_gradients_and_hook_arguments_are_shard_tensors(mesh):
    seen = []
    x = shard(numbered(6, 2).requires_grad_(), mesh, [Shard(0)])
    assert x.is_leaf and x.requires_grad and x.grad is None
    y = x * 2
    y.retain_grad()
    y.register_hook(lambda grad: seen.append(type(grad)))
    handle = x.register_hook(lambda grad: grad * 10)
    assert y.grad_fn is not None and not y.is_leaf
    z = y.square().sum()
    z.backward()
    assert seen == [ShardTensor]
    assert type(y.grad) is ShardTensor and type(x.grad) is ShardTensor
    assert_close(y.grad, 4 * numbered(6, 2))
    assert_close(x.grad, 80 * numbered(6, 2))
    handle.remove()
    x.grad = x.detach() * 0 + 1
    assert_close(x.grad, torch.ones(6, 2, dtype=torch.float64))
    x.requires_grad_(False)
    assert not (x + 1).requires_grad
    (g,) = torch.autograd.grad((x.requires_grad_() ** 3).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    assert type(h) is ShardTensor
    assert_close(h, 6 * numbered(6, 2))


@ranks(2, 3)
def test_backward_takes_plain_and_sharded_gradients(mesh):
    weights = numbered(6, 2) + 1
    for give in (lambda _: weights, lambda y: from_spec(weights, y._spec)):
        x = shard(numbered(6, 2).requires_grad_(), mesh, [Shard(0)])
        y = x * 3
        y.backward(give(y))
        assert type(x.grad) is ShardTensor
        assert_close(x.grad, 3 * weights)
        for other in (weights.new_ones(()), weights[0], weights[:, :1], weights[None]):
            with pytest.raises(RuntimeError, match="Mismatch in shape: grad_output"):
                y.backward(other)


@ranks(1, 2, 3)
def test_plain_parameters_get_plain_complete_gradients(mesh):
    weight = torch.nn.Parameter(numbered(2, 4) / 10)
    x = numbered(6, 2)
    check_op(
        lambda a, w: (a @ w).square().mean(),
        sharded(x.requires_grad_(), [Shard(0)], {0: uneven(6, mesh.size())}),
        weight,
        mesh=mesh,
        second_order=True,
    )


def differing_specs():
    mesh = shardtensor.init_device_mesh(rig.DEVICE, (2,))
    shardtensor.set_check_mode(True)
    rank = dist.get_rank()
    y = shard(torch.zeros(4, 4), mesh, [Shard(0)], {0: [2, 2]})
    y.redistribute(sizes={0: [[1, 3], [3, 1]][rank]})


def test_check_mode_tells_every_rank_that_layouts_differ():
    outcomes = run_isolated(2, differing_specs, timeout=30)
    for outcome in outcomes:
        assert outcome.kind == "error", outcome
        assert "[1, 3]" in outcome.text and "[3, 1]" in outcome.text


LEAF_USES = {
    "linear": lambda x: torch.nn.functional.linear(x, torch.ones(2, 4)).sum(),
    "sum_of_rows": lambda x: (x.sum(0) ** 2).sum(),
    "row": lambda x: x[1].square().sum(),
    "transposed": lambda x: (x.t() @ x).sum(),
    "twice": lambda x: x.sum() + (x * x).mean(),
    "list": lambda x: torch.cat([x, x], 1).exp().sum(),
}


@ranks(1, 2, 3, 4, "2x2")
@pytest.mark.parametrize("name", LEAF_USES)
def test_the_gradient_of_a_leaf_lies_as_the_leaf(mesh, name):
    for placements, sizes in sweep(mesh, (5, 4)):
        whole = torch.rand(5, 4).requires_grad_()
        x = shard(whole.detach(), mesh, placements, sizes).requires_grad_()
        for _ in range(2):  # the second gradient is added to the first
            LEAF_USES[name](x).backward()
            LEAF_USES[name](whole).backward()
            assert x.grad._spec == x._spec
            assert x.grad.to_local().shape == x.to_local().shape
            assert_close(x.grad, whole.grad)
        (gradient,) = torch.autograd.grad(LEAF_USES[name](x), x, create_graph=True)
        assert gradient._spec == x._spec
        assert gradient.requires_grad == (name != "linear")


@ranks(2)
def test_hooks_that_come_after_forward_see_the_leafs_layout(mesh):
    seen = []
    x = shard(torch.randn(8, 6), mesh, [Shard(0)], {0: [5, 3]}).detach()
    w = shard(torch.randn(8, 6), mesh, [Shard(1)])
    x.requires_grad_()
    loss = (x + w).square().sum()
    handle = x.register_hook(lambda grad: seen.append(grad._spec))
    loss.backward(retain_graph=True)
    handle.remove()
    loss.backward()
    assert seen == [x._spec] and x.grad._spec == x._spec
    y = x * 2
    y.register_hook(lambda grad: seen.append(grad._spec))
    y.sum().backward()
    assert len(seen) == 2


@ranks(1)
def test_weak_references_keep_no_memory(mesh):
    s = shard(torch.randn(4, 3), mesh, [Shard(0)])
    piece = s.to_local()
    weak, weak_piece = torch._C._WeakTensorRef(s), torch._C._WeakTensorRef(piece)
    del s, piece
    assert weak.expired() and weak_piece.expired()


@ranks(2, 3, "2x2")
def test_data_and_its_views_see_each_others_writes(mesh):
    x = torch.arange(20.0).reshape(5, 4)
    views = {
        "diagonal": lambda t: t.diagonal(),
        "row": lambda t: t[2],
        "column": lambda t: t.unbind(1)[1],
        "slice of a row": lambda t: t[1:4][1],
        "merged": lambda t: t.t().flatten() if t.t().is_contiguous() else t.view(-1),
    }
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        for name, view in views.items():
            found = []
            for t in (x.clone(), shard(x, mesh, [placement] * mesh.ndim)):
                d = t.data
                v, w = view(d), view(t)
                t.add_(10)
                seen = v.clone(), w.clone()
                v.zero_()
                w += 1
                d.masked_fill_(d < 13, -1.0)
                found.append((*seen, v, w, t, d))
            for expected, result in zip(*found, strict=True):
                assert_close(result, expected, what=name)
