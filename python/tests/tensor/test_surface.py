"""What users do with any tensor: print, copy, save, index, convert."""

import copy
import io
import pickle

import numpy as np
import pytest
import rig
import torch
import torch.distributed as dist
from ranks import (
    assert_close,
    from_spec,
    partitions,
    ranks,
    run_isolated,
    shard,
    uneven,
)
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor


def numbered(*shape):
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).reshape(shape)


@ranks(1, 2, 3)
def test_printing_shows_the_piece_and_does_not_communicate(mesh):
    x = shard(numbered(4, 2).requires_grad_(), mesh, [Shard(0)])
    shardtensor.reset_comm_stats()
    if dist.get_rank() == 0:  # a rank may print alone
        text = repr(x)
        assert text.startswith(
            f"ShardTensor(shape=(4, 2), placements=(Shard(dim=0),), "
            f"requires_grad=True, Mesh({mesh.size()}: domain),"
        )
        assert "local=tensor([[0., 1.]" in text
        assert str(x) == text and f"{x}" == text
        assert "grad_fn=<" in repr(x * 2)
        assert "Partial(sum)" in repr(x.sum()) or mesh.size() == 1
    assert shardtensor.comm_stats().bytes == 0
    assert f"{x.sum():.2f}" == "28.00"


@ranks(1, 2, 3)
def test_deepcopy_keeps_layout_gradient_and_attributes(mesh):
    sizes = {0: uneven(6, mesh.size())}
    x = shard(numbered(6, 2).requires_grad_(), mesh, [Shard(0)], sizes)
    x.name_of_it = "pressure"
    (x * 2).sum().backward()
    y = copy.deepcopy(x)
    assert type(y) is ShardTensor and y is not x and y.requires_grad and y.is_leaf
    assert y._spec == x._spec and y.name_of_it == "pressure"
    assert y._local_tensor.numel() == 0 or (
        y._local_tensor.data_ptr() != x._local_tensor.data_ptr()
    )
    assert_close(y, x.full_tensor())
    assert_close(y.grad, x.grad.full_tensor())
    pair = copy.deepcopy([x, x])
    assert pair[0] is pair[1]
    x.limits, x.itself = [0.0, 1.0], x
    y, limits = copy.deepcopy([x, x.limits])
    assert y.limits is limits and limits is not x.limits and y.itself is y
    with pytest.raises(RuntimeError, match="leaf of the graph"):
        copy.deepcopy(x * 2)
    p = copy.deepcopy(torch.nn.Parameter(x.detach()))
    assert isinstance(p, torch.nn.Parameter) and isinstance(p, ShardTensor)


@ranks(1, 2, "2x2")
def test_pickle_and_torch_save_give_the_same_piece_back(mesh):
    placements = [Shard(0), Replicate()][: mesh.ndim]
    sizes = {0: uneven(7, mesh.size(0))}
    x = shard(numbered(7, 3).requires_grad_(), mesh, placements, sizes)
    x.note = "kept"
    for y in (pickle.loads(pickle.dumps(x)), saved_and_loaded(x)):
        assert type(y) is ShardTensor and y.requires_grad and y.note == "kept"
        assert y._spec == x._spec and y.device_mesh == mesh
        assert_close(y, x.full_tensor())


def saved_and_loaded(x):
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file)["x"]  # weights_only, the default


@ranks(1, 2)
def test_copies_and_files_keep_the_strides_of_one_device(mesh):
    image, matrix = numbered(2, 3, 4, 5), numbered(6, 8)
    for whole, make in (
        (image, lambda x: x.to(memory_format=torch.channels_last)),
        (matrix, lambda x: x.t()),
        (matrix, lambda x: x[:, ::2]),
        (numbered(6, 1), lambda x: x.expand(6, 4)),
    ):
        expected = make(whole)
        x = make(shard(whole, mesh, [Shard(0)])).detach()
        assert x.stride() == expected.stride()
        for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), saved_and_loaded(x)):
            assert y.stride() == copy.deepcopy(expected).stride()
            assert_close(y, expected)
            assert_close(y.clone(), expected.clone())


def save_in_one_job(folder):
    mesh = shardtensor.init_device_mesh(rig.DEVICE, (2,), mesh_dim_names=("domain",))
    x = shard(numbered(5, 2), mesh, [Shard(0)], {0: [4, 1]})
    torch.save(x, folder / f"{dist.get_rank()}.pt")


def load_in_another_job(folder):
    x = torch.load(folder / f"{dist.get_rank()}.pt")
    assert_close(x, numbered(5, 2))
    return x._spec.sizes()


