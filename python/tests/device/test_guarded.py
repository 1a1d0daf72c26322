"""What a device sees that the CPU forgives: `make test-device`, and DEVICE=cuda."""

import signal
import time
from unittest import mock

import pytest
import rig
import torch
import torch.distributed as dist
import torch.nn.functional as F
from programs import ROOT, blocks
from ranks import assert_close, ranks, run_isolated, shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor.distributed import DistributedManager, joining
from shardtensor.nn.functional import (
    grid_subsample,
    partition_points,
    radius_search,
    signed_distance_field,
)

pytestmark = pytest.mark.skipif(rig.DEVICE == "cpu", reason="for devices")
guarded_only = pytest.mark.skipif(
    rig.DEVICE != "guarded", reason="counts, poison and errors of the guarded device"
)


# ---- the device itself ------------------------------------------------------


def read_from_the_host():
    import ctypes

    from guarded import _guarded

    x = torch.zeros(3, device="guarded")
    assert (x + 1).tolist() == [1.0, 1.0, 1.0]
    ctypes.string_at(_guarded.host_address(x), 4)


@guarded_only
def test_a_read_by_the_host_ends_the_process():
    (outcome,) = run_isolated(1, read_from_the_host)
    assert (outcome.kind, outcome.value) == ("died", -signal.SIGSEGV)


@ranks(1)
def test_two_devices_in_one_call_are_an_error(mesh):
    on_host = torch.zeros(3, device="cpu")
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3) + on_host
    assert (torch.ones(3) + torch.tensor(1.0, device="cpu")).sum() == 6


@guarded_only
@ranks(1)
def test_a_stream_that_does_not_wait_reads_poison(mesh):
    main, side = torch.accelerator.current_stream(), torch.Stream("guarded")
    x = torch.ones(3)
    side.wait_stream(main)
    with side:
        y = x * 2
    assert (y + 1 != 3).all()
    main.wait_stream(side)
    assert (y + 1 == 3).all()


@guarded_only
@ranks(1)
@pytest.mark.parametrize(
    "guard", ["nothing", "record_stream", "wait", "wait_when_freed"]
)
def test_memory_that_is_freed_too_early_is_poison(mesh, guard):
    main, side = torch.accelerator.current_stream(), torch.Stream("guarded")
    x = torch.ones(3)
    side.wait_stream(main)
    with side:
        y = x * 2
    if guard == "record_stream":
        x.record_stream(side)
    if guard == "wait":
        main.wait_stream(side)
    del x
    if guard == "wait_when_freed":
        main.wait_stream(side)
    torch.zeros(3)  # may it have x's memory?
    main.wait_stream(side)
    assert (y == 2).all() == (guard != "nothing")


@guarded_only
@ranks(1)
def test_a_host_that_does_not_wait_is_early(mesh):
    x = torch.ones(3)
    on_host = torch.zeros(3, device="cpu", pin_memory=True)
    on_host.copy_(x, non_blocking=True)
    assert (on_host == 0).all()
    torch.accelerator.synchronize()
    assert (on_host == 1).all()
    x.copy_(on_host, non_blocking=True)
    on_host.fill_(7)
    assert (x == 7).all()


@guarded_only
@ranks(1)
def test_an_error_of_a_kernel_comes_when_it_is_waited_for(mesh):
    x = torch.rand(4).index_select(0, torch.tensor([4]))
    with pytest.raises(IndexError, match="out of range"):
        x.tolist()


@ranks(1)
def test_memory_that_grows_keeps_its_numbers(mesh):
    x = torch.arange(3.0)
    x.resize_(5000)
    assert x[:3].tolist() == [0.0, 1.0, 2.0]


@ranks(2)
def test_messages_go_through_wait(mesh):
    x = torch.arange(6.0)
    assert_close(shard(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()]), x)


