"""Neighbourhood attention against dense attention under NATTEN's mask."""

import itertools

import pytest
import rig
import torch
from layouts import ALL, placements_of
from neighborhood import dense
from ranks import assert_close, check_op, partitions, ranks, shard, sharded, uneven
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor import ShardTensor
from shardtensor.nn.functional import neighborhood_attention


def operands(*lengths, heads=2, features=4, values=None, dtype=torch.float64):
    shape = (2, *lengths, heads)
    return tuple(
        torch.randn(*shape, n, dtype=dtype, requires_grad=True)
        for n in (features, features, values or features)
    )


def parameters_of(length):
    """(kernel, dilation, stride, causal) that NATTEN takes for this length."""
    for kernel, dilation in itertools.product(range(2, length + 1), (1, 2, 3)):
        if kernel * dilation <= length:
            for stride in {1, 2, kernel // 2 + 1, kernel}:
                yield from ((kernel, dilation, stride, c) for c in (False, True))


def test_one_dim_by_the_definition():
    for length in (2, 5, 8, 11):
        q, k, v = operands(length, features=3, values=2)
        for parameters in parameters_of(length):
            x = neighborhood_attention(q, k, v, *parameters)
            assert_close(x, dense(q, k, v, *parameters), what=f"{length} {parameters}")


def gradients(fn, inputs, *parameters):
    out = fn(*inputs, *parameters)
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    first = torch.autograd.grad((out * weights).sum(), inputs, create_graph=True)
    second = torch.autograd.grad(
        sum((g * g).sum() for g in first), inputs, retain_graph=True
    )
    plain = torch.autograd.grad((out * weights).sum(), inputs)
    return out, *first, *second, *plain


def test_more_dims_and_gradients():
    for lengths, *parameters in (
        ((6,), 3),
        ((7,), 3, 2, 2, True),
        ((5, 6), (3, 2), (1, 3), (2, 1), (False, True)),
        ((4, 5), (4, 5)),
        ((3, 4, 5), 2, 1, 2),
        ((3, 4, 5), (3, 2, 2), (1, 2, 1), (1, 1, 2), (True, False, False)),
    ):
        x = operands(*lengths, features=18, values=17)
        expected = gradients(dense, x, *parameters)
        actual = gradients(neighborhood_attention, x, *parameters)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, what=f"{lengths} {parameters}")


def test_memory_dtypes_and_threads():
    """Rows of any strides, half precision, and threads that share heads or rows."""
    kinds = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
    threads = torch.get_num_threads()
    for dtype, tolerance in kinds.items():
        for heads, count in ((1, 1), (4, 3), (1, 3)):
            qkv = torch.randn(1, 6, 3, 5, heads, 20, dtype=dtype, requires_grad=True)
            strided = qkv.permute(0, 3, 1, 4, 2, 5)  # heads before the last three
            x = strided.unbind(-2)

            def both(fn, x=x, qkv=qkv):
                out = fn(*x, 3, (1, 2), 1, (False, True))
                out = out.float()
                return out, *torch.autograd.grad(out.square().sum(), qkv)

            expected = both(dense)
            torch.set_num_threads(count)
            try:
                actual = both(neighborhood_attention)
            finally:
                torch.set_num_threads(threads)
            for a, e in zip(actual, expected, strict=True):
                assert_close(a, e, rtol=tolerance, atol=20 * tolerance)


EXPANDED = (5, 1), (1, 6), (1, 1)
SUMMED = 1, 2, (1, 2), (0, 2), (2, 3), (2, 4)


def test_operands_and_gradients_that_are_expanded():
    """Rows at distance 0 from each other, along one dim or both."""
    for i, lengths in itertools.product(range(3), EXPANDED):
        x = list(operands(5, 6))
        x[i] = operands(*lengths)[i].expand(x[i].shape)
        assert_close(neighborhood_attention(*x, 3), dense(*x, (3, 3)))
    x = operands(5, 6)
    for dims in SUMMED:
        expected = torch.autograd.grad(dense(*x, (3, 3)).sum(dims).sin().sum(), x)
        out = neighborhood_attention(*x, 3)
        actual = torch.autograd.grad(out.sum(dims).sin().sum(), x)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, what=f"sum over {dims}")


def test_heads_that_serve_several():
    q, _, _ = operands(5, heads=6)
    _, k, v = operands(5, heads=2)
    expected = gradients(dense, (q, k, v), 3)
    actual = gradients(neighborhood_attention, (q, k, v), 3)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


# ---- sharded ----------------------------------------------------------------


