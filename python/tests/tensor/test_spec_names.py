"""What programs written for PhysicsNeMo ask of specs and of the class."""

import pytest
import torch
import torch.distributed as dist
from ranks import assert_close, ranks, shard, uneven
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import shardtensor
from shardtensor import (
    ShardTensor,
    ShardTensorSpec,
    compute_sharding_shapes_from_chunking_global_shape,
    patch_core,
)


def cut(mesh, dtype=torch.float64):
    """(the whole, a ShardTensor of it, unevenly cut along dim 0)"""
    x = torch.arange(14.0, dtype=dtype).reshape(7, 2)
    placements = [Shard(0), Replicate()][: mesh.ndim]
    return x, shard(x, mesh, placements, {0: uneven(7, mesh.size(0))})


# ---- members of _spec -------------------------------------------------------


@ranks(1, 2, 3)
def test_a_tensors_spec_takes_none_for_its_shapes_and_knows_them_still(mesh):
    x, s = cut(mesh)
    expected = {0: tuple((n, 2) for n in uneven(7, mesh.size()))}
    assert s._spec._sharding_shapes == expected
    assert s._spec._local_shape == s._spec.local_shape == s.to_local().shape
    s._spec._sharding_shapes = None
    spec = s._spec
    spec._sharding_shapes = None
    spec._sharding_shapes = {0: [list(shape) for shape in expected[0]]}
    assert spec._sharding_shapes == expected and spec == s._spec
    assert_close(s + 1, x + 1)
    with pytest.raises(ValueError, match="a spec cannot be changed"):
        spec._sharding_shapes = {0: [(9, 2)] * mesh.size()}


@ranks(2)
def test_setting_the_local_shape(mesh):
    _, s = cut(mesh)
    spec = s._spec
    spec.local_shape = torch.Size(spec.local_shape)
    with pytest.raises(TypeError, match="expected a torch.Size, got a tuple"):
        spec.local_shape = (3, 2)
    with pytest.raises(ValueError, match="this rank's piece has"):
        spec.local_shape = torch.Size([9, 2])


@ranks("2x2")
def test_axes_that_do_not_shard_have_no_shapes(mesh):
    s = shard(torch.ones(5, 4), mesh, [Replicate(), Shard(0)])
    assert s._spec._sharding_shapes == {1: ((3, 4), (2, 4))}


# ---- specs of one's own -----------------------------------------------------


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("told", ["shapes", "local", "nothing"])
def test_a_spec_in_physicsnemos_form_makes_a_tensor(mesh, told):
    x, s = cut(mesh)
    known = {
        "shapes": {"_sharding_shapes": s._spec.sharding_shapes()},
        "local": {"_local_shape": s._spec.local_shape},
        "nothing": {},
    }[told]
    spec = ShardTensorSpec(
        mesh=mesh, placements=s.placements, tensor_meta=s._spec.tensor_meta, **known
    )
    local = s.to_local().clone()
    shardtensor.reset_comm_stats()
    if told != "nothing":  # a rank may look at it alone
        assert spec == s._spec and repr(spec) == repr(s._spec)
    made = ShardTensor(local, spec, requires_grad=True)
    assert made.is_leaf and made.requires_grad
    assert (shardtensor.comm_stats().all_reduces == 0) == (
        told != "nothing" or mesh.size() == 1
    )
    assert made._spec == s._spec and made._spec.sizes() == s._spec.sizes()
    assert_close(made, x)
    made.square().sum().backward()
    assert_close(made.grad, 2 * x)


@ranks("2x2", "1x2", "2x1")
@pytest.mark.parametrize("told", ["shapes", "local", "nothing"])
def test_physicsnemos_form_of_two_axes(mesh, told):
    rows, columns = uneven(7, mesh.size(0)), uneven(5, mesh.size(1))
    both = uneven(7, mesh.size())
    x = torch.arange(35.0, dtype=torch.float64).reshape(7, 5)
    for placements, sizes in (
        ([Shard(0), Shard(1)], {0: rows, 1: columns}),
        (
            [Shard(1), Shard(0)],
            {1: uneven(5, mesh.size(0)), 0: uneven(7, mesh.size(1))},
        ),
        ([Shard(0), Shard(0)], {0: both}),
        ([Replicate(), Shard(1)], {1: columns}),
        ([Replicate(), Replicate()], None),
    ):
        s = shard(x, mesh, placements, sizes)
        known = {
            "shapes": {"_sharding_shapes": s._spec._sharding_shapes},
            "local": {"_local_shape": s._spec.local_shape},
            "nothing": {},
        }[told]
        spec = ShardTensorSpec(
            mesh=mesh, placements=placements, tensor_meta=s._spec.tensor_meta, **known
        )
        made = ShardTensor(s.to_local().clone(), spec)
        assert made._spec == s._spec
        assert_close(made, x)


