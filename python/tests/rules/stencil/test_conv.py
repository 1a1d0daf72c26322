"""Convolutions: any window, any cut, any number of dims sharded."""

import copy
import itertools

import pytest
import rig
import torch
import torch.nn.functional as F
from ranks import assert_close, check_op, partitions, ranks, shard, sharded, uneven
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor import ShardTensor

CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def leaf(*sizes):
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_conv1d_sweeps_windows_and_cuts(mesh, kernel, stride):
    w, b = leaf(3, 2, kernel), leaf(3)
    cuts = partitions(9, mesh.size())
    for padding, dilation in itertools.product([0, 1, 2], [1, 2]):
        for sizes in cuts:
            check_op(
                F.conv1d,
                sharded(leaf(2, 2, 9), [Shard(2)], {2: sizes}),
                *(w, b, stride, padding, dilation),
                mesh=mesh,
                second_order=sizes == cuts[-1],
            )


@ranks(2, 3)
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_conv_transpose1d_sweeps_windows_and_cuts(mesh, kernel, stride):
    w, b = leaf(2, 3, kernel), leaf(3)
    cuts = partitions(6, mesh.size())
    for padding, more, dilation in [(0, 0, 1), (1, 0, 1), (0, 1, 2), (1, 1, 2)]:
        if more >= max(stride, dilation):
            continue
        for sizes in cuts:
            check_op(
                F.conv_transpose1d,
                sharded(leaf(2, 2, 6), [Shard(2)], {2: sizes}),
                *(w, b, stride, padding, more, 1, dilation),
                mesh=mesh,
                second_order=sizes == cuts[-1],
            )


@ranks(2, 4, "2x2")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_dim_can_be_sharded(mesh, dims, transposed):
    extents = [6, 5, 7][:dims]
    conv = (TRANSPOSED if transposed else CONVS)[dims]
    weight = (4, 4, 3, 2, 3)[: dims + 2]
    first, second = 2, dims + 1
    layouts = {1: [[Shard(0)], [Shard(1)], [Shard(2)], [Shard(second)]]}
    layouts[2] = [
        [Shard(first), Shard(second)],
        [Shard(second), Shard(first)],
        [Shard(0), Shard(first)],
        [Shard(1), Shard(first)],
        [Shard(first), Replicate()],
        [Replicate(), Replicate()],
    ]
    for placements in layouts[mesh.ndim]:
        check_op(
            lambda x, w, b: conv(x, w, b, stride=2, padding=1),
            sharded(leaf(3, 4, *extents), placements),
            leaf(*weight),
            leaf(4),
            mesh=mesh,
        )


@ranks(1, 2, "2x2")
@pytest.mark.parametrize("channels", [(1, 4), (8, 2), (24, 2)])
def test_volumes_in_single_precision(mesh, channels):
    """Large enough for oneDNN, with few channels and with many."""
    inputs, outputs = channels
    placements = [[Shard(2), Shard(3)], [Shard(4), Shard(2)]]
    for stride, cuts in itertools.product([1, 2], placements):
        if (inputs, stride) == (24, 2):
            continue
        check_op(
            lambda x, w, b, stride=stride: F.conv3d(x, w, b, stride, padding=1),
            sharded(
                torch.randn(
                    1, inputs, 37, 36, 71 if inputs == 1 else 35
                ).requires_grad_(),
                cuts[: mesh.ndim],
            ),
            torch.randn(outputs, inputs, 3, 3, 3).requires_grad_(),
            torch.randn(outputs).requires_grad_(),
            mesh=mesh,
            second_order=inputs == 8,
            rtol=1e-3,
            atol=1e-2,
        )


