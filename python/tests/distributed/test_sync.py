"""sync_module_over_mesh: equal parameters on all ranks of an axis."""

import copy

import pytest
import rig
import torch
import torch.distributed as dist
from ranks import assert_close, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import shardtensor
from shardtensor import sync, sync_module_over_mesh


class Everything(torch.nn.Module):
    """State of several dtypes and shapes, different on every rank."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = torch.nn.Linear(3, 5)
        self.small = torch.nn.Parameter(torch.randn(3).bfloat16())
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("flags", torch.rand(7) > 0.5)
        self.register_buffer("turned", torch.randn(2, 3, dtype=torch.complex64).t())
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("none", torch.empty(0, 4))
        self.tied = self.layer.weight


def same(model, seed):
    expected = Everything(seed).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@ranks(1, 2, 3)
@pytest.mark.parametrize("verify", [False, True])
def test_every_rank_gets_the_sources_state_in_place(mesh, verify):
    for source in range(mesh.size()):
        model = Everything(seed=dist.get_rank())
        held = dict(model.named_parameters())
        assert sync_module_over_mesh(model, mesh, source, verify=verify) is None
        same(model, source)
        assert all(p is held[n] for n, p in model.named_parameters())
        assert model.turned.stride() == (1, 3)


@ranks("2x2")
def test_the_source_is_a_position_of_the_axis_and_other_groups_stay_apart(mesh):
    model = Everything(seed=dist.get_rank())
    sync_module_over_mesh(model, mesh["domain_w"], src_mesh_rank=1, verify=True)
    same(model, 2 * mesh.get_local_rank(0) + 1)


@ranks(2)
def test_large_state_travels_in_buckets(mesh):
    kept, sync.BUCKET = sync.BUCKET, 40
    try:
        model = Everything(seed=dist.get_rank())
        buckets = list(sync._buckets(list(model.parameters())))
        assert len(buckets) == 4 and all(buckets)
        sync_module_over_mesh(model, mesh, 1)
        same(model, 1)
    finally:
        sync.BUCKET = kept


@ranks(2)
def test_distributed_tensors_stay(mesh):
    rank = dist.get_rank()
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, rank)
    x = torch.arange(4.0)
    model.dtensor = torch.nn.Parameter(distribute_tensor(x, mesh, [Replicate()]))
    model.register_buffer(
        "cut", shardtensor.ShardTensor.from_local(torch.full((2,), rank), mesh)
    )
    sync_module_over_mesh(model, mesh, verify=True)
    assert model.weight.sum() == 0 and model.cut.to_local().tolist() == [rank, rank]
    assert isinstance(model.dtensor, DTensor)
    del model.weight, model.bias
    with pytest.raises(RuntimeError, match="none of it is plain"):
        sync_module_over_mesh(model, mesh)


@ranks(2)
def test_without_state_there_is_nothing_to_do(mesh):
    sync_module_over_mesh(torch.nn.ReLU(), mesh, verify=True)


@ranks(2, 3)
def test_modules_that_differ_are_an_error_on_all_ranks(mesh):
    last = dist.get_rank() == mesh.size() - 1
    for mine in (
        torch.nn.Linear(2, 3 if last else 4),
        torch.nn.Linear(2, 3, dtype=torch.float64 if last else torch.float32),
        torch.nn.ModuleDict({"b" if last else "a": torch.nn.Linear(2, 3)}),
        torch.nn.Linear(2, 3) if last else torch.nn.ReLU(),
    ):
        with pytest.raises(RuntimeError, match="metadata differs"):
            sync_module_over_mesh(mine, mesh)


@ranks(2)
def test_what_one_rank_refuses_all_refuse(mesh):
    device = "meta" if dist.get_rank() == 1 else mesh.device_type
    model = torch.nn.Linear(2, 3, device=device)
    with pytest.raises(RuntimeError, match=r"weight is a meta tensor \(on mesh rank 1"):
        sync_module_over_mesh(model, mesh)
    first = dist.get_rank() == 0
    model = torch.nn.Linear(2, 3)
    elsewhere = copy.copy(mesh)
    elsewhere._device_type = "xla"
    for wrong, error, text in (
        ((model, mesh, dist.get_rank()), ValueError, "ranks were told different"),
        ((model, mesh, 0, first), ValueError, "'verify': True"),
        ((model, mesh, 2 if first else 0), ValueError, r"outside .* \(on mesh rank 0"),
        ((model, mesh, 0 if first else "1"), TypeError, "expected an int, got '1'"),
        ((model, elsewhere), RuntimeError, "weight is on .*, the mesh on xla"),
    ):
        with pytest.raises(
            error, match=f"(?s)^sync_module_over_mesh: .*{text}"
        ) as told:
            sync_module_over_mesh(*wrong)
        everyones = [None, None]
        dist.all_gather_object(everyones, str(told.value))
        assert everyones[0] == everyones[1]


@ranks(2)
def test_wrong_calls(mesh):
    model = torch.nn.Linear(2, 3)
    with pytest.raises(ValueError, match="src_mesh_rank 2 is outside a mesh of 2"):
        sync_module_over_mesh(model, mesh, 2)
    with pytest.raises(ValueError, match="expected a 1-D mesh"):
        grid = init_device_mesh(rig.DEVICE, (2, 1), mesh_dim_names=("a", "b"))
        sync_module_over_mesh(model, grid)
    fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match="an FSDP2 module already"):
        sync_module_over_mesh(model, mesh)


@ranks(2)
def test_verify_finds_values_that_did_not_arrive(mesh):
    nan, inf = float("nan"), float("inf")
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[nan, inf], [1.0, 2.0]]))
        model.bias.zero_()
    sync_module_over_mesh(model, mesh, verify=True)
    kept, sync._broadcast = sync._broadcast, lambda *_: None
    try:
        with torch.no_grad():
            model.bias[0] = dist.get_rank()
        with pytest.raises(RuntimeError, match=r"checksums differ: \['bias'\]"):
            sync_module_over_mesh(model, mesh, verify=True)
        # Of the same sum of finite values, but other numbers of NaN or infinities.
        for here, there in ((nan, 0.0), (inf, 0.0), (nan, inf)):
            with torch.no_grad():
                model.bias[0] = there if dist.get_rank() else here
            with pytest.raises(RuntimeError, match="checksums differ"):
                sync_module_over_mesh(model, mesh, verify=True)
    finally:
        sync._broadcast = kept
    assert_close(model.bias.detach()[1:], torch.zeros(1))
