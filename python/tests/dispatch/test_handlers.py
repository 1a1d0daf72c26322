"""Python functions in the place of operators."""

import math
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import assert_close, check_op, ranks, shard, sharded, uneven
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensor, TensorPromotionMode

PRELOAD = ("torch._inductor.compile_fx",)


@torch.library.custom_op("shardtensor_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class handling:
    """A function handler for the time of a with-block."""

    def __init__(self, func, handler):
        self.func, self.handler = func, handler

    def __enter__(self):
        ShardTensor.register_function_handler(self.func, self.handler)

    def __exit__(self, *_):
        ShardTensor.unregister_function_handler(self.func)


def sharded_dot(func, types, args, kwargs):
    x, y = args
    partial = torch.dot(x.to_local(), y.to_local())
    dist.all_reduce(partial, group=x.device_mesh.get_group())
    return ShardTensor.from_local(partial, x.device_mesh, (Replicate(),))


@ranks(1, 2, 3)
def test_the_dot_product_example_works_as_written(mesh):
    x, y = torch.randn(10), torch.randn(10)
    sizes = {0: uneven(10, mesh.size())}
    sx, sy = (shard(t, mesh, [Shard(0)], sizes) for t in (x, y))
    with handling(torch.dot, sharded_dot):
        result = torch.dot(sx, sy)
        assert result.placements == (Replicate(),)
        assert_close(result, torch.dot(x, y))
        assert torch.dot(x, y) == x @ y  # plain tensors as ever
    assert ShardTensor.__torch_function__ is torch._C._disabled_torch_function_impl
    assert_close(torch.dot(sx, sy), torch.dot(x, y))


@ranks(1)
def test_a_handler_sees_the_call_as_it_was_written(mesh):
    x = shard(torch.randn(1, 2, 8, 8), mesh, [Replicate()])
    w, b = torch.randn(2, 2, 3, 3), torch.randn(2)
    seen = []

    def handler(func, types, args, kwargs):
        seen.append((func, args, kwargs))
        assert ShardTensor in types
        return "handled"

    flat = x.flatten()
    for func, call in {
        F.conv2d: lambda: F.conv2d(x, w, bias=b, padding=1),
        F.interpolate: lambda: F.interpolate(x, scale_factor=2),
        F.pad: lambda: F.pad(x, (1, 1)),
        F.layer_norm: lambda: F.layer_norm(x, (8,)),
        torch.cat: lambda: torch.cat([w, x]),
        torch.Tensor.add: lambda: x + x,
        torch.Tensor.sum: lambda: x.sum(),
        torch.Tensor.__getitem__: lambda: x[0],
        torch.einsum: lambda: torch.einsum("i,i->", flat, flat),
        twice: lambda: twice(x),
        torch.ops.shardtensor_test.twice.default: lambda: twice(x),
    }.items():
        with handling(func, handler):
            assert call() == "handled", func
    assert seen[0][0] is F.conv2d and seen[0][1] == (x, w)
    assert seen[0][2]["padding"] == 1 and seen[0][2]["bias"] is b


@ranks(1, 2)
def test_inside_its_handler_a_function_is_the_built_in_one(mesh):
    x = torch.randn(6)
    s = shard(x, mesh, [Shard(0)])
    calls = []

    def plus_one(func, types, args, kwargs):
        calls.append(func)
        return func(*args, **kwargs) + 1

    with handling(torch.exp, plus_one), handling(torch.sin, plus_one):
        assert_close(torch.exp(s), torch.exp(x) + 1)
        assert calls == [torch.exp]
        assert_close(torch.sin(torch.exp(s)), torch.sin(torch.exp(x) + 1) + 1)
        with pytest.raises(TypeError):
            torch.exp(s, wrong=1)
        assert_close(torch.exp(s), torch.exp(x) + 1)  # also after an error


@ranks(1, 2)
def test_named_handlers_serve_custom_operators(mesh):
    x = torch.randn(6)
    s = shard(x, mesh, [Shard(0)])
    ShardTensor.register_named_function_handler(
        "shardtensor_test.twice.default",
        lambda func, types, args, kwargs: args[0] * 20,
    )
    try:
        assert_close(twice(s), x * 20)
        assert_close(s + 1, x + 1)
    finally:
        ShardTensor.unregister_named_function_handler("shardtensor_test.twice.default")
    assert_close(twice(s), x * 2)


@ranks(1, 2, 3)
def test_dispatch_handlers_stand_below_autograd(mesh):
    x = torch.randn(7, dtype=torch.float64)
    seen = []

    def shifted_exp(t):
        seen.append((type(t), torch.is_grad_enabled()))
        local = torch.exp(t.to_local()) + 0.5
        return ShardTensor.from_spec(local, t._spec)

    op = torch.ops.aten.exp.default
    ShardTensor.register_dispatch_handler(op, shifted_exp)
    try:
        s = shard(x.requires_grad_(), mesh, [Shard(0)])
        y = torch.exp(s)
        assert type(y) is ShardTensor and y.requires_grad
        assert_close(y, x.exp() + 0.5)
        y.sum().backward()
        assert_close(s.grad, x.exp() + 0.5)  # ATen's formula: grad * result
        assert seen == [(ShardTensor, False)]
    finally:
        ShardTensor.unregister_dispatch_handler(op)
    assert_close(torch.exp(s), x.exp())


@ranks(1)
def test_inside_a_handler_all_that_run_are_the_built_in_operators(mesh):
    """Also where one calls the other's operator, and that one its own."""
    x = torch.randn(5)
    exp, sin = torch.ops.aten.exp.default, torch.ops.aten.sin.default
    other = {exp: torch.sin, sin: torch.exp}
    for op, function in other.items():
        ShardTensor.register_dispatch_handler(op, lambda t, f=function: f(t))
    try:
        s = shard(x, mesh, [Shard(0)])
        assert_close(torch.exp(s), x.exp())  # exp calls sin, which calls exp
        assert_close(torch.sin(s), x.sin())
    finally:
        for op in other:
            ShardTensor.unregister_dispatch_handler(op)


@ranks(1, 2)
def test_dispatch_handlers_get_arguments_and_give_several_results(mesh):
    x = torch.randn(6, 4)
    s = shard(x, mesh, [Shard(0)])
    got = []

    def add(a, b, **kwargs):
        got.append((b, kwargs))
        return torch.add(a, b, **kwargs) * 10  # the built-in one, inside

    def maximum(t, dim, keepdim=False):
        got.append((dim, keepdim))
        values, indices = torch.max(t, dim, keepdim)
        return values * 2, indices

    add_op, max_op = torch.ops.aten.add.Tensor, torch.ops.aten.max.dim
    ShardTensor.register_dispatch_handler(add_op, add)
    ShardTensor.register_dispatch_handler(max_op, maximum)
    try:
        assert_close(torch.add(s, s, alpha=3), x * 40)
        assert got[0][0] is not None and got[0][1] == {"alpha": 3}
        values, indices = s.max(1)
        assert_close(values, x.max(1).values * 2)
        assert_close(indices, x.max(1).indices)
        assert got[1] == (1, False)
    finally:
        ShardTensor.unregister_dispatch_handler(add_op)
        ShardTensor.unregister_dispatch_handler(max_op)
    assert_close(s + s, x * 2)


@ranks(2)
def test_a_dispatch_handler_of_an_operator_without_results(mesh):
    op = torch.ops.aten._foreach_add_.Scalar

    def twice(tensors, number):
        for tensor in tensors:
            tensor.add_(2 * number)

    x = shard(torch.zeros(4), mesh, [Shard(0)])
    ShardTensor.register_dispatch_handler(op, twice)
    try:
        torch._foreach_add_([x], 1.0)
    finally:
        ShardTensor.unregister_dispatch_handler(op)
    assert_close(x, torch.full((4,), 2.0))


@ranks(2)
def test_errors_of_a_handler_reach_the_caller(mesh):
    s = shard(torch.randn(6), mesh, [Shard(0)])

    def fail(*args, **kwargs):
        raise LookupError("from the handler")

    with handling(torch.exp, fail), pytest.raises(LookupError, match="the handler"):
        torch.exp(s)
    op = torch.ops.aten.exp.default
    ShardTensor.register_dispatch_handler(op, fail)
    try:
        with pytest.raises(LookupError, match="from the handler"):
            torch.exp(s)
    finally:
        ShardTensor.unregister_dispatch_handler(op)


@ranks(1)
def test_wrong_registrations_are_errors(mesh):
    def f(*_):
        return None

    with pytest.raises(TypeError, match="expected a function as handler"):
        ShardTensor.register_function_handler(torch.dot, None)
    with pytest.raises(ValueError, match="no function handler for"):
        ShardTensor.unregister_function_handler(torch.dot)
    with pytest.raises(ValueError, match="no function handler named 'x'"):
        ShardTensor.unregister_named_function_handler("x")
    with pytest.raises(TypeError, match="expected an operator overload"):
        ShardTensor.register_dispatch_handler(torch.add, f)
    with pytest.raises(ValueError, match="decomposed into other operators"):
        ShardTensor.register_dispatch_handler(torch.ops.aten.linear.default, f)
    with pytest.raises(ValueError, match="has a rule at the function level"):
        ShardTensor.register_dispatch_handler(torch.ops.aten.equal.default, f)
    with pytest.raises(ValueError, match="there is no dispatch handler for aten::exp"):
        ShardTensor.unregister_dispatch_handler(torch.ops.aten.exp.default)
    assert ShardTensor.patches_enabled()


@ranks(1)
def test_shapes_cost_nothing_more_without_handlers(mesh):
    s = shard(torch.randn(6), mesh, [Shard(0)])

    def seconds():
        start = time.perf_counter()
        for _ in range(2000):
            s.shape  # noqa: B018
        return time.perf_counter() - start

    plain = min(seconds() for _ in range(5))
    with handling(torch.dot, sharded_dot):
        handled = min(seconds() for _ in range(5))
    assert plain < handled


# ---- promotion --------------------------------------------------------------


@ranks(1, 2)
def test_promotion_modes(mesh):
    x, w = torch.randn(6, 2), torch.randn(2)
    s = shard(x, mesh, [Shard(0)])
    assert ShardTensor.get_promotion_mode() == TensorPromotionMode.SILENT
    assert_close(s * w, x * w)
    with ShardTensor.promotion_mode(TensorPromotionMode.DISABLED):
        with pytest.raises(ValueError, match=r"aten::mul.Tensor: got a plain tensor"):
            s * w
        assert_close(s * 2, x * 2)  # numbers are not tensors
    with (
        ShardTensor.promotion_mode(TensorPromotionMode.WARN),
        pytest.warns(UserWarning, match=r"auto-promoting a plain Float .* \[2\]"),
    ):
        s * w
    with ShardTensor.promotion_mode("warn"), warnings.catch_warnings():
        warnings.simplefilter("error")
        s * w.sum()  # no dims: a number
        assert ShardTensor.get_promotion_mode() is TensorPromotionMode.WARN
    with pytest.raises(ZeroDivisionError), ShardTensor.promotion_mode("disabled"):
        1 / 0  # noqa: B018
    assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
    for wrong in ("loud", 1, None):
        with pytest.raises(ValueError, match="not a valid TensorPromotionMode"):
            ShardTensor.set_promotion_mode(wrong)
    assert [mode.value for mode in TensorPromotionMode] == [
        "disabled", "warn", "silent"
    ]  # fmt: skip
    ShardTensor.set_promotion_mode(TensorPromotionMode.SILENT)
    assert ShardTensor.get_promotion_mode() == TensorPromotionMode.SILENT


W3, W33 = torch.ones(4, 4, 3), torch.ones(4, 4, 3, 3)
WITH_WEIGHTS = {
    "linear": lambda x: F.linear(x, torch.ones(2, 8)),
    "conv1d": lambda x: F.conv1d(x[:, :, 0], W3),
    "conv2d": lambda x: F.conv2d(x, W33),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, W33),
    "batch_norm": lambda x: F.batch_norm(x, None, None, torch.ones(4), training=True),
    "running statistics": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "instance_norm": lambda x: F.instance_norm(x, weight=torch.ones(4)),
    "group_norm": lambda x: F.group_norm(x, 2, torch.ones(4)),
    "layer_norm": lambda x: F.layer_norm(x, (8,), torch.ones(8)),
    "rms_norm": lambda x: F.rms_norm(x, (8,), torch.ones(8)),
    "prelu": lambda x: F.prelu(x, torch.ones(4)),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(2, 8, 8)),
    "embedding": lambda x: F.embedding((x > 0).long(), torch.ones(2, 3)),
    "stft": lambda x: torch.stft(
        x[0].flatten(1), 4, 2, window=torch.ones(4), return_complex=True
    ),
    "cross_entropy": lambda x: F.cross_entropy(x, (x[:, 0] > 0).long(), torch.ones(4)),
    "attention": lambda x: F.scaled_dot_product_attention(x, torch.ones(2, 4, 8, 8), x),
    "einsum": lambda x: torch.einsum("bchw,wk->bchk", x, torch.ones(8, 3)),
    "interpolated grid": lambda x: F.grid_sample(
        x, torch.zeros(2, 3, 3, 2), align_corners=False
    ),
}


