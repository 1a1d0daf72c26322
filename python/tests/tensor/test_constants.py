"""Tensors that a program makes to fill them: new_tensors_on, x.new_zeros."""

import copy
import io
import pickle

import numpy
import pytest
import torch
from fourier import Spectral
from ranks import assert_close, check_op, partitions, ranks, shard, sharded, uneven
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardtensor.io
from shardtensor import ShardTensor, new_tensors_on


def values(*shape):
    return torch.randn(shape, dtype=torch.float64)


def memory(x):
    """The elements that this rank holds memory for."""
    return x._local_tensor.untyped_storage().nbytes() // x.element_size()


class Within(torch.nn.Module):
    """A function or module, on shards within the mode."""

    def __init__(self, mesh, fn):
        super().__init__()
        self.mesh, self.fn = mesh, fn

    def __deepcopy__(self, memo):
        return Within(self.mesh, copy.deepcopy(self.fn, memo))

    def forward(self, x):
        if not isinstance(x, ShardTensor):
            return self.fn(x)
        with new_tensors_on(self.mesh):
            return self.fn(x)


@ranks(1, 2, "2x2")
def test_factories_give_what_they_give_without_memory(mesh):
    like = torch.ones(2, 3, dtype=torch.int32)
    calls = {
        "zeros": lambda: torch.zeros(4, 5),
        "zeros of a size": lambda: torch.zeros((4, 5), dtype=torch.cfloat),
        "ones": lambda: torch.ones(4, dtype=torch.bool),
        "full": lambda: torch.full((3, 2), 7),
        "full by name": lambda: torch.full(
            (3, 2), fill_value=2.5, device=mesh.device_type
        ),
        "0-d": lambda: torch.zeros(()),
        "no elements": lambda: torch.zeros(0, 3),
        "empty": lambda: torch.empty(4, 5).fill_(1),
        "zeros_like": lambda: torch.zeros_like(like),
        "ones_like": lambda: torch.ones_like(like, dtype=torch.float64),
        "full_like": lambda: torch.full_like(like, 3),
        "empty_like": lambda: torch.empty_like(like).zero_(),
        "new_zeros": lambda: like.new_zeros(4, 2),
        "new_ones": lambda: like.new_ones((4, 2), dtype=torch.half),
        "new_full": lambda: like.new_full((4, 2), 3),
        "new_empty": lambda: like.new_empty(5).fill_(2),
        "leaf": lambda: torch.ones(3, requires_grad=True),
        "repeat": lambda: torch.tensor(2.5).repeat(4, 5),
        "repeat of a size": lambda: torch.as_tensor(0).repeat([3]),
        "repeat by name": lambda: torch.tensor(True).repeat(repeats=(2, 3)),
    }
    for name, call in calls.items():
        expected = call()
        with new_tensors_on(mesh):
            made = call()
        assert isinstance(made, ShardTensor), name
        assert made.requires_grad == expected.requires_grad, name
        assert made.stride() == expected.stride() and made.is_leaf, name
        if "empty" not in name:
            assert memory(made) == 1, name
        assert_close(made, expected, what=name)
        assert_close(made + 1, expected + 1, what=name)
        assert_close(made.sum(), expected.sum(), what=name)
        assert_close(made.to_local(), expected, what=name)
    with new_tensors_on(mesh), pytest.raises(RuntimeError, match="negative dim"):
        torch.zeros(-2, 3)
    assert type(torch.zeros(2)) is torch.Tensor


@ranks(2)
def test_what_stays_plain_within_it(mesh):
    x = shard(values(4, 3), mesh, [Shard(0)])
    given = torch.ones(2)
    with new_tensors_on(mesh):
        for plain in (
            torch.zeros(2, device="meta"),
            torch.zeros(2, out=given),
            torch.tensor([1.0]),
            torch.zeros(2, layout=torch.sparse_coo, device="cpu"),
            torch.empty(1, 2, 3, 3, memory_format=torch.channels_last),
            torch.randn(2),
            torch.tensor([1.0]).repeat(4),
            torch.tensor(1.0, requires_grad=True).repeat(4),
            torch.tensor(1.0, device="meta").repeat(4),
        ):
            assert type(plain) is torch.Tensor
        number = torch.tensor(2.0)
        repeated = number.repeat(4)
        number.zero_()
        assert_close(repeated, torch.full((4,), 2.0))
        assert torch.zeros_like(x)._spec == x._spec
        assert memory(torch.zeros_like(x)) == x.to_local().numel()
    with pytest.raises(ValueError, match="device_mesh"), new_tensors_on():
        pass