@ranks(2)
def test_rows_are_gathered_in_place(mesh):
    rank = mesh.get_local_rank()
    rows = torch.full((2,), float(rank))
    dist.all_gather_into_tensor(rows, rows[rank : rank + 1])
    assert rows.tolist() == [0.0, 1.0]


@guarded_only
@ranks(2)
def test_gloo_gets_no_messages_of_a_device(mesh):
    group = dist.new_group(backend="cpu:gloo,guarded:staged_gloo")
    over_gloo = DeviceMesh.from_group(group, "guarded")
    x = torch.arange(6.0)
    s = shard(x, over_gloo, [Shard(0)])
    assert_close(s.redistribute(placements=[Replicate()]), x)
    assert_close(s.sum(), x.sum())


# ---- numbers that stay on the device ----------------------------------------


@ranks(2)
@pytest.mark.parametrize("op", ["mul_", "div_", "add_", "pow", "maximum", "gt", "lerp"])
def test_a_number_on_the_device_beside_shards(mesh, op):
    x = torch.rand(2, 3, 4, 4) + 1
    number = torch.tensor(0.5)
    arguments = (number, number) if op == "lerp" else (number,)
    for whole in (x, x.contiguous(memory_format=torch.channels_last)):
        s = shard(whole.clone(), mesh, [Shard(2)])
        assert_close(getattr(s, op)(*arguments), getattr(whole.clone(), op)(*arguments))


@ranks(2)
def test_a_loss_times_the_scale_of_a_scaler(mesh):
    x = torch.rand(6, requires_grad=True)
    scale = torch.tensor(1024.0)
    s = shard(x, mesh, [Shard(0)])
    (s.mean() * scale).backward()
    (x.mean() * scale).backward()
    assert_close(s.grad, x.grad)
    term = shard(torch.tensor(3.0), mesh, [Partial()])
    assert_close(term * scale, torch.tensor(3072.0))


# ---- indices on the host ----------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_indices_on_the_host(mesh, dim):
    x = torch.rand(5, 4)
    rows = torch.tensor([3, -1, 0], device="cpu")
    mask = torch.tensor([True, False, True, True, False], device="cpu")
    for index in (rows, mask):
        s = shard(x, mesh, [Shard(dim)])
        assert_close(s[index], x[index])
        written, expected = s.clone(), x.clone()
        written[index] = 2.0
        expected[index] = 2.0
        assert_close(written, expected)
    with pytest.raises(IndexError, match="out of bounds"):
        shard(x, mesh, [Shard(0)])[torch.tensor([5], device="cpu")]


# ---- streams and pinned memory ----------------------------------------------


@ranks(2)
def test_pieces_in_pinned_memory(mesh):
    piece = torch.rand(6, device="cpu")[: 4 - 2 * mesh.get_local_rank()]
    on_host = init_device_mesh("cpu", (2,))
    s = shardtensor.ShardTensor.from_local(piece, on_host, [Shard(0)])
    pinned = s.pin_memory()
    assert pinned.is_pinned() and pinned.to_local().is_pinned() and not s.is_pinned()
    assert pinned.shape == (6,) and pinned._spec == s._spec
    assert torch.equal(pinned.to_local(), piece)


@guarded_only
@ranks(2)
def test_record_stream_is_said_of_the_piece(mesh):
    import guarded

    s = shard(torch.rand(6), mesh, [Shard(0)])
    with shardtensor.fallback_mode("error"):
        before = guarded.count()["recorded_streams"]
        if mesh.get_local_rank() == 0:  # no other rank is needed
            s.record_stream(torch.Stream("guarded"))
        recorded = guarded.count()["recorded_streams"] - before
        assert recorded == (mesh.get_local_rank() == 0)
        assert not s.is_pinned()