@ranks(2, "2x2")
def test_weights_are_plain_tensors_as_others(mesh):
    layouts = [[Shard(2)] * mesh.ndim, [Shard(3)] * mesh.ndim]
    layouts += [[Shard(2), Shard(3)]] if mesh.ndim == 2 else []
    for layout in layouts:
        x = shard(torch.randn(2, 4, 8, 8), mesh, layout)
        for name, call in WITH_WEIGHTS.items():
            with ShardTensor.promotion_mode("disabled"):
                with pytest.raises(ValueError, match="got a plain tensor"):
                    call(x)
                    pytest.fail(name)
            with ShardTensor.promotion_mode("warn"):
                with pytest.warns(UserWarning, match="auto-promoting a plain"):
                    call(x)


@ranks(2)
def test_what_is_sharded_already_needs_no_promotion(mesh):
    x, target = torch.randn(6, 3), torch.tensor([0, 2, 1, 1, 0, 2])
    cut = [shard(t, mesh, [Shard(0)]) for t in (x, target)]
    with ShardTensor.promotion_mode(TensorPromotionMode.DISABLED):
        loss = F.cross_entropy(*cut)
    assert_close(loss, F.cross_entropy(x, target))


def plain_values(i):
    """Values that may be the same on all ranks; those of another i differ."""
    nan, inf = math.nan, math.inf
    yield torch.tensor([[nan, 1.0], [nan, 2.0]][i])
    yield torch.tensor([[1.0, nan], [1.0, inf]][i])
    yield torch.tensor([[inf, -inf], [-inf, inf]][i]).half()
    yield torch.tensor([2**53, 2**53 + i])
    yield torch.tensor([1 + 2j, 1 + (2 + i) * 1j])
    yield torch.tensor([True, i == 0])
    yield torch.tensor([1.0, 1.0 + i * 2.0**-7], dtype=torch.bfloat16)