def program(x, make):
    """Writes of all kinds, and views from before the first write."""
    out = make(2, 6, 8)
    part, turned, row, rest = out[:, :, :5], out.mT, out[0, 3], out[1:, ::2]
    alias = out.detach()
    assert float((out + 0).sum()) == 0
    part.copy_(x)
    out[:, 1:4, 6:] += x[:, 1:4, :2]
    turned[:, 7].add_(x[:, :, 0], alpha=2)
    assert torch.equal(alias, out.detach())
    return out.sin(), part * part, turned + 1, row, rest


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("order", ["mode", "new_zeros"])
def test_views_and_aliases_show_what_was_written(mesh, order):
    x = values(2, 6, 5).requires_grad_()

    def by_mode(x):
        return program(x, lambda *shape: torch.zeros(shape, dtype=torch.float64))

    def by_new_zeros(x):
        return program(x, x.new_zeros)

    shardtensor.set_fallback_mode("silent")
    fn = by_mode if order == "mode" else by_new_zeros
    cuts = [([Partial()], {}), ([Replicate()], {}), ([Shard(0)], {})]
    cuts += [([Shard(1)], {1: sizes}) for sizes in partitions(6, mesh.size())]
    cuts += [([Shard(2)], {2: sizes}) for sizes in partitions(5, mesh.size())]
    if mesh.ndim == 2:
        cuts = [([Shard(1), Shard(2)], {2: [4, 1]}), ([Shard(2), Shard(2)], {})]
    fn = Within(mesh, fn)
    for placements, sizes in cuts:
        check_op(fn, sharded(x, placements, sizes), mesh=mesh, second_order=True)


@ranks(2, 3)
def test_a_written_constant_lies_as_the_value_does(mesh):
    rows = uneven(6, mesh.size())
    x = shard(values(2, 6, 5), mesh, [Shard(1)], {1: rows})
    shardtensor.reset_comm_stats()
    shardtensor.reset_fallback_counts()
    with new_tensors_on(mesh):
        out = torch.zeros(2, 6, 8, dtype=torch.float64)
        out[..., :5] = x
    assert shardtensor.comm_stats().bytes == 0
    assert shardtensor.fallback_counts() == {}
    assert out._spec.sizes() == {1: rows}
    assert memory(out) == 2 * rows[mesh.get_local_rank()] * 8
    with new_tensors_on(mesh):
        early = torch.zeros(2, 6, 8, dtype=torch.float64)
        view = early[..., :5]
        early.add_(1)
        view += x
    whole = torch.nn.functional.pad(x.full_tensor(), (0, 3))
    assert_close(out, whole)
    assert_close(early, whole + 1)  # Replicate: the first value was a number


# In-place and out= forms often miss PyTorch's pointwise tag.
WRITES = {
    "masked_fill_": lambda out, x: out.masked_fill_(x > 0, 1.0),
    "masked_fill_ with a number": lambda out, x: out.masked_fill_(x > 0, x.sum()),
    "masked_fill_ of a part": lambda out, x: out[:, 1:4].masked_fill_(
        x[:, 1:4] > 0, 1.0
    ),
    "a mask": lambda out, x: out.__setitem__(x > 0, 1.0),
    "copysign_": lambda out, x: out.copysign_(x),
    "gt_": lambda out, x: out.gt_(x),
    "gelu": lambda out, x: torch._C._nn.gelu(x, out=out),
    "where": lambda out, x: torch.where(x > 0, x, x + 1, out=out),
    "cumsum": lambda out, x: torch.cumsum(x, 0, out=out),
    "lists": lambda out, x: torch._foreach_add_([out], [x]),
    "addmm_": lambda out, x: out.addmm_(x, torch.ones(5, 5, dtype=x.dtype)),
    "addmv_": lambda out, x: out[:, 2].addmv_(x, torch.ones(5, dtype=x.dtype)),
    "mm": lambda out, x: torch.mm(x, torch.ones(5, 5, dtype=x.dtype), out=out),
    "sum": lambda out, x: torch.sum(x, 1, out=out[:, 1]),
    "cat": lambda out, x: torch.cat([x[:, 3:], x[:, :3]], 1, out=out),
}