@ranks(2, 3)
def test_a_kernel_of_one_leaves_merged_dims_as_they_are_cut(mesh):
    def merged(x, w, b):
        return F.conv1d(x.reshape(2, 2, -1), w, b)

    def beside_windows(x, w, b):
        return F.conv2d(x.reshape(2, 2, -1, 5), w[..., None].repeat(1, 1, 1, 3), b)

    def transposed(x, w, b):
        return F.conv_transpose1d(x.reshape(2, 2, -1), w.transpose(0, 1), b)

    x, w, b = leaf(2, 2, 13, 15), leaf(4, 2, 1), leaf(4)
    for sizes in partitions(15, mesh.size(), repeated=False):
        cut = [Shard(3)], {3: sizes}
        for fn in (merged, transposed):
            y = check_op(fn, sharded(x, *cut), w, b, mesh=mesh, second_order=True)
        images = leaf(2, 2, 3, 15, 5)
        check_op(beside_windows, sharded(images, *cut), w, b, mesh=mesh)
        if 0 not in sizes:
            part = shard(x.detach(), mesh, *cut)
            shardtensor.reset_comm_stats()
            y = merged(part, w.detach(), b.detach())
            assert y.view(2, 4, 13, 15)._spec.sizes() == {3: sizes}
            assert shardtensor.comm_stats().exchanges == 0


@ranks("2x2")
def test_a_kernel_of_one_beside_windows_that_gather(mesh):
    def fn(x, w):
        return F.conv2d(x.reshape(2, 2, -1, 6), w, padding=(0, 1))

    x, w = leaf(2, 2, 3, 5, 6), leaf(4, 2, 1, 3)
    for sizes in ({3: [2, 3]}, {3: [4, 1], 4: [1, 5]}):
        part = sharded(x, [Shard(3), Shard(4)], sizes)
        y = check_op(fn, part, w, mesh=mesh, second_order=True)
        assert y.view(2, 4, 3, 5, 6)._spec.sizes()[3] == sizes[3]


@ranks(3)
def test_volumes_with_groups_and_dilation(mesh):
    x = torch.randn(1, 4, 37, 30, 35).requires_grad_()
    for sizes in ([20, 0, 17], [5, 16, 16]):
        check_op(
            lambda x, w: F.conv3d(x, w, None, 1, padding=2, dilation=2, groups=2),
            sharded(x, [Shard(2)], {2: sizes}),
            torch.randn(4, 2, 3, 3, 3).requires_grad_(),
            mesh=mesh,
            rtol=1e-3,
            atol=1e-2,
        )


@ranks(2)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_groups_no_bias_no_batch(mesh, dims):
    x = leaf(4, *[6, 5, 7][:dims])
    w = leaf(8, 1, *[3, 3, 3][:dims])
    check_op(
        lambda x, w: CONVS[dims](x, w, padding=1, groups=4),
        sharded(x, [Shard(1)]),
        w,
        mesh=mesh,
        second_order=True,
    )
    w = leaf(4, 2, *[3, 3, 3][:dims])
    check_op(
        lambda x, w: TRANSPOSED[dims](x, w, stride=2, padding=1, groups=2),
        sharded(x, [Shard(dims)]),
        w,
        mesh=mesh,
        second_order=True,
    )


@ranks(2)
def test_no_channels(mesh):
    x, w = torch.randn(2, 0, 6), torch.randn(3, 0, 1)
    expected = F.conv1d(x, w)
    for placement in (Shard(0), Shard(2), Replicate()):
        assert_close(F.conv1d(shard(x, mesh, [placement]), w), expected)


@ranks(2, 3)
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_padding_by_name(mesh, kernel):
    for padding, dilation in itertools.product(["same", "valid"], [1, 2]):
        for placements in [[Shard(2)], [Shard(3)], [Shard(0)]]:
            check_op(
                F.conv2d,
                sharded(leaf(2, 2, 9, 8), placements),
                leaf(3, 2, kernel, kernel),
                *(None, 1, padding, dilation),
                mesh=mesh,
            )


@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_padding_modes_of_the_modules(mesh, mode):
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 5, padding=2, padding_mode=mode).double()
    for sizes in partitions(7, mesh.size()):
        check_op(
            conv,
            sharded(leaf(1, 2, 7, 6), [Shard(2)], {2: sizes}),
            mesh=mesh,
            second_order=True,
        )


