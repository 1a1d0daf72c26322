"""The attention kernels of a device, which PyTorch chooses: `make test-device`."""

import math
import sys
from types import ModuleType

import neighborhood
import pytest
import rig
import torch
import torch.nn.functional as F
from ranks import assert_close, ranks, run_isolated, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.nn.functional import neighborhood_attention
from shardtensor.nn.natten import use_natten_kernels

pytestmark = pytest.mark.skipif(
    rig.DEVICE != "guarded", reason="for the guarded device: make test-device"
)
KERNELS = ("flash", "efficient", "cudnn")


def by_hand(query, key, value, mask=None, is_causal=False, enable_gqa=False):
    if enable_gqa:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    elif mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if is_causal:
        sees = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~sees, float("-inf"))
    sees_nothing = scores.detach().isneginf().all(-1, True)
    weights = scores.masked_fill(sees_nothing, 0).softmax(-1)  # no NaN in backward
    return weights.masked_fill(sees_nothing, 0) @ value


def operands(heads=6, key_heads=6, rows=11, keys=11, features=8, values=8):
    return [
        torch.randn(2, heads, rows, features, requires_grad=True),
        torch.randn(2, key_heads, keys, features, requires_grad=True),
        torch.randn(2, key_heads, keys, values, requires_grad=True),
    ]


def check(mesh, kernel, inputs, mask=None, transport="ring", **options):
    """Returns the kernels that this rank's blocks took."""
    from guarded import attention

    shards = [
        shard(x, mesh, [Shard(2)], {2: sizes_of(x.shape[2], mesh.size())})
        for x in inputs
    ]
    with attention.taken(kernel) as calls, shardtensor.attention_transport(transport):
        out = F.scaled_dot_product_attention(*shards, mask, **options)
        grads = torch.autograd.grad(out.square().sum(), shards)
        calls = set(calls)
    expected = by_hand(*inputs, mask, **options)
    assert_close(out, expected)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for grad, one_device in zip(grads, wanted, strict=True):
        assert_close(grad, one_device)
    return calls


def sizes_of(rows, pieces):
    """Uneven ones."""
    first = max(1, rows // pieces - 1)
    return [first] * (pieces - 1) + [rows - first * (pieces - 1)]


@ranks(2, 3)
@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_take_the_kernel_that_pytorch_chooses(mesh, kernel):
    both = {kernel, f"{kernel}_backward"}
    for transport in ("ring", "all_gather", "all_to_all"):
        assert check(mesh, kernel, operands(), transport=transport) == both
    assert check(mesh, kernel, operands(rows=7, keys=40)) == both
    # Flash has no head of other sizes than multiples of 8: padded.
    assert check(mesh, kernel, operands(features=6, values=6)) == both
    assert check(mesh, kernel, operands(key_heads=2), enable_gqa=True) == both
    assert both <= check(mesh, kernel, operands(), is_causal=True)


@ranks(2)
@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_masks(mesh, kernel):
    added = torch.randn(11, 11)
    added[3] = float("-inf")  # sees no key
    sees = torch.rand(2, 1, 11, 11) > 0.5
    sees[0, 0, 5] = False
    of_keys = torch.rand(2, 1, 1, 11) > 0.5
    of_rows = torch.rand(11, 1) > 0.3
    hidden = torch.randn(11, 11)
    hidden[3], hidden[5] = -1e9, torch.finfo(torch.float32).min
    for mask in (added, sees, of_keys, of_rows, hidden):
        calls = check(mesh, kernel, operands(), mask)
        assert calls == {kernel, f"{kernel}_backward"}


@ranks(2, 3)
@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_whose_scores_are_all_minus_infinity_weigh_nothing(mesh, kernel):
    """Kernels say 0 or infinity of them, where other blocks have a score."""
    for rows in (slice(0, 4), slice(4, 7), slice(7, 11)):
        q, k, v = (x.detach() for x in operands(heads=2, key_heads=2))
        q.abs_()
        k[:, :, rows] = -3e38  # scores overflow
        q[:, :, 5] = 0  # these don't
        for transport in ("ring", "all_gather", "all_to_all"):
            check_values(mesh, kernel, q, k, v, transport)
        if rows.start > 0:  # else first rows see nothing
            check_values(mesh, kernel, q, k, v, "ring", is_causal=True)
    # Logarithms and outputs of 0 that are no such block's.
    q, k, v = (x.detach() for x in operands())
    v[:, :, 1:] = 0
    for keys in (k, k[:, :, : mesh.size()]):
        check_values(mesh, kernel, torch.zeros_like(q), keys, v[:, :, : keys.shape[2]])


def check_values(mesh, kernel, query, key, value, transport="ring", **options):
    """The output, and the gradient of the values: others are noise of large keys."""
    from guarded import attention

    value.requires_grad_()
    q, k, v = (
        shard(x, mesh, [Shard(2)], {2: sizes_of(x.shape[2], mesh.size())})
        for x in (query, key, value)
    )
    with attention.taken(kernel), shardtensor.attention_transport(transport):
        out = F.scaled_dot_product_attention(q, k, v, **options)
        (grad,) = torch.autograd.grad(out.square().sum(), v)
    expected = by_hand(query, key, value, **options)
    assert_close(out, expected)
    (wanted,) = torch.autograd.grad(expected.square().sum(), value)
    assert_close(grad, wanted)


@ranks(2, 3)
@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, float("-inf")])
def test_blocks_of_padding_weigh_nothing(mesh, kernel, lowest):
    padding = torch.zeros(11, 11)
    padding[:, 4:] = lowest
    both = {kernel, f"{kernel}_backward"}
    assert check(mesh, kernel, operands(), padding) == both
    padding[:, :4], padding[:, 4:] = lowest, 0
    assert check(mesh, kernel, operands(), padding) == both