def attention_of(*parameters, **options):
    """The function for ShardTensors, its definition for the oracle."""

    def attend(query, key, value):
        given = (query, key, value)
        ours = any(isinstance(x, ShardTensor) for x in given)
        return (neighborhood_attention if ours else dense)(
            *given, *parameters, **options
        )

    return attend


def check(mesh, fn, *inputs, **options):
    with shardtensor.fallback_mode("error"):
        return check_op(fn, *inputs, mesh=mesh, **options)


@ranks(*ALL)
def test_one_dim_cut_in_any_pieces(mesh):
    x = operands(7, values=3)
    for sizes in partitions(7, mesh.size()):
        parts = [sharded(t, placements_of(mesh, 1), {1: sizes}) for t in x]
        for parameters in ((3,), (2, 3, 1, True), (7,), (3, 2, 3, False)):
            out = check(mesh, attention_of(*parameters), *parts, second_order=True)
            assert list(out._spec.placements) == placements_of(mesh, 1)


@ranks(*ALL)
def test_two_dims_in_any_layout(mesh):
    x = operands(5, 6)
    attend = attention_of((3, 2), (1, 3), (2, 1), (False, True))
    layouts = [placements_of(mesh, dim) for dim in range(5)]
    layouts.append([Replicate()] * mesh.ndim)
    if mesh.ndim == 2:
        layouts += [placements_of(mesh, a, b) for a, b in ((1, 2), (2, 1), (3, 1))]
        layouts.append([Replicate(), Shard(2)])
    for placements in layouts:
        check(mesh, attend, *(sharded(t, placements) for t in x), second_order=True)
    if mesh.ndim == 2:
        for rows, columns in (([1, 4], [6, 0]), ([0, 5], [5, 1])):
            cut = placements_of(mesh, 1, 2), {1: rows, 2: columns}
            check(mesh, attend, *(sharded(t, *cut) for t in x), second_order=True)


@ranks(2, "2x2")
def test_means_over_one_of_two_dims(mesh):
    """Their gradients are expanded along it."""
    attend = attention_of(3)
    x = [sharded(t, placements_of(mesh, 1)) for t in operands(7, 6)]
    for dims in SUMMED:
        check(mesh, lambda *given, dims=dims: attend(*given).mean(dims), *x)


@ranks(3, "2x2")
def test_three_dims(mesh):
    x = operands(3, 4, 5, heads=1, features=2)
    attend = attention_of((2, 3, 2), (1, 1, 2), (1, 2, 1), (True, False, False))
    for dim in (1, 2, 3):
        cut = placements_of(mesh, dim, dim % 3 + 1)
        check(mesh, attend, *(sharded(t, cut) for t in x))


@ranks(1, 2, "2x2")
def test_values_alone_may_be_cut_along_features(mesh):
    q, k, v = operands(5, values=2)
    features = sharded(v, placements_of(mesh, 3))
    check_op(lambda *x: neighborhood_attention(*x, 3), q, k, features, mesh=mesh)


@ranks(2, 3)
def test_operands_that_lie_otherwise(mesh):
    q, k, v = operands(6)
    layouts = [[Replicate()], [Shard(0)], [Shard(1)], [Shard(2)], [Shard(3)]]
    for query, keys in itertools.product(layouts, layouts):
        x = sharded(q, query), sharded(k, keys), sharded(v, keys)
        out = check(mesh, attention_of(3), *x)
        if query != [Shard(3)]:
            assert list(out._spec.placements) == query
    rows = [Shard(1)]
    check(mesh, attention_of(3), q, sharded(k, rows, {1: uneven_rows(mesh)}), v)
    check(mesh, attention_of(3), sharded(q, rows), k, v)


def uneven_rows(mesh):
    return uneven(6, mesh.size())[::-1]


@ranks(2)
def test_heads_of_groups_that_are_cut(mesh):
    q, _, _ = operands(5, heads=6)
    _, k, v = operands(5, heads=2)
    for a, b in itertools.product((1, 2), repeat=2):
        x = sharded(q, [Shard(a)]), sharded(k, [Shard(b)]), sharded(v, [Shard(b)])
        check(mesh, attention_of(3), *x, second_order=True)


@ranks(2, 3)
def test_dtypes_and_autocast(mesh):
    kinds = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
    for dtype, tolerance in kinds.items():
        x = [sharded(t, [Shard(1)]) for t in operands(9, 4, dtype=dtype)]
        check(mesh, attention_of(3), *x, rtol=tolerance, atol=tolerance)

    def cast(*x):
        with rig.autocast(torch.bfloat16):
            return neighborhood_attention(*x, 3)

    x = [sharded(t, [Shard(1)]) for t in operands(9, dtype=torch.float32)]
    out = check(mesh, cast, *x, rtol=2e-2, atol=2e-2)
    assert out.dtype == torch.bfloat16