def test_another_job_loads_what_one_job_saved(tmp_path):
    for job in (save_in_one_job, load_in_another_job):
        outcomes = run_isolated(2, job, tmp_path)
        assert [o.kind for o in outcomes] == ["ok", "ok"], outcomes
    assert outcomes[0].value == {0: [4, 1]}


@ranks(2)
def test_a_spec_is_a_value(mesh):
    spec = shard(numbered(4), mesh, [Shard(0)], {0: [3, 1]})._spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert copy.deepcopy(spec) is spec and copy.copy(spec) is spec
    assert spec._stable_hash_for_caching() == repr(spec._core)


@ranks(1, 2)
def test_what_one_piece_cannot_answer_names_the_way_out(mesh):
    x = shard(numbered(4, 2), mesh, [Shard(0)])
    for what in (
        lambda: x.numpy(),
        lambda: np.asarray(x),
        lambda: x.tolist(),
        lambda: x.data_ptr(),
        lambda: x.storage(),
        *([] if rig.DEVICE == "guarded" else [lambda: torch.from_dlpack(x)]),
        lambda: x.share_memory_(),
        lambda: x.resize_(2, 2),
        lambda: x.resize_as_(x[:2]),
        lambda: x.set_(x),
        lambda: x.as_strided((2,), (1,)),
        lambda: x.as_strided_((2,), (1,)),
    ):
        with pytest.raises(NotImplementedError, match=r"full_tensor\(\).*to_local\(\)"):
            what()


@ranks(2, 3, "2x2")
def test_functions_of_python_are_applied_to_every_element(mesh):
    if rig.DEVICE != "cpu":
        pytest.skip("PyTorch has these loops for the CPU alone")
    whole, plain = numbered(4, 3), numbered(3) / 8
    for placements in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()]):
        layout = [*placements, Replicate()][: mesh.ndim]

        def fresh(layout=layout):
            made = shard(whole, mesh, [Replicate()] * mesh.ndim)
            return made.redistribute(placements=layout)

        wanted = whole.clone().apply_(lambda x: 2 * x + 1)
        x = fresh()
        first = x[0]
        assert x.apply_(lambda x: 2 * x + 1) is x
        assert_close(x, wanted)
        assert_close(first, wanted[0])
        for other, wanted in ((plain, whole - 3 * plain), (fresh(), -2 * whole)):
            assert_close(fresh().map_(other, lambda a, b: a - 3 * b), wanted)
        with pytest.raises(RuntimeError, match="requires grad"):
            fresh().requires_grad_().apply_(abs)


@ranks(2)
def test_tensors_without_elements_are_resized(mesh):
    x = shard(numbered(4, 3), mesh, [Shard(0)])
    assert x.resize_(4, 3) is x and x.resize_as_(numbered(4, 3)) is x
    assert x.new().resize_as_(x).shape == x.shape
    empty = shard(numbered(0, 3), mesh, [Shard(0)])
    assert empty.resize_as_(empty).shape == (0, 3)
    assert empty.resize_(2, 2).shape == (2, 2)
    image = torch.randn(4, 5, 6, 6)  # resized to in a module of PyTorch's
    across = torch.nn.CrossMapLRN2d(3)
    assert_close(across(shard(image, mesh, [Shard(0)])), across(image))


@ranks(1, 3, "2x2")
def test_what_every_rank_has_whole_becomes_numbers(mesh):
    whole = numbered(4, 2)
    x = shard(whole, mesh, [Replicate()] * mesh.ndim)
    assert x.tolist() == whole.tolist()
    for array in (x.numpy(), np.asarray(x), np.array(x, dtype="f4")):
        assert np.array_equal(array, whole.numpy())
    x.numpy()[0, 0] = 7.0  # the same memory
    assert x[0, 0].item() == 7.0
    x.requires_grad_()
    for ask in (lambda: x.numpy(), lambda: np.asarray(x)):
        with pytest.raises(RuntimeError, match=r"requires grad.*detach\(\)"):
            ask()
    assert np.array_equal(x.detach().numpy(), x.full_tensor().detach().numpy())
    with shardtensor.new_tensors_on(mesh):
        made = torch.zeros(2, 3)
    made.numpy()[0] += 1.0
    assert made.tolist() == [[1.0] * 3, [0.0] * 3]
    term = from_spec(whole[0], shard(whole, mesh, [Shard(0)] * mesh.ndim).sum(0)._spec)
    with pytest.raises(NotImplementedError, match=r"Partial.*full_tensor\(\)"):
        term.numpy()