@ranks(2)
def test_a_piece_of_a_recorded_stream_is_not_freed_too_early(mesh):
    main, side = torch.accelerator.current_stream(), torch.Stream(rig.DEVICE)
    x = torch.rand(6)
    s = shard(x, mesh, [Shard(0)]).clone()
    side.wait_stream(main)
    with side:
        y = s * 2
    s.record_stream(side)
    del s
    torch.zeros(3)  # has the memory of s if it may
    main.wait_stream(side)
    assert_close(y, x * 2)


@guarded_only
@ranks(2)
def test_gradients_of_another_stream_are_waited_for(mesh):
    import guarded

    main, side = torch.accelerator.current_stream(), torch.Stream("guarded")
    conv = nn.Conv1d(1, 1, 3, padding=1)
    kept = [w.view_as(w) for w in conv.parameters()]  # leaves have the main stream
    x = torch.rand(1, 1, 8)
    s = shard(x, mesh, [Shard(2)])
    expected = torch.autograd.grad(conv(x).sum(), list(conv.parameters()))
    side.wait_stream(main)
    with side:
        y = conv(s).sum()
    before = guarded.count()
    y.backward()
    del kept
    now = guarded.count()
    assert now["event_waits"] > before["event_waits"]
    assert now["recorded_streams"] > before["recorded_streams"]
    for weight, gradient in zip(conv.parameters(), expected, strict=True):
        assert_close(weight.grad, gradient)


@ranks(2)
def test_terms_of_two_streams_travel_in_one_bucket(mesh):
    """The node that comes last starts it, on its own stream."""
    main, side = torch.accelerator.current_stream(), torch.Stream(rig.DEVICE)
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    weights = [*first.parameters(), *second.parameters()]
    x = torch.rand(8, 3)
    expected = torch.autograd.grad((first(x) + second(x)).sum(), weights)
    s = shard(x, mesh, [Shard(0)])
    side.wait_stream(main)
    losses = [first(s).sum()]
    with side:
        losses.append(second(s).sum())
    main.wait_stream(side)
    torch.autograd.backward(losses)
    for weight, gradient in zip(weights, expected, strict=True):
        assert_close(weight.grad, gradient)


@ranks(2)
@pytest.mark.parametrize("cut", [False, True], ids=["plain", "cut"])
def test_gradients_from_another_stream_are_kept_until_they_are_read(mesh, cut):
    """Each is freed when its reader is queued, before it has run."""
    main, side = torch.accelerator.current_stream(), torch.Stream(rig.DEVICE)
    whole = torch.rand(8, 3)
    x = (shard(whole, mesh, [Shard(0)]) if cut else whole.clone()).requires_grad_()
    y = x.sin()
    side.wait_stream(main)
    with side:
        z = y.exp()
    main.wait_stream(side)
    z.backward(torch.ones_like(z))
    with side:
        torch.zeros_like(z)  # has the memory of a gradient if it may
    assert_close(x.grad, whole.sin().exp() * whole.cos())


# ---- the order of messages --------------------------------------------------


@ranks(2)
def test_messages_of_a_backward_have_one_order(mesh):
    """Also where the host has a part in it and ranks differ in speed."""
    rank = mesh.get_local_rank()
    x = torch.rand(8, 4, requires_grad=True)

    def wait_on(who):
        return lambda _grad: time.sleep(0.3 if rank == who else 0)

    def loss(x, moved):
        on_device = moved(x.sin()) * 1
        on_host = moved(x.exp()).cpu() * 1
        on_device.register_hook(wait_on(0))
        on_host.register_hook(wait_on(1))
        return (on_device * 2).sum(), (on_host * 3).sum()

    s = shard(x, mesh, [Shard(0)])
    torch.autograd.backward(
        loss(s, lambda y: y.redistribute(placements=[Shard(1)]).to_local())
    )
    torch.autograd.backward(loss(x, lambda y: y))
    assert_close(s.grad, x.grad)


# ---- drift ------------------------------------------------------------------