@ranks(2, 3)
def test_forward_mode(mesh):
    q, k, v = (t.detach() for t in operands(6))

    def push(q, k, v, tangent):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(k, tangent)
            out = attention_of(3)(q, dual, v)
            return torch.autograd.forward_ad.unpack_dual(out).tangent

    parts = [sharded(t, [Shard(1)]) for t in (q, k, v, torch.randn_like(k))]
    check(mesh, push, *parts)


@ranks(2)
def test_transforms_see_neighborhood_attention(mesh):
    shardtensor.set_fallback_mode("silent")
    whole = [t.detach() for t in operands(6)]
    parts = [shard(t, mesh, [Shard(1)]) for t in whole]

    def changes(attend, q, k, v):
        def total(*x):
            return attend(*x, 3).square().sum()

        def curvature(q):
            return torch.func.grad(total)(q, k, v).square().sum()

        _, tangent = torch.func.jvp(lambda k: attend(q, k, v, 3), (k,), (v,))
        out, pull = torch.func.vjp(lambda *x: attend(*x, 3), q, k, v)
        return (
            *torch.func.grad(total, (0, 1, 2))(q, k, v),
            torch.func.grad(curvature)(q),
            tangent,
            *pull(out),
        )

    for given in (whole, parts):
        ours = changes(neighborhood_attention, *given)
        for a, e in zip(ours, changes(dense, *whole), strict=True):
            assert_close(a, e)


# ---- messages, errors -------------------------------------------------------


def sent_by(fn):
    shardtensor.reset_comm_stats()
    fn()
    return shardtensor.comm_stats()


@ranks(3)
def test_keys_and_values_travel_together_and_once(mesh):
    whole = [x.detach() for x in operands(12, 4)]
    x = [shard(t, mesh, [Shard(1)]).requires_grad_() for t in whole]
    out = []
    stats = sent_by(lambda: out.append(neighborhood_attention(*x, (5, 3))))
    # Two rows from each neighbour, of 2 x 4 cells of 2 heads of 4 + 4 features.
    neighbours = 2 if mesh.get_local_rank() == 1 else 1
    assert stats.exchanges == 1
    assert stats.messages == neighbours
    assert stats.bytes == neighbours * 2 * (2 * 4 * 2 * 8) * 8
    backward = sent_by(lambda: out[0].sum().backward())
    assert (backward.exchanges, backward.messages) == (1, neighbours)
    for dim in (0, 3):
        x = [shard(t, mesh, [Shard(dim)]) for t in whole]
        assert sent_by(lambda: neighborhood_attention(*x, 3)).exchanges == 0  # noqa: B023


@ranks(3)
def test_large_pieces_are_met_while_rows_travel(mesh):
    """More numbers in a piece than others have, few of them to compute."""
    x = operands(15, heads=1, features=1 << 15)
    cuts = [*partitions(15, mesh.size(), repeated=False), uneven(15, mesh.size())]
    ways = [(3,), (2, 4, 1, True), (5, 2, 3), (7, 1, 7, True), (15,)]
    for sizes, parameters in zip(itertools.cycle(cuts), ways):
        parts = [sharded(t, [Shard(1)], {1: sizes}) for t in x]
        fn = lambda *x: neighborhood_attention(*x, *parameters)  # noqa: B023, E731
        check(mesh, fn, *parts, second_order=parameters == (3,))


@ranks(2)
def test_large_pieces_of_images_and_volumes(mesh):
    for lengths, *parameters in (
        ((9, 4), (5, 2), (1, 2), 1, (False, True)),
        ((5, 3, 2), 2, 1, 2),
    ):
        x = operands(*lengths, heads=1, features=1 << 14)
        parts = [sharded(t, [Shard(1)]) for t in x]
        check(mesh, lambda *x: neighborhood_attention(*x, *parameters), *parts)  # noqa: B023
    # One tensor of all three, half precision.
    qkv = torch.randn(1, 16, 3, 2, 1 << 15, dtype=torch.bfloat16, requires_grad=True)
    fn = lambda x: neighborhood_attention(*x.unbind(2), 3)  # noqa: E731
    check(mesh, fn, sharded(qkv, [Shard(1)]), rtol=2e-2, atol=2e-2)