@ranks(2, 4)
def test_keeps_the_partition_and_meets_it_again(mesh):
    cuts = [4, 8, 0, 4] if mesh.size() == 4 else [12, 4]
    x = shard(torch.randn(1, 2, 16), mesh, [Shard(2)], {2: cuts})
    same = F.conv1d(x, torch.randn(2, 2, 5), padding=2)
    assert list(same._spec.partition(2).sizes) == cuts
    down = F.conv1d(same, torch.randn(2, 2, 3), stride=2, padding=1)
    assert list(down._spec.partition(2).sizes) == [c // 2 for c in cuts]
    up = F.conv_transpose1d(down, torch.randn(2, 2, 2), stride=2)
    assert list(up._spec.partition(2).sizes) == cuts


@ranks(2)
def test_channels_last_survives(mesh):
    conv = nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 6).to(memory_format=torch.channels_last)
    expected = conv(x)
    local = shard(x, mesh, [Shard(2)])
    local = local.contiguous(memory_format=torch.channels_last)
    y = conv(local)
    assert_close(y, expected)
    assert y.to_local().is_contiguous(memory_format=torch.channels_last)


@ranks(2)
def test_autocast_casts_before_rows_travel(mesh):
    import shardtensor

    conv = nn.Conv2d(4, 4, 3, padding=1)
    x = torch.randn(1, 4, 8, 6)
    with rig.autocast(torch.bfloat16):
        expected = conv(x)
        shardtensor.reset_comm_stats()
        y = conv(shard(x, mesh, [Shard(2)]))
    assert y.dtype == torch.bfloat16
    assert shardtensor.comm_stats().bytes == 4 * 6 * 2  # one row of bf16
    assert_close(y, expected)
    y.float().sum().backward()
    assert conv.weight.grad.dtype == torch.float32


@ranks(2)
def test_sends_one_message_per_neighbour(mesh):
    import shardtensor

    x = shard(torch.randn(1, 2, 8, 6), mesh, [Shard(2)])
    w = torch.randn(2, 2, 3, 3)
    shardtensor.reset_comm_stats()
    F.conv2d(x, w, padding=1)
    stats = shardtensor.comm_stats()
    assert (stats.messages, stats.bytes) == (1, 2 * 6 * 4)
    shardtensor.reset_comm_stats()
    F.conv2d(x, torch.randn(2, 2, 2, 2), stride=2)  # cuts are even
    F.conv2d(x, torch.randn(2, 2, 1, 1))
    assert shardtensor.comm_stats().messages == 0


# ---- rows that are not joined -----------------------------------------------

HALVES = [torch.bfloat16, torch.float16]


def kept_by(conv, x):
    """The plain tensors that backward keeps."""
    kept = []

    def pack(tensor):
        if not isinstance(tensor, ShardTensor):
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        conv(x)
    return kept


def joins_rows(conv, x):
    """Whether backward keeps more rows than this rank's."""
    return any(t.numel() > x.to_local().numel() for t in kept_by(conv, x))


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_keeps_no_copy_that_joins_the_rows(mesh, dtype):
    """Backward keeps the owned rows themselves and the neighbours' apart."""
    import shardtensor

    x = shard(torch.randn(1, 4, 24, 8, dtype=dtype), mesh, [Shard(2)]).requires_grad_()
    local = x.to_local()
    with shardtensor.conv_overlap_bytes(0):
        kept = kept_by(nn.Conv2d(4, 4, 3, padding=1).to(dtype), x)
    whole = [t for t in kept if t.numel() >= local.numel()]
    assert whole and all(t.data_ptr() == local.data_ptr() for t in whole)


@ranks(2)
def test_autocast_joins_no_rows(mesh):
    import shardtensor

    x = shard(torch.randn(1, 4, 24, 8), mesh, [Shard(2)]).requires_grad_()
    autocast = torch.autocast(x.device.type, torch.bfloat16)
    with autocast, shardtensor.conv_overlap_bytes(0):
        assert not joins_rows(nn.Conv2d(4, 4, 3, padding=1), x)


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(mesh, dtype, autocast):
    import shardtensor

    if autocast and mesh.device_type == "cpu":
        dtype = torch.bfloat16  # the CPU's autocast knows no other
    x = torch.randn(2, 4, 11, 6, dtype=torch.float32 if autocast else dtype)
    one_dim = [([Shard(2)], {2: rows}) for rows in partitions(11, mesh.size())]
    two_dims = [([Shard(2), Shard(3)], None), ([Shard(0), Shard(2)], None)]
    for make, last in itertools.product(HALF_CONVS, [False, True]):
        conv = HALF_CONVS[make]().to(x.dtype)
        form = torch.channels_last if last else torch.contiguous_format
        for placements, sizes in two_dims if mesh.ndim == 2 else one_dim:
            own = shard(x, mesh, placements, sizes).contiguous(memory_format=form)
            with shardtensor.conv_overlap_bytes(0):
                check_half(conv, x, own.detach().requires_grad_(), dtype)