@ranks(2, 3, "2x2")
def test_whatever_writes_a_constant_it_lies_as_the_value_does(mesh):
    rows = uneven(6, mesh.size())
    whole = values(6, 5)
    x = shard(whole, mesh, [Shard(0)] * mesh.ndim, {0: rows})
    for name, write in WRITES.items():
        expected = torch.zeros(6, 5, dtype=whole.dtype)
        write(expected, whole)
        with new_tensors_on(mesh), shardtensor.fallback_mode("error"):
            out = torch.zeros(6, 5, dtype=whole.dtype)
            write(out, x)
        assert memory(out) == x.to_local().numel(), name
        assert_close(out, expected, what=name)


@ranks(1, 2, 3)
def test_other_writes_and_reads_are_those_of_an_ordinary_tensor(mesh):
    shardtensor.set_fallback_mode("silent")
    x = values(6, 5).requires_grad_()

    def steps(x):
        wide = {"dtype": x.dtype}
        zeros, ones = torch.zeros(6, 5, **wide), torch.ones(6, 5, **wide)
        read = torch.cat([zeros, x, ones], 1) + ones[0, 0].clone() * x.sum()
        zeros[torch.tensor([4, 1])] = x[:2]
        ones.index_add_(0, torch.tensor([0, 0, 3]), x[3:])
        mask = torch.zeros(6, 5, dtype=torch.bool)
        mask[2:] = x.detach()[2:] > 0
        total = torch.zeros((), **wide)
        total += (x * mask).sum()
        bigger = torch.zeros(3, 6, 5, **wide)
        bigger += x  # broadcast
        scaled = torch.full((6, 5), 2.0, **wide).mul_(x).addcmul_(x, x)
        out = torch.empty(6, 5, **wide)
        torch.mul(x.detach(), 3, out=out)
        product = torch.ones(6, 5, **wide).addmm_(x, torch.ones(5, 5, **wide), beta=2)
        return read, zeros, ones, mask, total, bigger, scaled, out, product

    for sizes in partitions(6, mesh.size()):
        check_op(Within(mesh, steps), sharded(x, [Shard(0)], {0: sizes}), mesh=mesh)


