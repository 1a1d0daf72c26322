"""torch.compile gives the eager numbers, communication inside the graph."""

import pytest
import torch
import torch.distributed as dist
from compiled import Compiled
from ranks import assert_close, check_op, ranks, shard, sharded, uneven
from torch._dynamo.source import ConstantSource
from torch.distributed.tensor import Replicate, Shard
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import shardtensor
from shardtensor import ShardTensor

PRELOAD = ("torch._inductor.compile_fx",)


def perceptron():
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)
    )


@ranks(2)
def test_a_perceptron_on_rows_compiles_whole(mesh):
    check_op(
        Compiled(perceptron(), backend="aot_eager", fullgraph=True),
        sharded(
            torch.randn(7, 4, requires_grad=True),
            [Shard(0)],
            {0: uneven(7, mesh.size())},
        ),
        mesh=mesh,
    )


@ranks(2)
def test_halos_norms_and_pools_compile_whole(mesh):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.SiLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.GroupNorm(2, 4),
        torch.nn.ConvTranspose2d(4, 2, 2, stride=2),
    ).double()
    x = torch.randn(1, 2, 8, 4, dtype=torch.double, requires_grad=True)
    check_op(
        Compiled(model, backend="aot_eager", fullgraph=True),
        sharded(x, [Shard(2)], {2: [5, 3]}),
        mesh=mesh,
    )


@ranks(2)
def test_communication_is_part_of_the_graph(mesh):
    targets = []

    def spy(graph, inputs):
        targets.extend(str(n.target) for n in graph.graph.nodes)
        return graph

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(spy(graph, inputs).forward)
    )
    torch._dynamo.reset()
    x = torch.randn(7, 4)
    s = shard(x, mesh, [Shard(0)], {0: [4, 3]})
    fn = torch.compile(lambda t: t.mean(0), backend=backend, fullgraph=True)
    assert_close(fn(s).redistribute(placements=[Replicate()]), x.mean(0))
    assert_close(fn(s) * 2, 2 * x.mean(0))

    def gathered(t):
        return t.softmax(0) * 2

    fn = torch.compile(gathered, backend=backend, fullgraph=True)
    assert_close(fn(s), gathered(x))
    assert any(t.startswith("shardtensor.") for t in targets), targets


@ranks(2)
def test_inductor(mesh):
    x = torch.randn(7, 4)
    fn = torch.compile(lambda t: (t * 2).relu().sum(0), backend="inductor")
    assert_close(fn(shard(x, mesh, [Shard(0)], {0: [5, 2]})), (x * 2).relu().sum(0))


@ranks(2)
def test_crossing_the_border_breaks_the_graph_cleanly(mesh):
    def mixed(x):
        y = (x * 2).redistribute(placements=[Shard(1)])
        return (y.to_local() + 1).sum() * 0 + (y + 1).square().sum()

    x = torch.randn(6, 4)
    s = shard(x, mesh, [Shard(0)])
    torch._dynamo.reset()
    compiled = torch.compile(mixed, backend="aot_eager")
    assert_close(compiled(s), (x * 2 + 1).square().sum())
    assert_close(compiled(s * 2), (x * 4 + 1).square().sum())


@ranks(2)
def test_another_layout_is_another_graph(mesh):
    torch._dynamo.reset()
    fn = torch.compile(lambda t: (t * 2).sum(0), backend="aot_eager", fullgraph=True)
    x = torch.randn(6, 4)
    for placement in (Shard(0), Shard(1), Replicate()):
        assert_close(fn(shard(x, mesh, [placement])), (x * 2).sum(0))
    y = torch.randn(8, 4)
    assert_close(fn(shard(y, mesh, [Shard(0)])), (y * 2).sum(0))