HALF_CONVS = {
    "same": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "strided": lambda: nn.Conv2d(4, 6, 5, stride=2, padding=2, groups=2, bias=False),
}


def check_half(conv, x, own, dtype):
    """Values and gradients are those of fp64 but for a few roundings."""
    exact = copy.deepcopy(conv).double()
    x = x.double().requires_grad_()
    expected = exact(x)
    seed = torch.randn(expected.shape, dtype=dtype)
    expected.backward(seed.double())
    conv.zero_grad()
    with torch.autocast(x.device.type, dtype, enabled=own.dtype != dtype):
        y = conv(own)
    assert y.dtype == dtype
    y.backward(shard(seed, own.device_mesh, [Replicate()] * own.device_mesh.ndim))
    pairs = [(y, expected), (own.grad, x.grad)]
    weights = zip(conv.parameters(), exact.parameters(), strict=True)
    for actual, whole in [*pairs, *((own.grad, all.grad) for own, all in weights)]:
        error = 4 * torch.finfo(dtype).eps * whole.abs().max().item()
        assert_close(actual.double(), whole, rtol=0, atol=error)


LONE_COLUMNS = {
    "image": (lambda: nn.Conv2d(16, 16, 3, stride=2, padding=1), (1, 16, 9), 2),
    "volume": (lambda: nn.Conv3d(8, 16, 3, stride=2, padding=1), (2, 8, 10, 6), 2),
    "transposed": (
        lambda: nn.ConvTranspose3d(8, 16, 3, 2, 1, output_padding=1), (2, 8, 4, 6), 1,
    ),
}  # fmt: skip


@ranks(2, 3, "2x2")
@pytest.mark.parametrize("name", LONE_COLUMNS)
def test_pieces_of_one_column_in_half_precision(mesh, name):
    """Of which oneDNN leaves parts unwritten on CPUs with AMX."""
    import shardtensor

    make, sizes, columns = LONE_COLUMNS[name]
    conv = make().bfloat16()
    pieces, last = mesh.size(-1), len(sizes)
    cut = [Shard(last - 1), Shard(last)][-mesh.ndim :]
    x = torch.randn(*sizes, columns * pieces).bfloat16()
    own = [columns] * pieces
    empty = [0, 2 * columns, *own[2:]]
    for overlap, widths in itertools.product((0, None), (own, empty)):
        junk = [torch.full((n,), 1e30) for n in (50, 100, 500, 1000, 3000, 10000)]
        del junk
        part = shard(x, mesh, cut, {last: widths}).requires_grad_()
        with shardtensor.conv_overlap_bytes(overlap):
            check_half(conv, x, part, torch.bfloat16)


@ranks(2)
def test_what_the_device_and_the_dtype_ask_for(mesh):
    import shardtensor

    conv, mebi = nn.Conv1d(64, 1, 3, padding=1), 2**20
    asked = {torch.float32: 0, torch.bfloat16: 2 * mebi}
    if mesh.device_type != "cpu":
        asked = dict.fromkeys(asked, 32 * mebi)
    for dtype, bytes in asked.items():
        pieces = mesh.size() * bytes // dtype.itemsize // 64
        large = torch.zeros(1, 64, pieces or 16, dtype=dtype)
        with shardtensor.conv_overlap_bytes(None):
            x = shard(large, mesh, [Shard(2)]).requires_grad_()
            assert not joins_rows(conv.to(dtype), x)
            x = shard(large[..., 2:], mesh, [Shard(2)]).requires_grad_()
            assert joins_rows(conv, x) == (bytes > 0)


