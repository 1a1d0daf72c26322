"""The communication operators on gloo: values, derivatives, tracing, errors.

What needs no backend is tested in C++, see tests/comm.
"""

import functools
import os
import threading
import time

import pytest
import rig
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import ranks, run_isolated, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import shardtensor as st

PRELOAD = ("torch._inductor.compile_fx",)

ops = torch.ops.shardtensor
SIZES = {1: [4], 2: [3, 1], 3: [2, 0, 3], 4: [0, 1, 4, 2]}


def world():
    return dist.group.WORLD.group_name


def own(dtype=torch.double, requires_grad=False):
    """This rank's rows of whole()."""
    rank, sizes = dist.get_rank(), SIZES[dist.get_world_size()]
    begin = sum(sizes[:rank])
    rows = whole(dtype)[begin : begin + sizes[rank]].clone()
    return rows.requires_grad_(requires_grad), sizes


def whole(dtype=torch.double):
    rows = sum(SIZES[dist.get_world_size()])
    return torch.arange(rows * 3.0).reshape(rows, 3).to(dtype)


# ---- values -----------------------------------------------------------------

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_moves_every_dtype(mesh, dtype):
    x, sizes = own(dtype)
    y = ops.all_gather_v(x, 0, sizes, world())
    assert y.dtype == dtype
    assert torch.equal(y, whole(dtype))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_sums_every_dtype(mesh, dtype):
    """Small tensors and large ones travel in different ways."""
    n = mesh.size()
    for repeats in (1, 5000):
        x = torch.tensor([1.0, 0.0, 2.0]).repeat(repeats).to(dtype)
        expected = torch.tensor([1.0 * n, 0.0, 2.0 * n]).repeat(repeats).to(dtype)
        y = ops.all_reduce(x, "sum", world())
        assert y.dtype == dtype
        assert torch.equal(y, expected)


def sum_different_sizes():
    st.set_communication_timeout(3)
    with pytest.raises(dist.DistBackendError, match="shardtensor::all_reduce"):
        ops.all_reduce(torch.ones(2 + dist.get_rank()), "sum", world())


def test_sums_of_different_sizes_are_an_error_on_every_rank():
    """Not the sum of what happens to arrive, nor the end of the process."""
    outcomes = run_isolated(2, sum_different_sizes, timeout=30)
    assert [o.kind for o in outcomes] == ["ok", "ok"], outcomes


@ranks(2, 3)
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_extrema_keep_nan_on_every_rank(mesh, reduce, dtype):
    nan = float("nan")
    rank = dist.get_rank()
    for with_nan in range(mesh.size()):
        x = torch.tensor([nan if rank == with_nan else rank, rank], dtype=dtype)
        y = ops.all_reduce(x, reduce, world())
        assert y[0].isnan()
        assert y[1] == (mesh.size() - 1 if reduce == "max" else 0)


@ranks(2, 3, 4)
def test_nothing_to_move_hangs_nobody(mesh):
    n = mesh.size()
    x = torch.ones(0, 3)
    assert ops.all_gather_v(x, 0, [0] * n, world()).shape == (0, 3)
    assert ops.all_to_all_v(x, 0, [0] * n, [0] * n, world()).shape == (0, 3)
    assert ops.all_reduce(x, "sum", world()).shape == (0, 3)
    # Everybody is still in step.
    assert ops.all_reduce(torch.ones(()), "sum", world()) == n


@ranks(2, 4)
def test_a_large_gather_takes_rounds(mesh):
    rows = 1 << 18  # 2 MB on each rank
    x = torch.full((rows,), float(dist.get_rank()), dtype=torch.double)
    y = ops.all_gather_v(x, 0, [rows] * mesh.size(), world())
    for r in range(mesh.size()):
        assert (y[r * rows : (r + 1) * rows] == r).all()


@ranks("2x2")
def test_axis_groups_have_their_own_ranks(mesh):
    for axis in range(2):
        group = mesh.get_group(axis).group_name
        x = torch.tensor([dist.get_rank()])
        y = ops.all_gather_v(x, 0, [1, 1], group)
        assert y.tolist() == dist.get_process_group_ranks(mesh.get_group(axis))