@ranks(1, 2)
def test_operators_without_a_meaning_on_pieces_say_why(mesh):
    x = shard(numbered(4, 2), mesh, [Shard(0)])
    aten = torch.ops.aten
    shardtensor.reset_fallback_counts()
    for what, why in (
        (lambda: aten.as_strided(x, [2, 2], [1, 1]), "no memory of its global sizes"),
        (lambda: aten.resize_(x, [2, 2]), "no memory of its global sizes"),
        (lambda: aten.resize_as_(x, x[:2]), r"from sizes \[4, 2\] to \[2, 2\]"),
        (lambda: x.to_sparse(), "aten::_to_sparse: .* strided boxes"),
        (lambda: x.to_sparse_csr(), "aten::_to_sparse_csr: .* strided boxes"),
        (lambda: x.to_sparse_coo(), "strided boxes"),
        (lambda: torch.nested.nested_tensor([x, x[:1]]), "rows of a nested tensor"),
        (lambda: torch.nested.as_nested_tensor([x]), "rows of a nested tensor"),
    ):
        with pytest.raises(NotImplementedError, match=rf"{why}.*to_local\(\)"):
            what()
    if rig.DEVICE != "guarded":  # which has no sparse tensors
        with pytest.raises(NotImplementedError, match=r"layout Sparse.*to_dense\(\)"):
            torch.ones(4, 2).double().to_sparse() * x
    edges, ones = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.ones(3)
    rows, values = torch.tensor([0, 1, 2, 3]), shard(ones, mesh, [Shard(0)])
    for make in (
        lambda: torch.sparse_coo_tensor(shard(edges, mesh, [Shard(1)]), ones, (3, 3)),
        lambda: torch.sparse_coo_tensor(edges, values),
        lambda: torch.sparse_coo_tensor(edges, values, check_invariants=True),
        lambda: torch.sparse_csr_tensor(rows, edges[1], values, (3, 3)),
        lambda: torch.sparse_csc_tensor(rows, edges[1], values, (3, 3)),
        lambda: torch.sparse_compressed_tensor(
            rows, edges[1], values, layout=torch.sparse_csr, check_invariants=True
        ),
    ):
        with pytest.raises(NotImplementedError, match=r"no sparse layout.*index_add"):
            make()
    assert shardtensor.fallback_counts() == {}  # before anything was gathered
    assert aten.resize_(x, [4, 2]) is x
    assert_close(x, numbered(4, 2))
    none = x[:0].clone()
    assert_close(aten.resize_(none, [3]).fill_(2), torch.full((3,), 2.0).double())


@ranks(1, 2)
def test_data_is_a_shard_tensor_and_takes_only_one(mesh):
    x = shard(numbered(4, 2), mesh, [Shard(0)])
    assert type(x.data) is ShardTensor
    x.data = x.data * 2
    assert_close(x, 2 * numbered(4, 2))
    with pytest.raises((TypeError, RuntimeError)):
        x.data = numbered(4, 2)
    plain = numbered(4, 2)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        plain.data = x
    assert_close(plain, numbered(4, 2))
    layer = torch.nn.Linear(2, 4)
    layer._apply(lambda p: shard(p.detach(), mesh, [Shard(0)]))
    assert type(layer.weight.data) is ShardTensor


@ranks(1, 2, 3)
def test_scalars_answer_like_any_tensor(mesh):
    x = shard(numbered(3, 2), mesh, [Shard(0)], {0: [3] + [0] * (mesh.size() - 1)})
    for scalar in (x.sum(), x.mean(), x[2, 1], x.max()):
        value = scalar.full_tensor().item()
        assert scalar.item() == value and float(scalar) == value
        assert int(scalar) == int(value) and bool(scalar) == bool(value)
        assert scalar.tolist() == value
    assert f"{x.sum():.2f}" == f"{x.sum().item():.2f}"
    assert f"{x}" == str(x)
    for other in (x, x.sum().to("meta")):
        with pytest.raises(TypeError, match="unsupported format string"):
            f"{other:.2f}"
    term = from_spec(torch.tensor(7.0), x.sum()._spec)
    assert term.item() == 7.0
    assert shard(torch.tensor([5.0]), mesh, [Shard(0)]).item() == 5.0
    if mesh.size() > 1:
        assert x.redistribute(placements=[Replicate()]).tolist is not None
    with pytest.raises(RuntimeError, match="(?i)ambiguous"):
        bool(x)