@ranks(2)
def test_other_settings_are_another_graph(mesh):
    torch._dynamo.reset()
    head = torch.compile(lambda x, w: (x @ w).square().sum(), backend="aot_eager")
    x, w = torch.randn(6, 4), torch.randn(4, 3, requires_grad=True)
    s = shard(x, mesh, [Shard(0)], {0: [4, 2]})
    expected = torch.autograd.grad((x @ w).square().sum(), w)[0]
    rows = slice(0, 4) if mesh.get_rank() == 0 else slice(4, 6)
    term = torch.autograd.grad((x[rows] @ w).square().sum(), w)[0]
    with shardtensor.gradient_policy("deferred"):
        deferred = torch.autograd.grad(head(s, w), w)[0]
    assert_close(deferred, 2 * term)  # its average over the ranks is the gradient
    for policy in ("coalesced", "immediate", "coalesced"):
        with shardtensor.gradient_policy(policy):
            assert_close(torch.autograd.grad(head(s, w), w)[0], expected)
    drop = torch.compile(lambda x: torch.dropout(x, 0.5, True), backend="aot_eager")
    for policy in ("one_device", "counter"):
        with shardtensor.random_policy(policy):
            torch.manual_seed(1)
            eager = torch.dropout(s, 0.5, True)
            torch.manual_seed(1)
            assert_close(drop(s).full_tensor(), eager.full_tensor())