@ranks(1, 2)
def test_versions_leaves_and_copies_are_pytorchs(mesh):
    x = shard(values(4, 3), mesh, [Shard(0)])
    with new_tensors_on(mesh):
        leaf = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            leaf += x
        (leaf * x).sum().backward()
        assert_close(leaf.grad, x.full_tensor())
        with torch.no_grad():
            leaf.copy_(x)
        assert_close(leaf, x.full_tensor())
        saved = torch.zeros(4, 3, dtype=torch.float64)
        weight = x.detach().requires_grad_()
        product = saved * weight
        saved.copy_(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        data = torch.zeros(4, 3, dtype=torch.float64)
        same, apart = data.data, copy.deepcopy(data)
        data.copy_(x)
        assert_close(same, x.full_tensor())
        assert_close(apart, torch.zeros(4, 3, dtype=torch.float64))
        local = torch.zeros(4, 3, dtype=torch.float64)
        held = local.to_local()
        local.copy_(x)
        assert_close(held, x.full_tensor())
    with torch.inference_mode(), new_tensors_on(mesh):
        out = torch.zeros(4, 5, dtype=torch.float64)
        part, columns = out[:, 1:4], out.unbind(1)
        part.copy_(x)
        assert_close(columns[1], x.full_tensor()[:, 0])
        assert_close(out, torch.nn.functional.pad(x.full_tensor(), (1, 1)))


@ranks(1, 2, 3, "2x2")
def test_a_fourier_layer_fills_shards(mesh):
    shardtensor.set_fallback_mode("silent")
    layer = Spectral(3, 2)
    x = values(4, 3, 6, 7).requires_grad_()
    cuts = [([Shard(dim)], {}) for dim in range(4)]
    if mesh.ndim == 2:
        cuts = [([Shard(2), Shard(3)], {}), ([Shard(0), Shard(2)], {})]
    for placements, sizes in cuts:
        shardtensor.reset_fallback_counts()
        layer_within = Within(mesh, copy.deepcopy(layer))
        check_op(layer_within, sharded(x, placements, sizes), mesh=mesh)
        assert "aten::copy_" not in shardtensor.fallback_counts()


def filled(x):
    out = torch.zeros(*x.shape[:-1], 8, dtype=x.dtype, device=x.device)
    out[..., :5] = x * x
    return (out.exp() * out).sin()


@ranks(1, 2, 3)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", ["forward", "both", "inside"])
def test_recomputation_gives_the_same_gradients(mesh, reentrant, around):
    shardtensor.set_fallback_mode("silent")
    x = values(6, 5).requires_grad_()
    filled(x).square().sum().backward()
    inside = new_tensors_on(mesh)(filled) if around == "inside" else filled
    for sizes in partitions(6, mesh.size()):
        part = shard(x, mesh, [Shard(0)], {0: sizes})
        shardtensor.reset_fallback_counts()
        if around == "inside":
            checkpoint(inside, part, use_reentrant=reentrant).square().sum().backward()
        elif around == "both":
            with new_tensors_on(mesh):
                y = checkpoint(filled, part, use_reentrant=reentrant)
                y.square().sum().backward()
        else:
            with new_tensors_on(mesh):
                y = checkpoint(filled, part, use_reentrant=reentrant)
            y.square().sum().backward()
        assert_close(part.grad, x.grad)
        assert shardtensor.fallback_counts() == {}


@ranks(2)
def test_one_hot_is_sharded_within_and_without(mesh):
    classes = torch.arange(8).remainder(3)
    for given in (shard(classes, mesh, [Shard(0)]), shard(classes, mesh, [Partial()])):
        for count in (-1, 3, 5):
            expected = torch.nn.functional.one_hot(classes, count)
            with new_tensors_on(mesh):
                assert_close(torch.nn.functional.one_hot(given, count), expected)
            assert_close(torch.nn.functional.one_hot(given, count), expected)
        with pytest.raises(RuntimeError, match="smaller than num_classes"):
            torch.nn.functional.one_hot(given, 2)
        with pytest.raises(RuntimeError, match="non-negative"):
            torch.nn.functional.one_hot(given - 1, 5)


@ranks(1, 2)
def test_transforms_follow_plain_tensors(mesh):
    shardtensor.set_fallback_mode("silent")
    x = values(6, 5)

    def loss(x):
        return filled(x).square().sum()

    expected = torch.func.grad(loss)(x)
    for sizes in partitions(6, mesh.size()):
        part = shard(x, mesh, [Shard(0)], {0: sizes})
        with new_tensors_on(mesh):
            given = torch.func.grad(loss)(part)
        assert_close(given, expected)


@ranks(2)
def test_only_a_plain_number_makes_a_constant(mesh):
    from shardtensor import _C
    from shardtensor.device_mesh import core_mesh

    with pytest.raises(TypeError, match=r"a plain 0-d tensor, got sizes \[2\]"):
        _C.constant(torch.zeros(2), core_mesh(mesh), [4])


def real_numbers(out, x):
    torch.view_as_real(out)[..., :3, 0] = x


def imaginary_parts(out, x):
    out.imag[..., :3] = x
    out.real[..., 1:4] += x


def numbers_of_half_the_size(out, x):
    out.view(torch.double)[..., 1:7:2] = x


def every_third_number(out, x):
    out.view(torch.double)[..., 3:10:3] = x


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize(
    "write",
    [real_numbers, imaginary_parts, numbers_of_half_the_size, every_third_number],
)
def test_complex_constants_take_real_numbers(mesh, write):
    def spectrum(x):
        out = torch.zeros(2, 6, 8, dtype=torch.cdouble)
        write(out, x)
        return torch.fft.ifft2(out, dim=(0, 1)), torch.fft.ifft(out)

    x = values(2, 6, 3).requires_grad_()
    dims = (1,) if mesh.ndim == 1 else (0, 1)
    check_op(Within(mesh, spectrum), sharded(x, [Shard(d) for d in dims]), mesh=mesh)
    with new_tensors_on(mesh):
        out = torch.zeros(2, 6, 8, dtype=torch.cdouble)
    torch.view_as_real(out).lerp_(torch.ones(2, 6, 8, 2, dtype=torch.double), 0.25)
    assert_close(out, torch.full((2, 6, 8), 0.25 + 0.25j, dtype=torch.cdouble))


@ranks(1, 2)
def test_real_constants_take_complex_numbers(mesh):
    x = values(6, 3)
    with new_tensors_on(mesh):
        pairs = torch.zeros(6, 5, 2, dtype=torch.double)
    torch.view_as_complex(pairs)[:, 1:4] = shard(x + 2j * x, mesh, [Shard(0)])
    expected = torch.zeros(6, 5, 2, dtype=torch.double)
    torch.view_as_complex(expected)[:, 1:4] = x + 2j * x
    assert_close(pairs, expected)


# ---- memory of what is plain already ----------------------------------------


def lazy_network():
    return torch.nn.Sequential(
        torch.nn.LazyConv2d(4, 3), torch.nn.LazyBatchNorm2d(), torch.nn.LazyLinear(2)
    )


@ranks(2)
@pytest.mark.parametrize("made_within", [False, True])
def test_a_lazy_module_makes_plain_parameters(mesh, made_within):
    x = torch.randn(2, 3, 7, 6)
    if made_within:
        with new_tensors_on(mesh):
            model = lazy_network()
    else:
        model = lazy_network()
    expected = lazy_network()
    torch.manual_seed(0)
    y = expected(x)
    y.sin().sum().backward()
    torch.manual_seed(0)
    with new_tensors_on(mesh), torch.device("cpu"):
        part = model(shard(x, mesh, [Shard(2)]))
    part.sin().sum().backward()
    assert_close(part, y)
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert type(own) is torch.nn.Parameter
        assert_close(own.grad, other.grad)
    assert {type(buffer) for buffer in model.buffers()} == {torch.Tensor}


@ranks(2)
def test_what_is_loaded_or_copied_stays_plain(mesh):
    x = torch.randn(3, 4)
    file = io.BytesIO()
    torch.save({"x": x, "weight": torch.nn.Parameter(x)}, file)
    with new_tensors_on(mesh):
        file.seek(0)
        loaded = torch.load(file)
        copies = [loaded["x"], copy.copy(x), pickle.loads(pickle.dumps(x))]
    for other in copies:
        assert type(other) is torch.Tensor
        assert torch.equal(other, x)
    assert type(loaded["weight"]) is torch.nn.Parameter


@ranks(2, 3, "2x2")
def test_this_package_makes_what_it_makes_without(mesh, tmp_path):
    """Pieces, which differ between ranks, and their numbers."""
    rows = torch.arange(3.0).unsqueeze(1)
    path = tmp_path / f"{mesh.get_rank()}.npy"
    numpy.save(path, numpy.zeros((1, 1), "f4"))
    array = shardtensor.io.open(path)
    first = rows if mesh.get_rank() == 0 else None
    cut = [Shard(0)] * mesh.ndim
    owners = torch.tensor([0, mesh.size() - 1, 0])
    with new_tensors_on(mesh):
        read = array.read(..., mesh, cut)
        made = shardtensor.zeros(3, 2, device_mesh=mesh, placements=cut)
        sent = shardtensor.scatter_tensor(first, 0, mesh, cut)
        told = shardtensor.distribute_tensor(rows, mesh, cut)
        found = shardtensor.io.statistics(array, mesh)
        nodes = shardtensor.partition_nodes(mesh, owners=owners)
    assert_close(read, rows[:1])  # one rank alone has a row
    assert_close(made, torch.zeros(3, 2))
    assert_close(sent, rows)
    assert_close(told, rows)
    assert type(found.mean) is torch.Tensor and found.count == 1
    assert_close(nodes, torch.tensor([0, 2, 1]))