@ranks(2)
def test_check_mode_forgives_rounding_errors_of_devices(mesh):
    shardtensor.set_check_mode(True)
    x = shard(torch.rand(4, 3), mesh, [Shard(0)])
    weight = torch.ones(3)
    x * (weight + 1e-7 * mesh.get_local_rank())
    with pytest.raises(ValueError, match="must be equal on all ranks"):
        x * (weight + mesh.get_local_rank())


# ---- steps without copies ---------------------------------------------------

STEPS = {
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "batch_norm": lambda: nn.BatchNorm2d(4),
    "layer_norm": lambda: nn.LayerNorm([4, 8, 6]),
    "upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "upsample_aligned": lambda: nn.Upsample(
        scale_factor=2, mode="bilinear", align_corners=True
    ),
    "pool": lambda: nn.MaxPool2d(2),
    "adaptive_pool": lambda: nn.AdaptiveAvgPool2d((3, 3)),
    "softmax": lambda: nn.Softmax(dim=2),
    "linear": lambda: nn.Linear(6, 5),
    "pad": lambda: nn.CircularPad2d(1),
}


@guarded_only
@ranks(2)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_copies_nothing_to_or_from_the_host(mesh, name):
    import guarded

    module = STEPS[name]()
    x = torch.rand(2, 4, 8, 6)

    def step():
        s = shard(x, mesh, [Shard(2)]).requires_grad_()
        before = guarded.count()
        module(s).square().mean().backward()
        return guarded.copies_since(before)

    step()  # plans are made, and what they keep on the device
    assert step() == {"to_host": 0, "to_device": 0}


@guarded_only
@ranks(2)
def test_a_class_loss_copies_nothing_to_or_from_the_host(mesh):
    import guarded

    x = shard(torch.randn(4, 3, 6), mesh, [Shard(2)]).requires_grad_()
    target = shard(torch.randint(0, 3, (4, 6)), mesh, [Shard(1)])
    before = guarded.count()
    F.cross_entropy(x, target).backward()
    assert guarded.copies_since(before) == {"to_host": 0, "to_device": 0}


@guarded_only
@ranks(2)
def test_a_search_on_the_host_copies_each_tensor_once(mesh):
    import guarded

    corners, faces = torch.eye(3), torch.arange(3)
    points = shard(torch.rand(5, 3), mesh, [Shard(0)])
    before = guarded.count()
    signed_distance_field(corners, faces, points)
    # And two numbers: whether faces are in range, and coordinates finite.
    assert guarded.copies_since(before) == {"to_host": 3 + 2, "to_device": 3}


@guarded_only
@ranks(2)
def test_numbers_of_the_host_travel_where_a_group_moves_none(mesh):
    """As that of init_process_group("nccl")."""
    group = dist.new_group(backend="guarded:guarded")
    alone = DeviceMesh.from_group(group, "guarded")
    cloud, faces = torch.rand(9, 3), torch.tensor([[0, 1, 2], [2, 1, 3]])
    edges = torch.tensor([[0, 4, 8, 2], [3, 1, 5, 0]])

    def found(mesh):
        points, triangles = (shard(x, mesh, [Shard(0)]) for x in (cloud, faces))
        nodes = partition_points(points, mesh, "hilbert")[1]
        return [
            radius_search(points, points, 0.5),
            *grid_subsample(points, 0.5)[2:],
            *partition_points(points, mesh, weights=torch.arange(9.0)),
            *shardtensor.mesh.cell_faces({"triangle": triangles}, 4),
            shardtensor.ShardGraph(edges, nodes).edge_index,
        ]

    for there, here in zip(found(alone), found(mesh), strict=True):
        assert_close(there, here.full_tensor())


