"""opt_einsum, tensorly and einops on ShardTensors, unmodified."""

import pytest
import torch
from layouts import ALL, check
from ranks import assert_close, check_op, ranks, shard, sharded, uneven
from torch.distributed.tensor import Replicate, Shard

import shardtensor

F64 = torch.float64
# The wide ones have indices that are no letters.
WIDE = "".join(chr(n) for n in range(400, 403))
EQUATIONS = ["ij,jk,kl->il", "bij,bjk->bik", "ij,ij->", "i,j->ij", "ij,jk,k->i"]


def operands(equation, seed=0):
    """One random tensor for each term; every index has its own extent."""
    torch.manual_seed(seed)
    terms = equation.split("->")[0].split(",")
    extent = {c: 4 + i for i, c in enumerate(dict.fromkeys("".join(terms)))}
    return [
        torch.randn([extent[c] for c in term], dtype=F64, requires_grad=True)
        for term in terms
    ]


# ---- opt_einsum -------------------------------------------------------------


@ranks(*ALL)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_contract_takes_any_operand_cut(mesh, equation):
    opt_einsum = pytest.importorskip("opt_einsum")
    inputs = operands(equation)
    for cut, x in enumerate(inputs):
        for dim in range(x.dim()):
            given = list(inputs)
            given[cut] = sharded(x, [Shard(dim)] * mesh.ndim)
            check_op(lambda *xs: opt_einsum.contract(equation, *xs), *given, mesh=mesh)


@ranks(2)
def test_contract_stays_off_numpy_and_gathers_nothing(mesh):
    opt_einsum = pytest.importorskip("opt_einsum")
    x, y, z = operands("ij,jk,kl->il")
    s = shard(x, mesh, [Shard(0)], {0: uneven(4, mesh.size())})
    with shardtensor.fallback_mode("error"):
        result = opt_einsum.contract("ij,jk,kl->il", s, y, z)
    assert isinstance(result, shardtensor.ShardTensor)
    assert result.placements == (Shard(0),)
    assert opt_einsum.backends.has_einsum("shardtensor")
    assert_close(result, x @ y @ z)


@ranks(2)
def test_contract_knows_indices_that_are_no_letters(mesh):
    opt_einsum = pytest.importorskip("opt_einsum")
    a, b, c = WIDE
    equation = f"{a}{b},{b}{c}->{a}{c}"
    inputs = [torch.randn(4, 5, dtype=F64), torch.randn(5, 6, dtype=F64)]
    check_op(
        lambda x, y: opt_einsum.contract(equation, x, y),
        sharded(inputs[0], [Shard(1)]),
        inputs[1],
        mesh=mesh,
    )


@ranks(2, 3)
def test_expressions_keep_constants(mesh):
    opt_einsum = pytest.importorskip("opt_einsum")
    x, y, z = (t.detach() for t in operands("ij,jk,kl->il"))
    s = shard(x, mesh, [Shard(1)])
    expression = opt_einsum.contract_expression(
        "ij,jk,kl->il", x.shape, y, z, constants=[1, 2]
    )
    assert_close(expression(s, backend="torch"), x @ y @ z)
    held = opt_einsum.contract_expression("ij,jk->ik", s, y.shape, constants=[0])
    assert_close(held(y), x @ y)


def test_the_functions_are_numpys():
    x = torch.arange(24.0).reshape(2, 3, 4)
    y = torch.arange(12.0).reshape(4, 3)
    assert shardtensor.transpose(x, (2, 0, 1)).shape == (4, 2, 3)
    axes = ([1, 2], [1, 0])
    torch.testing.assert_close(
        shardtensor.tensordot(x, y, axes=axes), torch.tensordot(x, y, axes)
    )
    torch.testing.assert_close(
        shardtensor.einsum("aé,é->a", y, x[0, :, 0]), y @ x[0, :, 0]
    )


# ---- tensorly ---------------------------------------------------------------


def tensorly_with_torch():
    tensorly = pytest.importorskip("tensorly")
    tensorly.set_backend("pytorch")
    return tensorly


def factors(rank=3):
    torch.manual_seed(1)
    return [torch.randn(n, rank, dtype=F64) for n in (4, 5, 6)]


@ranks(1, 2, 3, "2x2")
def test_tensorly_folds_and_multiplies(mesh):
    tl = tensorly_with_torch()
    first, second, third = factors()
    for fn in (
        lambda x: tl.unfold(x, 1),
        lambda x: tl.fold(tl.unfold(x, 2), 2, x.shape),
        lambda x: tl.tenalg.mode_dot(x, first.t(), 0),
        lambda x: tl.tenalg.multi_mode_dot(x, [first.t(), second.t(), third.t()]),
        lambda x: tl.tenalg.inner(x, x),
        lambda x: tl.norm(x),
        lambda x: tl.tenalg.unfolding_dot_khatri_rao(
            x, (None, [first, second, third]), 1
        ),
    ):
        check(mesh, (4, 5, 6), fn)