@ranks(1, 2, 3)
def test_len_iteration_indexing_and_comparison(mesh):
    whole = numbered(5, 4)
    for sizes in partitions(5, mesh.size()):
        x = shard(whole, mesh, [Shard(0)], {0: sizes})
        assert len(x) == 5 and x.shape == (5, 4) and x.numel() == 20
        assert x.size(0) == 5 and x.dim() == 2 and x.is_contiguous()
        for row, expected in zip(x, whole, strict=True):
            assert isinstance(row, ShardTensor)
            assert_close(row, expected)
        for index in (2, -1, slice(1, 4), (slice(None), 1), ..., None, (2, 3)):
            assert_close(x[index], whole[index])
        y = x * x
        assert_close(x == y, whole == whole * whole)
        assert_close(x < 5, whole < 5)
        assert torch.equal(x, x.clone()) and not torch.equal(x, y)
        assert torch.equal(x, x.long()) and not torch.equal(x, y.long())
        assert torch.allclose(x, x + 1e-12) and (x == x).all()
        assert x in [x] and hash(x) == id(x)


@ranks(1, 2)
def test_new_tensors_and_conversions(mesh):
    x = shard(numbered(4, 2), mesh, [Shard(0)])
    assert type(x.new_tensor([1, 2])) is torch.Tensor
    assert x.new_tensor([1, 2]).dtype == torch.float64
    assert x.new_tensor([1], dtype=torch.int32).dtype == torch.int32
    sized = x.new(size=(4, 2))
    for made in (sized, x.new(4, 2), x.new(x.shape), x.new(x.shape, device=x.device)):
        assert type(made) is ShardTensor and made._spec == x._spec
        assert made.dtype == torch.float64
    assert x.new().shape == x.new(0).shape == (0,)
    assert x.new([4, 2]).tolist() == x.new((4, 2)).tolist() == [4, 2]
    assert x.float().dtype == torch.float32 and isinstance(x.float(), ShardTensor)
    assert_close(x.to(torch.float32), numbered(4, 2).float())
    assert x.cpu().device.type == "cpu" and x.type() == numbered(4, 2).type()
    assert_close(x.type(torch.float32), numbered(4, 2).float())
    assert x.element_size() == 8 and x.nbytes == 64
    assert_close(torch.zeros_like(x) + 1, torch.ones(4, 2, dtype=x.dtype))


@ranks(1, 2)
def test_modules_and_optimizers_hold_shard_tensors(mesh):
    class Field(torch.nn.Module):
        def __init__(self, x):
            super().__init__()
            self.field = torch.nn.Parameter(x)
            self.register_buffer("mask", x.detach() > 2)

        def forward(self):
            return (self.field * self.mask).square().sum()

    whole = Field(numbered(6, 2))
    part = Field(shard(numbered(6, 2), mesh, [Shard(0)]))
    assert isinstance(part.field, ShardTensor)
    assert isinstance(part.field, torch.nn.Parameter)
    for make in (torch.optim.SGD, torch.optim.AdamW):
        optimizers = [make(m.parameters(), lr=0.1) for m in (whole, part)]
        for module, optimizer in zip((whole, part), optimizers, strict=True):
            for _ in range(2):
                optimizer.zero_grad()
                module().backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 5.0)
                optimizer.step()
        assert_close(part.field, whole.field)
    state = part.state_dict()
    assert isinstance(state["field"], ShardTensor)
    other = Field(shard(numbered(6, 2), mesh, [Shard(0)]))
    other.load_state_dict(state)
    assert_close(other.field, whole.field)
    assert part.to(torch.float32).field.dtype == torch.float32
    assert_close(part.field, whole.field.float())


@ranks(2)
def test_partial_terms_are_told_apart_from_values(mesh):
    x = shard(numbered(3), mesh, [Partial()])
    assert_close(x, numbered(3))
    assert_close(x * 2, 2 * numbered(3))
    assert_close(x + 1, numbered(3) + 1)
    assert_close(x.exp(), numbered(3).exp())


@ranks(2)
def test_another_piece_keeps_what_the_tensor_shows(mesh):
    images = numbered(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    x = shard(numbered(2, 3, 4, 4), mesh, [Shard(2)])
    x = x.contiguous(memory_format=torch.channels_last)
    x._local_tensor = x._local_tensor * 2
    assert_close(x, images * 2)
    assert x.stride() == images.stride()
    with pytest.raises(TypeError, match="expected double on .*, got float"):
        x._local_tensor = x._local_tensor.float()
    with pytest.raises(ValueError, match="expected sizes"):
        x._local_tensor = x._local_tensor[:1]


def test_no_layout_is_an_error():
    from shardtensor import _C

    for call in (
        lambda: _C.with_placements(None, []),
        lambda: _C.infer_even_spec(None, [], []),
        lambda: _C.infer_spec_along_axes(None, [], [], []),
        lambda: _C.unflatten(torch.zeros(2), None, []),
        lambda: _C.has_axes(None, None),
    ):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            call()