@ranks(2)
def test_what_no_kernel_takes_is_computed_from_scores(mesh):
    assert not check(mesh, "math", operands())
    assert not check(mesh, "flash", operands(), torch.rand(11, 11) > 0.5)
    assert not check(mesh, "flash", operands(values=16))
    assert not check(mesh, "math", operands(), torch.full((11, 1), -1e9))


@ranks(2)
def test_a_mask_that_learns_takes_the_kernel_forward_alone(mesh):
    from guarded import attention

    inputs, mask = operands(), torch.randn(11, 11, requires_grad=True)
    shards = [shard(x, mesh, [Shard(2)]) for x in inputs]
    with attention.taken("efficient") as calls:
        out = F.scaled_dot_product_attention(*shards, mask)
        grad = torch.autograd.grad(out.square().sum(), mask)
        assert set(calls) == {"efficient"}
    assert_close(
        grad[0], torch.autograd.grad(by_hand(*inputs, mask).square().sum(), mask)[0]
    )


# ---- neighbourhoods ---------------------------------------------------------


def copies_of_a_second_step(x, *parameters):
    import guarded

    def step():
        out = neighborhood_attention(*x, *parameters)
        torch.autograd.grad(out.square().sum(), x)

    step()
    before = guarded.count()
    step()
    return guarded.copies_since(before)


@ranks(1, 2)
def test_windows_are_copied_to_the_device_once(mesh):
    for lengths, *parameters in PIECES:
        x = [torch.randn(1, *lengths, 2, 4) for _ in range(3)]
        plain = [t.requires_grad_() for t in x]
        shards = [sharded_leaf(t, mesh, len(lengths)) for t in x]
        # Messages of the guarded device pass the host.
        for given in [plain] + ([shards] if mesh.size() == 1 else []):
            copies = copies_of_a_second_step(given, *parameters)
            assert copies == {"to_host": 0, "to_device": 0}


@ranks(1)
def test_windows_are_copied_once(mesh):
    """Products take the keys of windows as they lie."""
    x = [torch.randn(2, 9, 7, 3, 4, requires_grad=True) for _ in range(3)]
    with torch.profiler.profile(record_shapes=True) as profile:
        out = neighborhood_attention(*x, 3)
        torch.autograd.grad(out.square().sum(), x)
    copied = [
        math.prod(event.input_shapes[0])
        for event in profile.events()
        if event.name == "aten::clone"
    ]
    assert max(copied) < 9 * x[0].numel()


# ---- NATTEN's ---------------------------------------------------------------


def natten():
    """Stands for the package: knows whole domains, of no 5 features."""
    calls = []

    def generic(q, k, v, kernel, stride, dilation, causal, scale, return_lse):
        assert q.shape == k.shape == v.shape and return_lse
        if q.shape[-1] == 5:
            raise NotImplementedError
        calls.append(q.shape)
        out = neighborhood.dense(q, k, v, kernel, dilation, stride, causal, scale)
        return out, out[..., 0]

    functional = ModuleType("natten.functional")
    functional.neighborhood_attention_generic = generic
    sys.modules |= {"natten": ModuleType("natten"), "natten.functional": functional}
    return calls


PIECES = [
    ((9,), 3, 1, 1, False),
    ((13,), 3, 2, 2, False),
    ((13,), 2, 2, 1, True),
    ((9, 7), (3, 2), (1, 3), (2, 1), (False, True)),
    ((11, 4, 3), (4, 2, 2), 1, (3, 1, 2), False),
]


def attend_by_natten(shape):
    mesh = init_device_mesh(rig.DEVICE, shape)
    calls, taken = natten(), 0
    use_natten_kernels("PrivateUse1")
    for lengths, *parameters in PIECES:
        for features in (4, 5):
            x = [torch.randn(1, *lengths, 2, features) for _ in range(3)]
            wholes = [t.requires_grad_() for t in x]
            shards = [sharded_leaf(t, mesh, len(lengths)) for t in x]
            if features == 5:
                copies = copies_of_a_second_step(wholes, *parameters)
                assert copies == {"to_host": 0, "to_device": 0}
            calls.clear()
            out = neighborhood_attention(*shards, *parameters)
            grads = torch.autograd.grad(out.square().sum(), shards)
            # Forward and backward; a piece may be smaller than a window.
            assert len(calls) == 2 or not calls
            assert not (calls and features == 5)
            taken += len(calls) == 2
            expected = neighborhood.dense(*wholes, *parameters)
            wanted = torch.autograd.grad(expected.square().sum(), wholes)
            for actual, one_device in zip((out, *grads), (expected, *wanted)):
                assert_close(actual, one_device)
    assert taken >= len(PIECES) - 1


def sharded_leaf(x, mesh, dims):
    """Cut along the first dim, on a grid the second, too."""
    cut = [Shard(1 + min(axis, dims - 1)) for axis in range(mesh.ndim)]
    sizes = {1: sizes_of(x.shape[1], mesh.size())} if mesh.ndim == 1 else None
    return shard(x.detach(), mesh, cut, sizes).requires_grad_()


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_pieces_of_a_neighbourhood_become_domains_of_nattens(shape):
    for outcome in run_isolated(math.prod(shape), attend_by_natten, shape):
        assert outcome.kind == "ok", outcome.text