@ranks(2, 3)
def test_check_mode_finds_promoted_tensors_that_differ(mesh):
    import shardtensor

    s = shard(torch.randn(6, 2), mesh, [Shard(0)])
    with shardtensor.check_mode():
        s * torch.ones(2)
        with pytest.raises(ValueError, match="must be equal on all ranks"):
            s * torch.full((2,), float(dist.get_rank()))
        for same in plain_values(0):
            s == same  # noqa: B015
        first = dist.get_rank() == 0
        for one, other in zip(plain_values(0), plain_values(1), strict=True):
            with pytest.raises(ValueError, match="must be equal on all ranks"):
                s == (one if first else other)  # noqa: B015
    assert not shardtensor.get_check_mode()


@ranks(2)
@pytest.mark.parametrize("policy", ["immediate", "coalesced"])
def test_gradient_policies_give_the_same_gradients(mesh, policy):
    import shardtensor

    with shardtensor.gradient_policy(policy):
        assert shardtensor.get_gradient_policy() == policy
        check_op(
            torch.nn.Linear(3, 2),
            sharded(torch.randn(5, 3, requires_grad=True), [Shard(0)]),
            mesh=mesh,
        )
    with pytest.raises(ValueError, match="'coalesced'"):
        shardtensor.set_gradient_policy("later")


