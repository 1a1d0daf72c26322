"""Attention stays sharded: rows, heads and batches cut, any lengths."""

import dataclasses
import itertools

import pytest
import rig
import torch
import torch.nn.functional as F
from layouts import ALL, placements_of
from ranks import assert_close, check_op, partitions, ranks, shard, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import shardtensor

BATCH, HEADS, ROWS, FEATURES = 2, 3, 7, 4


def tensor(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def operands(rows=ROWS, keys=None, heads=HEADS, key_heads=None, features=FEATURES):
    keys, key_heads = keys or rows, key_heads or heads
    return (
        tensor(BATCH, heads, rows, FEATURES),
        tensor(BATCH, key_heads, keys, FEATURES),
        tensor(BATCH, key_heads, keys, features),
    )


def layouts(mesh):
    """Placements of one operand."""
    yield [Replicate()] * mesh.ndim
    for dim in (0, 1, 2):
        yield placements_of(mesh, dim)
    if mesh.ndim == 2:
        yield from ([Shard(2), Shard(1)], [Shard(0), Shard(2)], [Replicate(), Shard(2)])


def check(mesh, fn, *inputs, **options):
    with shardtensor.fallback_mode("error"):
        return check_op(fn, *inputs, mesh=mesh, **options)


def lies_as(output, query):
    return list(output._spec.placements) == list(query.placements)


def attend(query, key, value, mask=None, **options):
    """Whole tensors take the kernel that has a second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, mask, **options)


@ranks(*ALL)
def test_rows_of_any_lengths(mesh):
    q, k, v = operands()
    rows = placements_of(mesh, 2)
    for sizes in partitions(ROWS, mesh.size()):
        x = [sharded(t, rows, {2: sizes}) for t in (q, k, v)]
        out = check(mesh, attend, *x, second_order=True)
        assert lies_as(out, x[0])


@ranks(2, 3, "2x2")
def test_cross_attention_in_any_layouts(mesh):
    q, k, v = operands(rows=5, keys=ROWS, features=6)
    for query, keys in itertools.product(layouts(mesh), layouts(mesh)):
        x = sharded(q, query)
        out = check(mesh, attend, x, sharded(k, keys), sharded(v, keys))
        assert lies_as(out, x)
    check(mesh, attend, q, sharded(k, placements_of(mesh, 2)), v, second_order=True)


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("transport", ["ring", "all_gather", "all_to_all", "grid"])
def test_transports(mesh, transport):
    q, k, v = operands(rows=5, keys=ROWS)
    with shardtensor.attention_transport(transport):
        for sizes in partitions(ROWS, mesh.size()):
            keys = [sharded(x, placements_of(mesh, 2), {2: sizes}) for x in (k, v)]
            check(mesh, attend, sharded(q, placements_of(mesh, 2)), *keys)


@ranks("2x2x2")
def test_transports_on_three_axes(mesh):
    for cuts in ([Shard(2)] * 3, [Shard(2), Shard(0), Shard(2)]):
        x = [sharded(t, cuts) for t in operands(16)]
        for transport in ("ring", "all_to_all", "grid", "auto"):
            with shardtensor.attention_transport(transport):
                check(mesh, attend, *x)


@ranks(1, 2, 3, 4, "2x2")
@pytest.mark.parametrize("transport", ["ring", "all_gather", "all_to_all", "grid"])
def test_causal(mesh, transport):
    def causal(*x):
        return attend(*x, is_causal=True)

    with shardtensor.attention_transport(transport):
        for rows, keys in ((9, 9), (5, 8), (8, 5)):
            x = operands(rows, keys)
            for q, k in itertools.product((0, 1, 2), (1, 2)):
                layout = [placements_of(mesh, dim) for dim in (q, k, k)]
                check(mesh, causal, *map(sharded, x, layout))
        for sizes in partitions(9, mesh.size()):
            x = [sharded(t, placements_of(mesh, 2), {2: sizes}) for t in operands(9)]
            check(mesh, causal, *x, second_order=transport == "all_gather")


def masks():
    """Added masks, and bool ones, of every broadcast shape."""
    for shape in (
        (BATCH, HEADS, 5, ROWS),
        (5, ROWS),
        (1, HEADS, 5, ROWS),
        (BATCH, 1, 1, ROWS),
        (BATCH, 1, 5, 1),
    ):
        mask = torch.randn(shape, dtype=torch.float64)
        yield mask.requires_grad_()
        hidden = mask.detach().masked_fill(mask > 0.3, -torch.inf)
        if shape[-2] == 5:
            hidden[..., 2, :] = -torch.inf  # sees nothing
        yield hidden
        yield hidden > -torch.inf


@ranks(2, "2x2")
@pytest.mark.parametrize("transport", ["ring", "all_gather"])
def test_masks(mesh, transport):
    q, k, v = operands(5, ROWS)
    cuts = [(placements_of(mesh, 2), placements_of(mesh, 2))]
    cuts += [(placements_of(mesh, 1), placements_of(mesh, 2))]
    cuts += [([Replicate()] * mesh.ndim, placements_of(mesh, 2))]
    with shardtensor.attention_transport(transport):
        for mask, (rows, keys) in itertools.product(masks(), cuts):
            x = sharded(q, rows), sharded(k, keys), sharded(v, keys)
            check(mesh, attend, *x, mask)
            if mesh.ndim == 1:
                for dim in range(mask.dim()):
                    check(mesh, attend, *x, sharded(mask, placements_of(mesh, dim)))
    mask = next(masks())
    check(mesh, attend, *x, sharded(mask, placements_of(mesh, 3)), second_order=True)


@ranks(2)
def test_queries_that_see_nothing_have_second_derivatives(mesh):
    mask = torch.zeros(5, ROWS, dtype=torch.float64)
    mask[1] = -torch.inf
    x = [sharded(t, [Shard(2)]) for t in operands(5, ROWS)]
    for hidden in (mask, mask == 0):
        check(mesh, lambda *x: attend(*x, hidden), *x, second_order=True)  # noqa: B023


@ranks(2)
def test_a_mask_may_be_in_fp32(mesh):
    for dtype, features in itertools.product((torch.bfloat16, torch.float64), (4, 3)):
        mask = torch.randn(BATCH, 1, 5, ROWS) * 4
        mask[0, 0, 1], mask[0, 0, 2], mask[1, 0, :, 3] = -1e9, -torch.inf, -torch.inf
        x = [t.detach().to(dtype) for t in operands(5, ROWS, features=features)]
        x = [sharded(t.requires_grad_(), [Shard(2)]) for t in x]
        for learned in (False, True):
            given = mask.clone().requires_grad_(learned)
            out = check(mesh, attend, *x, given, rtol=2e-2, atol=2e-2)
            assert lies_as(out, x[0])
        mask[0, 0, 1] = 0  # in fp64 scores are seen next to -1e9
        q, k, v = (t.tensor.detach() for t in x)
        exact = attend(*(t.double() for t in (q, k, v)), mask.double())
        parts = [shard(t, mesh, [Shard(2)]) for t in (q, k, v)]
        assert_close(attend(*parts, mask).double(), exact, rtol=1e-2, atol=2e-3)


def masks_that_hide_by_numbers():
    """What public code adds where a query sees no key, for some queries all keys."""
    lowest = torch.finfo(torch.float32).min
    mask = torch.randn(5, ROWS)
    mask[0] = -1e9
    mask[1] = lowest
    mask[2, 2:] = -1e9
    mask[3] = torch.tensor([-torch.inf, lowest, -1e9, lowest, -1e9, -1e9, lowest])
    yield mask
    yield mask.clone().requires_grad_()
    yield torch.tensor([0, -1e9, lowest, 0, -1e9]).view(5, 1)
    yield torch.full((BATCH, 1, 1, ROWS), lowest).triu(2)


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("transport", ["ring", "all_gather", "all_to_all", "grid"])
@pytest.mark.parametrize("features", [FEATURES, 3])  # by a kernel, and by scores
def test_masks_that_hide_all_keys_by_numbers(mesh, transport, features):
    q, k, v = (x.detach().float() for x in operands(5, ROWS, features=features))
    for x in (q, k, v):
        x.requires_grad_()
    cuts = [(placements_of(mesh, 2), placements_of(mesh, 2))]
    cuts += [([Replicate()] * mesh.ndim, placements_of(mesh, 2))]
    with shardtensor.attention_transport(transport):
        for mask, (rows, keys) in itertools.product(masks_that_hide_by_numbers(), cuts):
            x = sharded(q, rows), sharded(k, keys), sharded(v, keys)
            check(mesh, attend, *x, mask, rtol=1e-4, atol=1e-5)
            half = [dataclasses.replace(t, tensor=in_half(t.tensor)) for t in x]
            check(mesh, attend, *half, in_half(mask), rtol=3e-2, atol=3e-2)


@ranks(2, 3)
def test_hidden_rows_keep_what_rounding_leaves_of_scores(mesh):
    """Next to -1e8 scores are multiples of 8, next to -1e9 of 64."""
    mask = torch.zeros(2, 1, 6, 6)
    for hidden, size in ((-1e8, 4.0), (-1e8, 40.0), (-1e9, 150.0), (-1e9, 1e3)):
        mask[:, :, 5] = hidden
        mask[0, :, 2] = hidden  # of one batch
        q, k, v = (torch.randn(2, 2, 6, 4) for _ in range(3))
        x = [t.requires_grad_() for t in (q * size, k, v)]
        for dim in (0, 1, 2):
            parts = [sharded(t, placements_of(mesh, dim)) for t in x]
            for seen in (5, 6):  # padding is in no loss, or is
                check(
                    mesh,
                    lambda *x: attend(*x, mask)[:, :, :seen],  # noqa: B023
                    *parts,
                    rtol=1e-4,
                    atol=1e-5 * size,
                )


def in_half(x):
    return x.detach().bfloat16().requires_grad_(x.requires_grad)


@ranks(2, 3, "2x2")
def test_groups_of_heads(mesh):
    x = operands(5, ROWS, heads=6, key_heads=2)
    for q, k in itertools.product((0, 1, 2), repeat=2):
        layout = [placements_of(mesh, dim) for dim in (q, k, k)]
        for causal in (False, True):
            check(
                mesh,
                lambda *x: attend(*x, is_causal=causal, enable_gqa=True),  # noqa: B023
                *map(sharded, x, layout),
                second_order=q == 2,
            )


@ranks("2x2")
def test_pieces_that_split_groups_of_heads(mesh):
    layout = [Shard(1), Shard(2)]
    for heads, key_heads, sizes in ((4, 1, None), (4, 2, {1: [1, 3]})):
        q, k, v = operands(5, ROWS, heads=heads, key_heads=key_heads)
        keys = [sharded(t, [Replicate(), Shard(2)]) for t in (k, v)]
        x = sharded(q, layout, sizes)
        for transport in ("auto", "ring", "all_gather", "all_to_all", "grid"):
            with shardtensor.attention_transport(transport):
                check(mesh, lambda *x: attend(*x, enable_gqa=True), x, *keys)


@ranks(2, "2x2")
def test_dims_and_scale(mesh):
    for shape in ((6, 4), (3, 6, 4), (2, 3, 2, 6, 4)):
        x = [tensor(*shape) for _ in range(3)]
        mask = torch.randn(6, 6, dtype=torch.float64)
        for dim in range(len(shape) - 1):
            parts = [sharded(t, placements_of(mesh, dim)) for t in x]
            check(mesh, lambda *x: attend(*x, scale=0.3), *parts)
            check(mesh, attend, *parts, mask)
            check(mesh, lambda *x: attend(*x, is_causal=True), *parts)
    x = tensor(1, 3, 6, 4), tensor(2, 1, 6, 4), tensor(2, 3, 6, 4)
    for dims in ((2, 2, 2), (1, 2, 0), (0, 0, 0), (2, 1, 2)):
        check(
            mesh, attend, *(sharded(t, placements_of(mesh, d)) for t, d in zip(x, dims))
        )


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(mesh, dtype):
    q, k, v = operands(64, 64, features=4)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for causal in (False, True):
        x = [
            sharded(t.detach().to(dtype).requires_grad_(), [Shard(2)])
            for t in (q, k, v)
        ]
        check(
            mesh,
            lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal),  # noqa: B023
            *x,
            rtol=tolerance,
            atol=tolerance,
        )


@ranks(2)
def test_autocast(mesh):
    x = [torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3)]

    def cast(*x):
        with rig.autocast(torch.bfloat16):
            return F.scaled_dot_product_attention(*x)

    out = check(mesh, cast, *(sharded(t, [Shard(2)]) for t in x), rtol=2e-2, atol=2e-2)
    assert out.dtype == torch.bfloat16


@ranks(2)
def test_nothing_of_the_square_is_held(mesh):
    x = [shard(torch.randn(1, 1, 2048, 8), mesh, [Shard(2)]) for _ in range(3)]
    for t in x:
        t.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        F.scaled_dot_product_attention(*x)
    assert max(saved) == 2048 * 8


@ranks(2, 3)
def test_forward_mode(mesh):
    q, k, v = (t.detach() for t in operands(5, ROWS))
    tangent = torch.randn_like(q)

    def push(q, k, v, tangent):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, tangent)
            out = attend(dual, k, v)
            return torch.autograd.forward_ad.unpack_dual(out).tangent

    rows = placements_of(mesh, 2)
    check(mesh, push, *(sharded(t, rows) for t in (q, k, v, tangent)))


@ranks(2)
def test_dropout_draws_the_numbers_of_one_device(mesh):
    q, k, v = operands()

    def dropped(*x):
        torch.manual_seed(3)
        return attend(*x, dropout_p=0.4)

    check_op(dropped, *(sharded(t, [Shard(2)]) for t in (q, k, v)), mesh=mesh)


def dropped_by_counter(kept, **options):
    """With the numbers that dropout draws for all weights."""

    def run(*x):
        if isinstance(x[0], shardtensor.ShardTensor):
            torch.manual_seed(3)
            return F.scaled_dot_product_attention(*x, dropout_p=0.4, **options)
        return by_hand(*x, kept, **options)

    return run


def by_hand(query, key, value, kept, attn_mask=None, is_causal=False, enable_gqa=False):
    if enable_gqa:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.mT * FEATURES**-0.5
    if attn_mask is not None:
        scores = scores + attn_mask
    if is_causal:
        sees = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~sees, float("-inf"))
    return (scores.softmax(-1) * kept) @ value


def kept_of(mesh, *shape):
    """What is left of weights of this shape, times its share."""
    torch.manual_seed(3)
    whole = shard(torch.ones(shape).double(), mesh, [Replicate()] * mesh.ndim)
    return F.dropout(whole, 0.4).full_tensor()


@ranks(2, "2x2")
def test_dropout_by_counter_of_other_dims(mesh):
    for shape in ((6, 4), (3, 6, 4), (2, 3, 2, 6, 4)):
        x = [tensor(*shape) for _ in range(3)]
        with shardtensor.random_policy("counter"):
            run = dropped_by_counter(kept_of(mesh, *shape[:-1], 6))
            for dim in range(len(shape) - 1):
                parts = [sharded(t, placements_of(mesh, dim)) for t in x]
                check(mesh, run, *parts)


@ranks(*ALL)
def test_dropout_by_counter_in_blocks(mesh):
    """The same numbers in any layout, by any transport and for any order of
    gradients, and nothing is gathered for them."""
    with shardtensor.random_policy("counter"):
        kept = kept_of(mesh, BATCH, HEADS, ROWS, ROWS + 2)
        assert 0 < (kept == 0).sum() < kept.numel()
        q, k, v = operands(keys=ROWS + 2)
        mask = torch.randn(ROWS, ROWS + 2, dtype=torch.float64, requires_grad=True)
        for query, keys in itertools.product(layouts(mesh), layouts(mesh)):
            x = [sharded(q, query), sharded(k, keys), sharded(v, keys)]
            check(mesh, dropped_by_counter(kept), *x)
        x = [sharded(t, placements_of(mesh, 2)) for t in (q, k, v)]
        check(mesh, dropped_by_counter(kept), *x, second_order=True)
        check(
            mesh, lambda *x: dropped_by_counter(kept, attn_mask=x[3])(*x[:3]), *x, mask
        )
        q, k, v = operands(key_heads=1)
        x = [sharded(t, placements_of(mesh, 2)) for t in (q, k, v)]
        kept = kept_of(mesh, BATCH, HEADS, ROWS, ROWS)
        run = dropped_by_counter(kept, is_causal=True, enable_gqa=True)
        for transport in ("ring", "all_gather", "all_to_all"):
            with shardtensor.attention_transport(transport):
                check(mesh, run, *x)


@ranks(3)
def test_long_blocks_go_in_tours_of_some_heads(mesh):
    """See Note [Tours of some heads]: these blocks make three."""
    rows, features = 2 * 65, 16384
    q = tensor(1, 6, rows, features)
    k, v = (tensor(1, 3, rows, features) for _ in range(2))
    x = [sharded(t, [Shard(2)], {2: [70, 0, 60]}) for t in (q, k, v)]
    mask = torch.randn(6, rows, rows, dtype=torch.float64)
    with shardtensor.attention_transport("ring"):
        shardtensor.reset_comm_stats()
        check(mesh, lambda *x: attend(*x, mask, enable_gqa=True), *x)
        # A rank without rows gives two terms back, tour by tour.
        assert shardtensor.comm_stats().messages >= 3 * 2


@ranks(2, 3)
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_sequences_that_divide_by_nothing(mesh, is_causal):
    """Where one device takes its flash kernel."""
    few = [1] * (mesh.size() - 1)
    near = {2: [4096, 4095], 3: [3336, 3336, 3335]}[mesh.size()]
    for sizes in (near, [*few, sum(near) - len(few)]):
        x = [tensor(1, 1, sum(sizes), 8) for _ in range(3)]
        check(
            mesh,
            lambda *x: F.scaled_dot_product_attention(*x, is_causal=is_causal),
            *[sharded(t, [Shard(2)], {2: sizes}) for t in x],
        )


@ranks("2x2")
def test_a_rank_without_batches_in_a_ring(mesh):
    q, k, v = (tensor(1, 1, ROWS, FEATURES) for _ in range(3))
    x = [sharded(t, [Shard(0), Shard(2)]) for t in (q, k, v)]
    with shardtensor.attention_transport("ring"):
        check(mesh, attend, *x)


@ranks(2)
@pytest.mark.parametrize(
    "shapes, options",
    [
        (((2, 3, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)), {}),
        (((2, 3, 5, 4), (2, 3, 5, 6), (2, 3, 5, 4)), {}),
        (((2, 3, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)), {"enable_gqa": True}),
        (((2, 3, 5, 4),) * 3, {"attn_mask": torch.zeros(4, 5)}),
        (((2, 3, 5, 4),) * 3, {"attn_mask": torch.zeros(5, 5, dtype=torch.int64)}),
        (((2, 3, 5, 4),) * 3, {"dropout_p": 1.5}),
        (
            ((1, 3, 5, 4), (1, 3, 5, 4), (3, 3, 5, 4)),
            {"attn_mask": torch.zeros(3, 1, 5, 5)},
        ),
        (((4, 5, 4),) * 3, {"attn_mask": torch.zeros(2, 4, 5, 5)}),
        (((5, 4),) * 3, {"enable_gqa": True}),
        (((2, 3, 5, 4),) * 3, {"attn_mask": torch.zeros(5, 5, dtype=torch.float64)}),
    ],
)
def test_errors_are_pytorchs(mesh, shapes, options):
    if mesh.device_type == "cuda" and "dropout_p" in options:
        pytest.skip("CUDA's kernels take it")
    x = [torch.randn(shape) for shape in shapes]
    with pytest.raises((RuntimeError, IndexError)) as expected:
        F.scaled_dot_product_attention(*x, **options)
    parts = [shard(t, mesh, [Shard(t.dim() - 2)]) for t in x]
    with pytest.raises(type(expected.value)):
        F.scaled_dot_product_attention(*parts, **options)


@ranks(2)
def test_a_mask_beside_is_causal(mesh):
    """PyTorch's kernel of the CPU takes both before 2.15, its math path never."""
    shardtensor.set_fallback_mode("silent")
    x, mask = [t.detach() for t in operands()], torch.randn(ROWS, ROWS).double()
    parts = [shard(t, mesh, [Shard(2)]) for t in x]
    both = {"attn_mask": mask, "is_causal": True}
    refused = pytest.raises(RuntimeError, match="attn_mask should not be set")
    try:
        expected = F.scaled_dot_product_attention(*x, **both)
    except RuntimeError:
        with refused:
            F.scaled_dot_product_attention(*parts, **both)
    else:
        assert_close(F.scaled_dot_product_attention(*parts, **both), expected)
    for given in (x, parts):
        with refused:
            attend(*given, mask, is_causal=True)


@ranks(4)
def test_operands_on_different_meshes_are_an_error(mesh):
    grid = init_device_mesh(mesh.device_type, (2, 2))
    message = "scaled_dot_product_attention: expected all tensors on one mesh"
    x = torch.randn(1, 2, 8, 4)
    mine, others = shard(x, mesh, [Shard(2)]), shard(x, grid, [Shard(2)] * 2)
    for q, k, v in ((mine, others, others), (mine, mine, others)):
        with pytest.raises(ValueError, match=message):
            F.scaled_dot_product_attention(q, k, v)
    mask = shard(torch.randn(8, 8), grid, [Shard(0)] * 2)
    with pytest.raises(ValueError, match=message):
        F.scaled_dot_product_attention(mine, mine, mine, mask)


@ranks(2, 3)
@pytest.mark.parametrize("lengths", [(7, 7), (5, 8), (3, 8)])
def test_causal_biases(mesh, lengths):
    q, k, v = operands(*lengths)
    rows = placements_of(mesh, 2)
    for bias in (causal_upper_left(*lengths), causal_lower_right(*lengths)):
        check(
            mesh,
            lambda *x: attend(*x, bias),  # noqa: B023
            *(sharded(t, rows) for t in (q, k, v)),
        )


@ranks(2)
def test_inference_mode(mesh):
    q, k, v = (x.detach() for x in operands())
    with torch.inference_mode():
        x = [shard(t, mesh, [Shard(2)]) for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*x)
        assert_close(out, attend(q, k, v))


@ranks(2)
def test_transforms_see_attention(mesh):
    q, k, v = (x.detach() for x in operands())

    def total(q, k, v):
        return attend(q, k, v).square().sum()

    whole = torch.func.grad(total, (0, 1, 2))(q, k, v)
    parts = [shard(t, mesh, [Shard(2)]) for t in (q, k, v)]
    for ours, one_device in zip(torch.func.grad(total, (0, 1, 2))(*parts), whole):
        assert_close(ours, one_device)


@ranks(2)
def test_a_changed_output_is_an_error(mesh):
    x = [shard(t, mesh, [Shard(2)]) for t in operands()]
    out = F.scaled_dot_product_attention(*x)
    assert_close(out, F.scaled_dot_product_attention(*(t.full_tensor() for t in x)))
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@ranks(2, 3)
def test_scores_that_overflow_are_no_numbers(mesh):
    """As softmax has it; PyTorch's kernel says 0 of some blocks of keys."""
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    q, k = q * 1e200, k * 1e200
    with shardtensor.attention_transport("ring"):
        parts = (shard(x, mesh, [Shard(2)]) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*parts)
    assert_close(out, (q @ k.mT).softmax(-1) @ v)


@ranks(2)
def test_the_choice_and_bad_names(mesh):
    assert shardtensor.get_attention_transport() == "auto"
    with pytest.raises(ValueError, match="expected 'auto', 'ring'.*got 'pigeon'"):
        shardtensor.set_attention_transport("pigeon")
    x = [shard(torch.randn(1, 2, 64, 4), mesh, [Shard(2)]) for _ in range(3)]

    def exchanges(transport, **options):
        shardtensor.reset_comm_stats()
        with shardtensor.attention_transport(transport):
            F.scaled_dot_product_attention(*x, **options)
        return shardtensor.comm_stats().exchanges

    # The block of keys; query, key, value and output.
    assert exchanges("ring") == exchanges("all_gather") == 1
    assert exchanges("all_to_all") == 4
    assert exchanges("ring", is_causal=True) == 5 + 1