@ranks(2)
def test_the_constructor_cuts_the_history_and_refuses_what_does_not_fit(mesh):
    x, s = cut(mesh)
    local = s.to_local().clone().requires_grad_()
    made = ShardTensor(local * 2, s._spec, requires_grad=False)
    assert not made.requires_grad
    assert_close(made, 2 * x)
    with pytest.raises(TypeError, match="made by ShardTensor.from_local"):
        ShardTensor(local, None)
    spec = ShardTensorSpec(
        mesh=mesh, placements=s.placements, tensor_meta=s._spec.tensor_meta
    )
    assert repr(spec).startswith("OpenSpec(mesh=") and spec.local_shape is None
    with pytest.raises(AttributeError, match="pieces are not known, so it has no 'siz"):
        spec.sizes()
    with pytest.raises(TypeError, match="expected a torch.Size, got a list"):
        spec.local_shape = [3, 2]
    spec.local_shape = torch.Size([3, 2])
    with pytest.raises(ValueError, match=r"says \(3, 2\), the tensor has \(\d, 2\)"):
        ShardTensor(local, spec)
    with pytest.raises(ValueError, match="expected one placement"):
        ShardTensorSpec(mesh=mesh, placements=[], tensor_meta=s._spec.tensor_meta)
    with pytest.raises(AttributeError, match="no attribute 'shapes'"):
        s._spec.shapes  # noqa: B018


@ranks(3, "2x2")
def test_shapes_of_an_even_cut(mesh):
    placements = [Shard(0), Shard(1)][: mesh.ndim]
    shapes = compute_sharding_shapes_from_chunking_global_shape(
        mesh, placements, (7, 5)
    )
    x = torch.arange(35.0).reshape(7, 5)
    s = shardtensor.distribute_tensor(x, mesh, placements)
    assert shapes == {a: list(s._spec.sharding_shapes(a)) for a in range(mesh.ndim)}
    made = ShardTensor.from_local(s.to_local(), mesh, placements, shapes)
    assert made._spec == s._spec
    with pytest.raises(ValueError, match="expected one placement for each"):
        compute_sharding_shapes_from_chunking_global_shape(mesh, [Shard(0)] * 3, (7, 5))


@ranks(2, 3)
def test_a_compilers_gradient_is_brought_to_the_layout_that_it_recorded(mesh):
    x, s = cut(mesh)
    whole = shard(x, mesh, [Replicate()])
    terms = ShardTensor.from_local(x.clone(), mesh, [Partial()])
    assert s.__coerce_same_metadata_as_tangent__(s._spec) is s
    assert s.__coerce_same_metadata_as_tangent__(s._spec, torch.Tensor) is None
    for given, expected in ((s, x), (whole, x), (terms, mesh.size() * x)):
        for wanted in (s._spec, whole._spec):
            found = given.__coerce_same_metadata_as_tangent__(wanted)
            assert found._spec == wanted
            assert_close(found, expected)
        with pytest.raises(
            RuntimeError, match="no gradient that is Partial, got Shard"
        ):
            given.__coerce_same_metadata_as_tangent__(terms._spec)
    assert s.__coerce_tangent_metadata__() is s
    assert terms.__coerce_tangent_metadata__().placements == (Replicate(),)


# ---- from_dtensor -----------------------------------------------------------


@ranks(2)
def test_a_dtensor_leaf_and_its_shard_tensor_both_have_a_gradient(mesh):
    x = torch.arange(6.0)
    leaf = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    s = ShardTensor.from_dtensor(leaf)
    (s * s).sum().backward()
    assert_close(s.grad, 2 * x)
    assert_close(leaf.grad.full_tensor(), 2 * x)
    assert ShardTensor.from_dtensor(s) is s
    inner = ShardTensor.from_dtensor(leaf * 2)
    inner.sum().backward()
    assert not inner.retains_grad


# ---- patch_core -------------------------------------------------------------


def test_promote_to_iterable():
    promote = patch_core.promote_to_iterable
    assert promote(2, [1, 1]) == [2, 2] and promote(2, (1, 1, 1)) == (2, 2, 2)
    assert promote([3, 4], (1, 1)) == [3, 4] and promote("same", (1,)) == "same"
    with pytest.raises(ValueError, match="expected 2 values, got 3"):
        promote((1, 2, 3), (0, 0))
    assert issubclass(shardtensor.MissingShardPatch, NotImplementedError)
    assert issubclass(shardtensor.UndeterminedShardingError, Exception)


def test_what_programs_ask_for():
    assert shardtensor.ST_AVAILABLE is True
    assert shardtensor.register_custom_ops() is None


@ranks(2)
def test_partial_specs_have_their_form_too(mesh):
    rank = dist.get_rank()
    s = ShardTensor.from_local(torch.full((2,), float(rank)), mesh, [Partial()])
    spec = ShardTensorSpec(
        mesh=mesh,
        placements=[Partial()],
        tensor_meta=s._spec.tensor_meta,
        _local_shape=torch.Size([2]),
    )
    made = ShardTensor(s.to_local(), spec, requires_grad=False)
    assert_close(made, torch.ones(2))