@ranks(2)
def test_out_of_another_size_is_resized_in_a_fallback(mesh):
    x = torch.arange(6.0)
    index = shard(torch.tensor([1, 4, 2]), mesh, [Shard(0)])
    out = shard(torch.zeros(6), mesh, [Shard(0)])
    assert torch.take(x, index, out=out) is out
    assert_close(out, torch.tensor([1.0, 4.0, 2.0]))


@ranks(2)
def test_fallback_modes_count_warn_and_refuse(mesh):
    import shardtensor

    x = torch.randn(4, 4, dtype=torch.float64)
    s = shard(x, mesh, [Shard(0)])
    shardtensor.reset_fallback_counts()
    with shardtensor.fallback_mode("silent"), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.linalg.svdvals(s)
    with (
        shardtensor.fallback_mode("warn"),
        pytest.warns(UserWarning, match="has no rule for"),
    ):
        assert_close(torch.linalg.svdvals(s), torch.linalg.svdvals(x))
    with shardtensor.fallback_mode("warn"), warnings.catch_warnings():
        warnings.simplefilter("error")  # said once, whatever the sizes
        torch.linalg.svdvals(shard(torch.randn(5, 3), mesh, [Shard(0)]))
        shardtensor.reset_fallback_counts()
        with pytest.raises(UserWarning, match="Said once"):
            torch.linalg.svdvals(s)
    shardtensor.reset_fallback_counts()
    with shardtensor.fallback_mode("silent"):
        for _ in range(2):
            torch.linalg.svdvals(s)
    calls, elements = next(iter(shardtensor.fallback_counts().values()))
    assert calls == 2 and elements == 32
    with (
        shardtensor.fallback_mode("error"),
        pytest.raises(NotImplementedError, match="has no rule"),
    ):
        torch.linalg.svdvals(s)
    assert shardtensor.get_fallback_mode() == "warn"
    with pytest.raises(ValueError, match="expected 'error', 'warn' or 'silent'"):
        shardtensor.set_fallback_mode("loud")