@ranks(2)
def test_sizes_that_the_compiler_keeps_open(mesh):
    """As it gives them where it repeats how a view was made."""
    x = torch.randn(6, 12)
    env = ShapeEnv()
    n = env.create_symbol(3, ConstantSource("n"), DimDynamic.DYNAMIC)
    n = env.create_symintnode(n, hint=3)
    view, narrow = torch.ops.aten.view.default, torch.ops.aten.narrow.default
    call, s = ShardTensor.__torch_dispatch__, shard(x, mesh, [Shard(0)], {0: [4, 2]})
    assert_close(call(view, (), (s, [6, n, 12 // n])), x.view(6, 3, 4))
    assert_close(call(narrow, (), (s, 1, n, n)), x.narrow(1, 3, 3))


@ranks(1)
def test_handlers_registered_later_reach_compiled_code(mesh):
    x = shard(torch.ones(4), mesh, [Shard(0)])
    fn = torch.compile(lambda t: torch.exp(t), backend="aot_eager")
    assert_close(fn(x), torch.ones(4).exp())
    ShardTensor.register_function_handler(
        torch.exp, lambda func, types, args, kwargs: args[0] * 3
    )
    try:
        assert_close(fn(x), torch.full((4,), 3.0))
    finally:
        ShardTensor.unregister_function_handler(torch.exp)
    assert_close(fn(x), torch.ones(4).exp())


@ranks(2)
def test_ranks_do_not_share_compiled_graphs(mesh):
    def hashes(x):
        found = [None, None]
        dist.all_gather_object(found, x._stable_hash_for_caching())
        return found

    x = shard(torch.zeros(4, 6), mesh, [Shard(0)])
    own = hashes(x)
    assert own[0] != own[1]
    assert hashes(x + 1) == own  # the layout counts, not the values
    for other in (
        x.double(),
        x.requires_grad_(),
        shard(torch.zeros(4, 6), mesh, [Shard(1)]),
        shard(torch.zeros(4, 6), mesh, [Shard(0)], {0: [3, 1]}),
    ):
        assert hashes(other)[0] != own[0]


def communication_in(code):
    return [
        line.split("(")[0].split(".")[-2] + line.split("(")[1].split(",")[0]
        for line in code.splitlines()
        if "torch.ops.shardtensor." in line and "default(" in line
    ]


@ranks(2)
def test_inductor_orders_communication_alike_on_all_ranks(mesh):
    """Although the ranks' pieces, and with them the best order for memory,
    differ."""
    from torch._inductor import lowering, utils

    cuts = [[1, 40], [40, 1], [20, 21]]
    inputs = [
        shard(torch.randn(41, 8), mesh, [Shard(0)], {0: cuts[i % 3]}) for i in range(6)
    ]

    def transposed(*inputs):
        turned = [x.redistribute(placements=[Shard(1)]) for x in inputs]
        return sum((x * x).sum() for x in reversed(turned))

    torch._dynamo.reset()
    compiled = torch.compile(transposed, fullgraph=True)
    result, code = utils.run_and_get_code(compiled, *inputs)
    assert_close(result.full_tensor(), transposed(*inputs).full_tensor())
    orders = [None] * mesh.size()
    dist.all_gather_object(orders, communication_in(code[0]))
    assert sum(call.startswith("exchange") for call in orders[0]) == len(inputs)
    assert all(order == orders[0] for order in orders)
    for operator in (torch.ops.shardtensor.exchange, torch.ops.shardtensor.all_reduce):
        assert operator.default in lowering.lowerings


def put_together(x, y, z):
    """The first piece of cat is moved, and empty on rank 1."""
    x = x.redistribute(placements=[Shard(1)], sizes={1: [6, 0]})
    y = y.redistribute(placements=[Shard(1)])
    return y.sin() + torch.cat([x, z], 1).cos()


@ranks(2, timeout=120)
@pytest.mark.parametrize(
    "backward", [True, pytest.param(False, marks=pytest.mark.tail)]
)
def test_inductor_keeps_messages_that_a_rank_has_no_use_for(mesh, backward):
    """And their order, where nodes move to those that use them."""
    given = [torch.randn(4, columns, requires_grad=backward) for columns in (6, 12, 6)]
    x, y, z = given
    expected = torch.sin(y) + torch.cat([x, z], 1).cos()
    placed = [
        shard(x, mesh, [Shard(0)]),
        shard(y, mesh, [Shard(0)]),
        shard(z, mesh, [Shard(1)], {1: [0, 6]}),
    ]
    torch._dynamo.reset()
    actual = torch.compile(put_together, fullgraph=True)(*placed)
    assert_close(actual, expected)
    if backward:
        actual.sum().backward()
        expected.sum().backward()
        for part, whole in zip(placed, given, strict=True):
            assert_close(part.grad, whole.grad)


def messages_of_backward(function, x):
    result = function(x)
    shardtensor.reset_comm_stats()
    result.sum().backward()
    stats = shardtensor.comm_stats()
    return stats.exchanges, stats.all_reduces


@ranks(2, 3, timeout=120)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_messages_of_forward_are_not_sent_again_in_backward(mesh, backend):
    """The last rank has no row."""
    cut = {0: [8 - mesh.size(0) + 2, *[1] * (mesh.size(0) - 2), 0]}
    x = shard(torch.randn(8, 6, requires_grad=True), mesh, [Shard(0)], cut)

    def model(x):
        return x.softmax(0) * x[0] + x.redistribute(placements=[Replicate()])[-1]

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    messages_of_backward(compiled, x)  # compiles
    assert messages_of_backward(compiled, x) == messages_of_backward(model, x)


def gradients(model, call, x):
    """And the all-reduces that they take."""
    model.zero_grad()
    call(x)  # compiles
    shardtensor.reset_comm_stats()
    call(x).square().mean().backward()
    count = shardtensor.comm_stats().all_reduces
    return [p.grad.clone() for p in model.parameters()], count


def check_gradients(model, x):
    """Compiled they are the eager ones. Returns what they cost."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    actual, count = gradients(model, compiled, x)
    expected, eager_count = gradients(model, model, x)
    torch.testing.assert_close(actual, expected)
    assert count == eager_count
    return count


def check_sums_of_gradients(mesh):
    """The last rank of the axis has no row."""
    others = [Replicate()] * (mesh.ndim - 1)
    cut = [8 - mesh.size(0) + 2, *[1] * (mesh.size(0) - 2), 0]
    x = shard(torch.randn(8, 4), mesh, [Shard(0), *others], {0: cut})
    for depth in (1, 3):
        layers = (torch.nn.Linear(4, 4) for _ in range(depth))
        assert check_gradients(torch.nn.Sequential(*layers), x) == 1


@ranks("2x2")
def test_inductor_joins_the_sums_of_gradients(mesh):
    check_sums_of_gradients(mesh)


@pytest.mark.tail
@ranks(2, 3)
def test_inductor_joins_the_sums_of_gradients_on_one_axis(mesh):
    check_sums_of_gradients(mesh)


@ranks(2)
def test_inductor_keeps_the_sums_that_messages_need(mesh):
    """Those of the norm, backward, come before the messages of a convolution."""
    x = shard(torch.randn(2, 4, 8, 6), mesh, [Shard(2)])
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 4, 3, padding=1),
        torch.nn.GroupNorm(2, 4),
        torch.nn.Conv2d(4, 4, 3, padding=1),
    )
    assert check_gradients(model, x) == 2


@ranks(1)
def test_a_users_pass_stays_beside_ours(mesh):
    from torch._inductor import config, custom_graph_pass

    from shardtensor import join_sums

    seen = []
    with config.patch(post_grad_custom_post_pass=seen.append):
        join_sums.install()
        passes = config.post_grad_custom_post_pass
    if not hasattr(custom_graph_pass, "get_custom_graph_passes"):  # PyTorch 2.11
        assert passes == seen.append
        return
    first, second = passes
    assert first == seen.append and isinstance(second, join_sums.JoinSums)