# ---- norms by the kernels of a device ---------------------------------------


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True], ids=["", "channels_last"])
def test_a_large_norm_takes_one_pass_for_its_gradient(mesh, dtype, last):
    """Zero and tiny weights among others: Note [Any sum by the kernel of a
    gradient]."""
    x = torch.randn(1, 8, 512, 320, dtype=dtype) + 1
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    norm = nn.GroupNorm(2, 8, dtype=dtype)
    weight = [0.0, 1.0, -2.0, 0.5, 0.0, 1e-3, 1.0, 3.0]
    norm.weight.data.copy_(torch.tensor(weight))
    grad = torch.randn_like(x)
    s = shard(x, mesh, [Shard(2)]).requires_grad_()
    y = norm(s)
    y.backward(shard(grad, mesh, [Shard(2)]))
    exact = x.double().requires_grad_()
    expected = F.group_norm(exact, 2, norm.weight.double())
    expected.backward(grad.double())
    bounds = {"rtol": 1e-5, "atol": 1e-5}
    if dtype == torch.bfloat16:
        bounds = {"rtol": 2**-7, "atol": 1e-3}
    assert_close(y, expected.detach().to(dtype), **bounds)
    assert_close(s.grad, exact.grad.to(dtype), **bounds)


# ---- calls that wait for no device ------------------------------------------


def _argmax(s, rows, mesh):
    return s.argmax()


def _argmin_along(s, rows, mesh):
    return s.argmin(0)


def _from_local(s, rows, mesh):
    return shardtensor.ShardTensor.from_local(s.to_local(), mesh, [Shard(0)])


def _put(s, rows, mesh):
    return s.clone().index_put_((rows,), torch.ones(3, 4))


def _add(s, rows, mesh):
    return s.clone().index_put_((rows,), torch.ones(3, 4), accumulate=True)


def _add_number(s, rows, mesh):
    return s.clone().index_put_((rows,), torch.full((), 2.0), accumulate=True)


@guarded_only
@ranks(2, 3)
@pytest.mark.parametrize(
    "call", [_argmax, _argmin_along, _from_local, _put, _add, _add_number]
)
def test_a_call_waits_for_no_device(mesh, call):
    import guarded

    x = torch.rand(7, 4)
    rows = torch.tensor([6, 0, 2])

    def run(given):
        before = guarded.count()
        result = call(given, rows, mesh)
        return result, guarded.copies_since(before)

    s = shard(x, mesh, [Shard(0)])
    run(s)  # plans are made
    found, copies = run(s)
    assert copies == {"to_host": 0, "to_device": 0}
    assert_close(found, x if call is _from_local else call(x, rows, mesh))


# ---- many boxes -------------------------------------------------------------


# ---- programs that were written on a host -----------------------------------


@ranks(2)
def test_the_readme_program_brings_its_model_to_the_device(mesh):
    source = blocks(ROOT / "README.md", "python")[0].replace("721, 1440", "21, 40")
    device = rig.device_of(mesh.get_rank())
    chosen = mock.patch.object(joining, "device_of", lambda *_: device)
    names = {}
    with torch.device("cpu"), chosen:
        exec(compile(source, "README.md", "exec"), names)
    assert {names[name].device.type for name in "xy"} == {rig.DEVICE}


@ranks(2)
def test_a_manager_whose_ranks_have_devices(mesh):
    device = rig.device_of(mesh.get_rank())
    with mock.patch.object(joining, "device_of", lambda *_: device):
        DistributedManager.initialize()
    manager = DistributedManager()
    grid = manager.initialize_mesh((-1,), ("domain",))
    assert manager.device == device and grid.device_type == rig.DEVICE
    s = shardtensor.ones(6, placements=[Shard(0)])  # on the manager's mesh
    assert s.device_mesh == grid and s.to_local().device.type == rig.DEVICE
    assert_close(s.cumsum(0), torch.arange(1.0, 7.0))
    DistributedManager.create_process_subgroup("pair", 2)
    for where in (rig.DEVICE, "cpu"):
        ones = torch.ones(2, device=where)
        dist.all_reduce(ones, group=manager.group("pair"))
        assert ones.tolist() == [2.0, 2.0]