# ---- the registries ---------------------------------------------------------

REGISTRIES = (
    "_function_registry",
    "_named_function_registry",
    "_dispatch_registry",
    "_dispatch_registry_by_name",
)


@ranks(2)
def test_a_registry_that_is_assigned_says_what_is_active(mesh):
    """As a fixture does that keeps tests apart."""
    x = torch.randn(6)
    s = shard(x, mesh, [Shard(0)])
    kept = {name: getattr(ShardTensor, name).copy() for name in REGISTRIES}
    assert not any(kept.values())
    ShardTensor.register_function_handler(torch.dot, lambda *_: "dot")
    ShardTensor.register_named_function_handler(
        "shardtensor_test.twice.default", lambda *_: "twice"
    )
    ShardTensor.register_dispatch_handler(torch.ops.aten.exp.default, torch.sin)
    registered = {name: getattr(ShardTensor, name).copy() for name in REGISTRIES}
    assert list(registered["_function_registry"]) == [torch.dot]
    assert torch.dot(s, s) == "dot" and twice(s) == "twice"
    assert_close(s.exp(), x.sin())

    for name, handlers in kept.items():
        setattr(ShardTensor, name, handlers)
    assert ShardTensor.__torch_function__ is torch._C._disabled_torch_function_impl
    assert_close(torch.dot(s, s), torch.dot(x, x))
    assert_close(s.exp(), x.exp())

    for name, handlers in registered.items():
        setattr(ShardTensor, name, handlers)
    ShardTensor._dispatch_registry_by_name = {"aten.tanh.default": torch.cos}
    assert torch.dot(s, s) == "dot" and twice(s) == "twice"
    assert_close(s.exp(), x.sin())
    assert_close(s.tanh(), x.cos())
    for name, handlers in kept.items():
        setattr(ShardTensor, name, handlers)
    assert_close(s.exp(), x.exp())
    assert_close(s.tanh(), x.tanh())


@ranks(1)
def test_an_operator_of_torchscript_alone_is_never_called(mesh):
    s = shard(torch.randn(6), mesh, [Shard(0)])
    op = torch.ops.aten.add.default
    ShardTensor.register_dispatch_handler(op, lambda *_: 1 / 0)
    assert op in ShardTensor._dispatch_registry
    assert (s + s).shape == (6,)
    ShardTensor.unregister_dispatch_handler(op)
    assert op not in ShardTensor._dispatch_registry
    with pytest.raises(ValueError, match="no dispatch handler for aten::add"):
        ShardTensor.unregister_dispatch_handler(op)


@ranks(1)
def test_patches_may_be_switched_on(mesh):
    ShardTensor._enable_shard_patches = True
    assert ShardTensor.patches_enabled()