def talk_with_neighbours():
    """One message to each of many ranks, most of them empty, or to all."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(rig.DEVICE, (ranks,))
    torch.manual_seed(0)
    x = torch.randn(1, 2, 3 * ranks, 512, dtype=torch.double, requires_grad=True)
    weight = torch.randn(2, 2, 5, 5, dtype=torch.double, requires_grad=True)
    expected = F.conv2d(x, weight, padding=2)
    wanted = torch.autograd.grad(expected.square().sum(), (x, weight))
    part = shard(x.detach(), mesh, [Shard(2)]).requires_grad_()
    result = F.conv2d(part, weight, padding=2)
    got = torch.autograd.grad(result.square().sum(), (part, weight))
    torch.testing.assert_close(result.full_tensor(), expected)
    torch.testing.assert_close(got[0].full_tensor(), wanted[0])
    torch.testing.assert_close(got[1], wanted[1])
    columns = part.redistribute(placements=[Shard(3)])
    torch.testing.assert_close(columns.full_tensor(), x)


def test_more_ranks_than_gloo_reaches_at_once():
    """Above 8, messages of any size go to the peers alone."""
    outcomes = run_isolated(9, talk_with_neighbours, timeout=180)
    assert [o.kind for o in outcomes] == ["ok"] * 9, outcomes


# ---- derivatives ------------------------------------------------------------


@ranks(1, 2, 3, 4)
def test_gather_can_be_differentiated_twice(mesh):
    x, sizes = own(requires_grad=True)
    y = ops.all_gather_v(x, 0, sizes, world())
    (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    # Each rank adds the same loss.
    torch.testing.assert_close(g, 3 * x**2 * mesh.size())
    (h,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(h, 6 * x * mesh.size())


@ranks(1, 2, 3)
def test_forward_mode_agrees_with_the_linear_map(mesh):
    x, sizes = own()
    tangent = torch.ones_like(x) * (dist.get_rank() + 1)
    _, ty = torch.func.jvp(
        lambda t: ops.all_gather_v(t, 0, sizes, world()), (x,), (tangent,)
    )
    assert torch.equal(ty, ops.all_gather_v(tangent, 0, sizes, world()))
    v = torch.ones(2, dtype=torch.double)
    _, ty = torch.func.jvp(lambda t: ops.all_reduce(t, "avg", world()), (v,), (3 * v,))
    assert torch.equal(ty, 3 * v)


@ranks(1, 2)
def test_function_transforms_reach_the_backward(mesh):
    x, sizes = own()
    _, vjp = torch.func.vjp(lambda t: ops.all_gather_v(t, 0, sizes, world()), x)
    (g,) = vjp(whole())
    assert torch.equal(g, x * mesh.size())


@ranks(2)
def test_extrema_have_no_derivative(mesh):
    x = torch.ones(2, requires_grad=True)
    y = ops.all_reduce(x, "max", world())
    with pytest.raises(NotImplementedError, match="max has no derivative"):
        y.sum().backward()
    with pytest.raises(NotImplementedError, match="max has no derivative"):
        torch.func.jvp(
            lambda t: ops.all_reduce(t, "max", world()),
            (torch.ones(2),),
            (torch.ones(2),),
        )


# ---- tracing ----------------------------------------------------------------


def exchange_code():
    """A swap of the first rows of two ranks; the last row stays."""
    rank = dist.get_rank()
    side = [2, 0, 2, 3, 2]  # dim, flags, pieces, sizes
    pieces = {rank: [rank, 0, 2, 0, 1, 2], 1 - rank: [1 - rank, 0, 0, 0, 2, 2]}
    for peer in (0, 1):
        side = side + pieces[peer]
    return [rank, 2, 4, 2, 0, 0, len(side), *side, *side]


def changed(numbers, place, value):
    return [*numbers[:place], value, *numbers[place + 1 :]]


@ranks(2)
def test_integers_that_are_no_exchange_are_refused(mesh):
    code = exchange_code()
    rank, target = code[0], 7 + code[6]
    for wrong, message in (
        (code[:-1], "the code ends after 1 more integers, expected 2"),
        ([*code, 0], "the code is too long"),
        (changed(code, 5, 1), r"gathers \[3, 2\] of 2 ranks into \[3, 2\]"),
        (changed(code, 12, 7), "a piece of rank 7, expected one of 2 ranks"),
        (changed(code, 17, 3), r"extends over \[\d, 3\], expected one within \[3, 2\]"),
        (changed(code, target + 5, 1), r"expected as many"),
        (changed(code, 0, 1 - rank), f"for rank {1 - rank} of 2, this is rank {rank}"),
        (changed(code, 1, 3), f"for rank {rank} of 3, this is rank {rank} of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.exchange(torch.zeros(3, 2), wrong, world())


@ranks(2)
def test_operators_pass_opcheck(mesh):
    for requires_grad in (False, True):
        x = torch.arange(6.0).reshape(3, 2).requires_grad_(requires_grad)
        for op, arguments in (
            (ops.exchange.default, (x, exchange_code(), world())),
            (ops.all_reduce.default, (x, "sum", world())),
        ):
            torch.library.opcheck(op, arguments, test_utils=rig.OPCHECKS)


@ranks(2, 3)
def test_compiles_to_one_graph(mesh):
    def loss(x, sizes, group):
        y = ops.all_gather_v(x.sin(), 0, sizes, group)
        return ops.all_reduce((y * y).sum() + x.sum(), "sum", group)

    x, sizes = own(requires_grad=True)
    expected = loss(x, sizes, world())
    (expected_gradient,) = torch.autograd.grad(expected, x)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    value = compiled(x, sizes, world())
    (gradient,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, expected_gradient)


# ---- observing --------------------------------------------------------------


@ranks(2)
def test_the_profiler_names_the_operators(mesh):
    x, sizes = own()
    with torch.profiler.profile() as profile:
        ops.all_gather_v(x, 0, sizes, world())
        ops.all_reduce(torch.ones(2), "sum", world())
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["shardtensor::exchange"] == 1
    assert counts["shardtensor::all_reduce"] == 1


@ranks(1, 2)
def test_the_profiler_notes_global_shapes(mesh):
    x = shard(torch.ones(6, 4), mesh, [Shard(0)]).requires_grad_()
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profile:
        x.relu().sum().backward()
    shapes = {event.name: event.input_shapes for event in profile.events()}
    assert shapes["aten::relu"] == [[6, 4]]


@ranks(3)
def test_statistics_count_what_this_rank_sends(mesh):
    x, sizes = own()
    st.reset_comm_stats()
    ops.all_gather_v(x, 0, sizes, world())
    ops.all_reduce(torch.ones(5), "sum", world())
    stats = st.comm_stats()
    rows = sizes[dist.get_rank()]
    assert stats.exchanges == (1 if rows else 0)
    assert stats.messages == (2 if rows else 0)
    assert stats.bytes == 2 * rows * 3 * 8 + 5 * 4
    assert stats.all_reduces == 1
    assert stats.seconds > 0


@ranks(2)
def test_other_python_threads_run_while_a_rank_waits(mesh):
    if dist.get_rank() == 1:
        time.sleep(0.5)
        ops.all_reduce(torch.ones(1), "sum", world())
        return
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    ops.all_reduce(torch.ones(1), "sum", world())
    done.set()
    thread.join()
    assert len(ticks) > 5


# ---- check mode -------------------------------------------------------------


@ranks(2, 3)
def test_check_mode_raises_the_same_error_on_every_rank(mesh):
    rank = dist.get_rank()
    st.set_check_mode(True)
    try:
        with pytest.raises(ValueError) as caught:
            ops.all_reduce(torch.ones(2 + rank), "sum", world())
        texts = [None] * mesh.size()
        dist.all_gather_object(texts, str(caught.value))
        assert len(set(texts)) == 1
        for r in range(mesh.size()):
            call = "shardtensor::all_reduce (sum) of a Float tensor"
            assert f"rank {r}: {call} [{2 + r}]" in texts[0]
        # The group still works.
        assert ops.all_reduce(torch.ones(()), "sum", world()) == mesh.size()
    finally:
        st.set_check_mode(False)


@ranks(2)
def test_check_mode_sees_backward_in_another_order(mesh):
    st.set_check_mode(True)
    try:
        a = torch.ones(2, requires_grad=True)
        b = torch.ones(3, requires_grad=True)
        ys = [ops.all_reduce(a, "sum", world()), ops.all_reduce(b, "sum", world())]
        mine = dist.get_rank()
        with pytest.raises(ValueError, match="in backward") as caught:
            torch.autograd.grad(ys[mine].sum(), [a, b][mine])
        assert "rank 0: shardtensor::all_reduce (sum) of a Float tensor [2]" in str(
            caught.value
        )
    finally:
        st.set_check_mode(False)


# ---- ranks that die or do not come ------------------------------------------


@functools.cache  # where there is a GPU each makes a group, with all ranks
def mesh_of_all():
    return init_device_mesh(rig.DEVICE, (dist.get_world_size(),))


def exchange():
    mesh = mesh_of_all()
    spec = st.make_spec(mesh, (3 * mesh.size(),), [Shard(0)])
    st.ShardTensor.from_spec(torch.ones(3), spec).full_tensor()


def gather():
    ops.all_gather_v(torch.ones(3), 0, [3] * dist.get_world_size(), world())


CALLS = {
    "shardtensor::all_reduce": lambda: ops.all_reduce(torch.ones(3), "sum", world()),
    "shardtensor::exchange": exchange,
    "the check before all_gather_v": gather,
}


def time_error(name):
    begin = time.monotonic()
    try:
        CALLS[name]()
    except dist.DistBackendError as error:
        return time.monotonic() - begin, str(error)
    return None


def call_while_rank_1_dies(name):
    CALLS[name]()
    if dist.get_rank() == 1:
        os._exit(3)
    return time_error(name)


def call_after_rank_1_died(name):
    """Rank 2 has sent its messages before, and waits for rank 0 first."""
    CALLS[name]()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        os._exit(3)
    if dist.get_rank() == 0:
        time.sleep(1)
    return time_error(name)


def call_while_rank_1_sleeps(name):
    CALLS[name]()
    st.set_communication_timeout(1.0)
    if dist.get_rank() == 1:
        time.sleep(4)
        return None
    return time_error(name)


def assert_named_errors(outcomes, name, limit):
    for rank, outcome in enumerate(outcomes):
        if rank == 1:
            continue
        assert outcome.kind == "ok", outcome.text
        seconds, text = outcome.value
        assert seconds < limit
        assert name in text
        assert f"failed on rank {rank} of {len(outcomes)} in group" in text
        assert "The group cannot be used any more" in text


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_dead_rank_is_an_error_on_the_others(count, name):
    outcomes = run_isolated(count, call_while_rank_1_dies, name)
    assert outcomes[1].kind == "died"
    assert_named_errors(outcomes, name, limit=10)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_who_sees_a_dead_rank_keeps_nobody_waiting(name):
    outcomes = run_isolated(3, call_after_rank_1_died, name)
    assert_named_errors(outcomes, name, limit=10)


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.tail), 3])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_late_rank_is_an_error_within_the_time_limit(count, name):
    outcomes = run_isolated(count, call_while_rank_1_sleeps, name)
    assert_named_errors(outcomes, name, limit=3)
    assert all("imed out" in o.value[1] for o in outcomes if o.value)


def use_a_destroyed_group():
    name = world()
    ops.all_reduce(torch.ones(1), "sum", name)
    dist.destroy_process_group()
    try:
        ops.all_reduce(torch.ones(1), "sum", name)
    except ValueError as error:
        return str(error)
    return ""


def test_a_destroyed_group_is_an_error():
    for outcome in run_isolated(2, use_a_destroyed_group):
        assert "there is no process group named" in outcome.value, outcome.text


@ranks(2)
def test_sends_a_single_element_of_any_stride(mesh):
    # One element counts as contiguous, whatever its stride.
    local = torch.tensor([4.0 + mesh.get_rank()]).as_strided((1,), (5,))
    x = st.ShardTensor.from_local(local, mesh, [Shard(0)])
    whole = x.redistribute(placements=[Replicate()]).to_local()
    assert torch.equal(whole, torch.tensor([4.0, 5.0]))


class Probe:
    ends = []

    def __del__(self):
        Probe.ends.append(threading.get_ident())


@ranks(2)
def test_threads_of_the_backend_free_no_python_objects(mesh):
    """They would need the GIL, which the caller or nobody may have then."""
    Probe.ends.clear()
    x = shard(torch.arange(8.0), mesh, [Shard(0)])
    for _ in range(300):
        torch._C._stash_obj_in_tls("probe", Probe())
        x.full_tensor()
        x.sum().full_tensor()
    torch._C._stash_obj_in_tls("probe", None)
    assert set(Probe.ends) == {threading.get_ident()} and len(Probe.ends) == 300