@ranks(2, 3)
def test_small_inputs_join_rows_where_that_is_asked_for(mesh):
    import shardtensor

    whole = torch.randn(1, 4, 24, 8)
    bytes = whole.numel() * 4 // mesh.size()  # on average, whatever the pieces
    conv = nn.Conv2d(4, 4, 3, padding=1)
    for sizes in (None, {2: uneven(24, mesh.size())}):
        x = shard(whole, mesh, [Shard(2)], sizes).requires_grad_()
        with shardtensor.conv_overlap_bytes(bytes):
            assert not joins_rows(conv, x)
        with shardtensor.conv_overlap_bytes(bytes + 1):
            assert joins_rows(conv, x)
            assert_close(conv(x), conv(whole))
    volume = shard(torch.randn(1, 1, 6, 4, 4), mesh, [Shard(2)]).requires_grad_()
    with shardtensor.conv_overlap_bytes(0):
        assert not joins_rows(nn.Conv3d(1, 1, 3, padding=1), volume)


def test_bytes_of_overlap_are_checked():
    import shardtensor

    assert shardtensor.get_conv_overlap_bytes() is None
    with pytest.raises(ValueError, match="expected a number of bytes or none, got -1"):
        shardtensor.set_conv_overlap_bytes(-1)
    with shardtensor.conv_overlap_bytes(5):
        assert shardtensor.get_conv_overlap_bytes() == 5
    assert shardtensor.get_conv_overlap_bytes() is None


@ranks(2)
def test_an_error_of_the_local_call_is_not_one_of_communication(mesh):
    x = shard(torch.randn(1, 2, 8), mesh, [Shard(2)])
    weight = torch.randn(2, 2, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="type") as caught:
        F.conv1d(x, weight, padding=1)
    assert caught.type is RuntimeError
    F.conv1d(x, weight.float(), padding=1)  # the group is still in order


@ranks(2)
def test_wrong_arguments_raise_pytorchs_errors(mesh):
    x = shard(torch.randn(1, 2, 8), mesh, [Shard(2)])
    with pytest.raises(RuntimeError, match="to have 3 channels"):
        F.conv1d(x, torch.randn(4, 3, 3))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        F.conv1d(x, torch.randn(4, 2, 9))
    with pytest.raises(RuntimeError, match="negative padding"):
        F.conv1d(x, torch.randn(4, 2, 3), padding=-1)
    with pytest.raises(RuntimeError, match="strided convolutions"):
        F.conv1d(x, torch.randn(4, 2, 3), stride=2, padding="same")
    with pytest.raises(RuntimeError, match="at least 3 dims"):
        F.conv2d(shard(torch.randn(4, 4), mesh, [Shard(0)]), torch.randn(1, 1, 1, 1))
    with pytest.raises(RuntimeError, match="'same', 'valid'"):
        torch.conv1d(x, torch.randn(4, 2, 3), padding="full")


@ranks(2)
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_changed_input_is_noticed_in_backward(mesh, kernel):
    x = shard(torch.randn(1, 2, 8), mesh, [Shard(2)])
    w = torch.randn(2, 2, kernel, requires_grad=True)
    y = F.conv1d(x, w, padding=kernel // 2)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@ranks(2)
def test_sharded_weights_and_plain_inputs(mesh):
    x, w = torch.randn(1, 2, 8), torch.randn(3, 2, 3)
    expected = F.conv1d(x, w)
    assert_close(F.conv1d(x, shard(w, mesh, [Shard(0)])), expected)
    both = F.conv1d(shard(x, mesh, [Shard(2)]), shard(w, mesh, [Shard(0)]))
    assert_close(both, expected)


@ranks(2)
def test_torch_func_sees_the_rule(mesh):
    x, w = torch.randn(1, 2, 8), torch.randn(3, 2, 3)

    def loss(w, x):
        return F.conv1d(x, w, padding=1).square().sum()

    expected = torch.func.grad(loss)(w, x)
    actual = torch.func.grad(loss)(w, shard(x, mesh, [Shard(2)]))
    torch.testing.assert_close(actual, expected)