@ranks(1, 2, 3)
def test_tensorly_builds_tensors_from_cut_factors(mesh):
    tl = tensorly_with_torch()
    whole = [f.requires_grad_() for f in factors()]
    core = torch.randn(3, 3, 3, dtype=F64)
    for cut in range(3):
        given = list(whole)
        given[cut] = sharded(whole[cut], [Shard(0)])
        for fn in (
            lambda *f: tl.cp_to_tensor((None, list(f))),
            lambda *f: tl.tucker_to_tensor((core, list(f))),
            lambda *f: tl.tenalg.khatri_rao(list(f)),
        ):
            check_op(fn, *given, mesh=mesh)


@ranks(2)
def test_tensorly_decomposes_a_cut_tensor(mesh):
    tl = tensorly_with_torch()
    shardtensor.set_fallback_mode("silent")  # a singular value decomposition
    x = tl.cp_to_tensor((None, factors(2)))
    s = shard(x, mesh, [Shard(0)])
    weights, found = tl.decomposition.parafac(s, 2, init="svd", n_iter_max=200)
    assert_close(tl.cp_to_tensor((weights, found)), x, rtol=1e-4, atol=1e-4)


# ---- einops -----------------------------------------------------------------

REARRANGE = [
    ("b c h -> b h c", {}),
    ("b c h -> (b c) h", {}),
    ("b c (h s) -> b (c s) h", {"s": 2}),
    ("b c h -> b 1 c h", {}),
    ("(b a) c h -> a b c h", {"a": 2}),
]


@ranks(*ALL)
@pytest.mark.parametrize("pattern, lengths", REARRANGE)
def test_rearrange(mesh, pattern, lengths):
    einops = pytest.importorskip("einops")
    check(mesh, (4, 3, 6), lambda x: einops.rearrange(x, pattern, **lengths))


@ranks(*ALL)
@pytest.mark.parametrize("how", ["mean", "sum", "max", "min", "prod"])
def test_reduce(mesh, how):
    einops = pytest.importorskip("einops")
    for pattern in ("b c h -> b c", "b c h -> c", "b c (h s) -> b h"):
        lengths = {"s": 2} if "s" in pattern.split() or "(h s)" in pattern else {}
        check(mesh, (4, 3, 6), lambda x: einops.reduce(x, pattern, how, **lengths))  # noqa: B023


@ranks(1, 2, 3, "2x2")
def test_repeat_einsum_pack_and_unpack(mesh):
    einops = pytest.importorskip("einops")
    weight = torch.randn(6, 5, dtype=F64)
    check(mesh, (4, 3, 6), lambda x: einops.repeat(x, "b c h -> b c (h r)", r=2))
    check(mesh, (4, 3, 6), lambda x: einops.repeat(x, "b c h -> r b c h", r=3))
    check(mesh, (4, 3, 6), lambda x: einops.einsum(x, weight, "b c h, h k -> b k c"))

    def there_and_back(x):
        packed, shapes = einops.pack([x, x[..., 0]], "b *")
        return [packed, *einops.unpack(packed, shapes, "b *")]

    check(mesh, (4, 3, 6), there_and_back)


@ranks(1, 2, 3)
def test_layers(mesh):
    pytest.importorskip("einops")
    from einops.layers.torch import EinMix, Rearrange, Reduce

    torch.set_default_dtype(F64)
    model = torch.nn.Sequential(
        Rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2),
        EinMix("b n c -> b n k", weight_shape="c k", bias_shape="k", c=12, k=5),
        Reduce("b n k -> b k", "mean"),
    )
    x = torch.randn(2, 3, 8, 4, requires_grad=True)
    for dim in (1, 2, 3):
        check_op(model, sharded(x, [Shard(dim)]), mesh=mesh)
    check_op(model, sharded(x, [Replicate()]), mesh=mesh)
    scripted = torch.nn.Sequential(Rearrange("b c h w -> b (c h) w"))
    check_op(scripted, sharded(x, [Shard(2)], {2: uneven(8, mesh.size())}), mesh=mesh)


@ranks(2)
def test_parse_shape_and_asnumpy(mesh):
    einops = pytest.importorskip("einops")
    s = shard(torch.randn(4, 3, 6), mesh, [Shard(0)])
    assert einops.parse_shape(s, "b _ h") == {"b": 4, "h": 6}
    with pytest.raises(RuntimeError, match="full_tensor"):
        einops.asnumpy(s)