@ranks(2)
def test_large_pieces_send_one_message(mesh):
    """One of each along other dims, and on a device."""
    whole = [torch.randn(1, 40, 64, 4, 64, requires_grad=True) for _ in range(3)]
    for dim, on_cpu in ((1, 1), (2, 2)):
        messages = on_cpu if rig.DEVICE == "cpu" else 2
        parts = [shard(x, mesh, [Shard(dim)]) for x in whole]
        out = []
        stats = sent_by(lambda: out.append(neighborhood_attention(*parts, 3)))  # noqa: B023
        assert (stats.exchanges, stats.messages) == (messages, messages)
        # One row of each.
        assert stats.bytes == 2 * whole[0].numel() // whole[0].shape[dim] * 4
        backward = sent_by(out[0].sum().backward)
        assert (backward.exchanges, backward.messages) == (messages, messages)


@ranks(2)
def test_rows_that_no_window_names_stay(mesh):
    whole = [x.detach() for x in operands(12)]
    x = [shard(t, mesh, [Shard(1)], {1: [10, 2]}) for t in whole]
    stats = sent_by(lambda: neighborhood_attention(*x, 2, 5))
    # Queries 10 and 11 see rows 5 and 10, 6 and 11; no query sees rows ahead.
    rows = 2 if mesh.get_local_rank() == 0 else 0
    assert stats.bytes == rows * (2 * 2 * 8) * 8


@ranks(1, 2)
@pytest.mark.parametrize(
    "parameters, message",
    [
        ((9,), "at most the domain's 8 rows, got 9 times 1"),
        ((3, 3), "at most the domain's 8 rows, got 3 times 3"),
        ((1,), "kernel_size of 2 or more, got 1"),
        ((3, 0), "dilation of 1 or more, got 0"),
        ((3, 1, 4), "stride from 1 to the kernel_size, 3, got 4"),
        (((3, 3),), "kernel_size of 1 or 1 values, got 2"),
        ((3, 1, 1, (True, False)), "is_causal of 1 or 1 values, got 2"),
        ((3.5,), "expected kernel_size of ints, got 3.5"),
        ((None,), "expected kernel_size of ints, got None"),
        ((3, (1.0,)), r"expected dilation of ints, got \(1.0,\)"),
        ((3, 1, 1, 1), "expected is_causal of bools, got 1"),
    ],
)
def test_parameters_out_of_range(mesh, parameters, message):
    whole = [x.detach() for x in operands(8)]
    for x in (whole, [shard(t, mesh, [Shard(1)]) for t in whole]):
        with pytest.raises(ValueError, match=message):
            neighborhood_attention(*x, *parameters)


def test_none_is_the_default():
    x = operands(8)
    assert_close(
        neighborhood_attention(*x, 3, None, None, None), neighborhood_attention(*x, 3)
    )


@ranks(1, 2)
def test_tensors_that_do_not_fit(mesh):
    q, k, v = (x.detach() for x in operands(8))
    for bad, message in (
        ((q, k[:, :7], v), "the same batch and dims"),
        ((q, k[..., :3], v), "the same features"),
        ((q, k, v[:, :, :1]), "key and value of the same heads"),
        ((q[:, :, :1], k, v), "heads of the query that those of the key divide"),
        ((q, k.float(), v), "one floating dtype"),
        ((q[0], k[0], v[0]), "4, 5 or 6 dims"),
    ):
        for x in (bad, [shard(t, mesh, [Shard(0)]) for t in bad]):
            with pytest.raises(ValueError, match=message):
                neighborhood_attention(*x, 3)


@ranks(4)
def test_operands_on_different_meshes_are_an_error(mesh):
    grid = init_device_mesh(mesh.device_type, (2, 2))
    q, k, v = (x.detach() for x in operands(8))
    query = shard(q, mesh, [Shard(1)])
    keys = [shard(x, grid, [Shard(1)] * 2) for x in (k, v)]
    message = "neighborhood_attention: expected all tensors on one mesh"
    with pytest.raises(ValueError, match=message):
        neighborhood_attention(query, *keys, 3)


def test_operators_pass_opcheck():
    q, k, v = operands(5, 4)
    ops = torch.ops.shardtensor
    torch.library.opcheck(ops.neighborhood_attention.default, (q, k, v, [3]))
    code = [5, 3, 1, 1, 0, 5, 4, 2, 1, -1, 0, 4]  # the second dim is causal
    torch.library.opcheck(ops._neighborhood_attention.default, (q, k, v, code, 0.5))
