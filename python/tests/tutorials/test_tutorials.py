"""The programs that PhysicsNeMo's pages teach, in our words: what their readers
have written runs with other import lines."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardtensor
from shardtensor import ShardTensor, scatter_tensor, sync_module_over_mesh
from shardtensor.distributed import DistributedManager

# ---- scattering and redistributing ------------------------------------------


@ranks(1, 2, 3, 4)
def test_a_tensor_of_one_rank_is_scattered_and_cut_another_way(mesh):
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((-1,), mesh_dim_names=["spatial"])

    torch.manual_seed(3)
    original = torch.randn(100, 64, device=dm.device)
    tensor = original if dm.rank == 0 else None
    sharded = scatter_tensor(tensor, global_src=0, mesh=mesh, placements=(Shard(0),))
    rows = sharded.to_local()
    assert rows.shape[1] == 64
    assert torch.equal(rows, original.chunk(dm.world_size, 0)[dm.rank])

    columns = sharded.redistribute(placements=(Shard(1),))
    assert columns.shape == (100, 64)
    assert columns.to_local().shape[0] == 100
    assert torch.equal(columns.full_tensor(), original)
    assert columns.offsets(0) == sum(
        part.shape[1] for part in original.chunk(dm.world_size, 1)[: dm.rank]
    )


# ---- the convolution --------------------------------------------------------


def test_a_convolution_of_two_halves_is_wrong_where_they_meet():
    image = torch.randn(1, 8, 64, 48).double()
    left, right = image[:, :, :32], image[:, :, 32:]
    conv = torch.nn.Conv2d(8, 8, 3, stride=1, padding=1).double()
    whole = conv(image)
    halves = torch.cat([conv(left), conv(right)], dim=2)
    wrong = torch.where((whole - halves).abs() > 1e-6)
    assert wrong[2].unique().tolist() == [31, 32]

    left = torch.cat([left, right[:, :, 0:1]], 2)
    right = torch.cat([image[:, :, 31:32], right], 2)
    halves = torch.cat([conv(left)[:, :, :-1], conv(right)[:, :, 1:]], dim=2)
    torch.testing.assert_close(halves, whole)


@ranks(1, 2, 4)
@pytest.mark.parametrize("distributed", [False, True])
def test_a_convolution_of_a_sharded_image_is_right(mesh, distributed):
    """The model as it is, or its parameters made DTensors."""
    DistributedManager.initialize()
    dm = DistributedManager()
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(8, 8, 3, stride=1, padding=1).to(dm.device)
    image = torch.randn(1, 8, 64, 48, device=dm.device, requires_grad=True)
    expected = conv(image)
    expected.mean().backward()
    weight_grad = conv.weight.grad.clone()
    conv.zero_grad()

    mesh = dm.initialize_mesh((-1,), mesh_dim_names=("domain_parallel",))
    sharded = scatter_tensor(image.detach(), 0, mesh, (Shard(2),), requires_grad=True)
    if distributed:
        conv = distribute_module(conv, mesh)
    output = conv(sharded)
    output.mean().backward()

    assert torch.allclose(output.full_tensor(), expected, atol=1e-6)
    assert torch.allclose(sharded.grad.full_tensor(), image.grad)
    gradient = conv.weight.grad
    assert isinstance(gradient, DTensor) == distributed
    gradient = gradient.full_tensor() if distributed else gradient
    assert torch.allclose(gradient, weight_grad, atol=1e-6)
    assert sharded.grad._spec.placements == (Shard(2),)
    assert sharded.grad.to_local().shape == (1, 8, 64 // dm.world_size, 48)


# ---- the dot product --------------------------------------------------------


def sharded_dot_product(
    func: Callable, types: tuple, args: tuple, kwargs: dict
) -> ShardTensor:
    """A handler as their readers write it: local product, sum over the ranks."""

    def extract_args(x, y, *args, **kwargs):
        return x, y

    x, y = extract_args(*args, **kwargs)
    x_spec, y_spec = x._spec, y._spec
    if not x_spec.placements == y_spec.placements:
        raise NotImplementedError("expected equal placements")
    if not x_spec.mesh == y_spec.mesh:
        raise NotImplementedError("expected one mesh")
    mesh = x_spec.mesh
    product = func(x.to_local(), y.to_local())
    dist.all_reduce(product, op=dist.ReduceOp.SUM, group=mesh.get_group())
    return ShardTensor.from_local(
        local_tensor=product, device_mesh=mesh, placements=(Replicate(),)
    )


@ranks(1, 2, 3)
def test_the_dot_product_by_a_function_handler(mesh):
    ShardTensor.register_function_handler(torch.dot, sharded_dot_product)
    try:
        n = 10_000
        DistributedManager.initialize()
        dm = DistributedManager()
        torch.manual_seed(1)
        a = torch.randn(n, device=dm.device)
        b = torch.randn(n, device=dm.device)

        def f(x, y):
            return torch.dot(x, y)

        c_baseline = f(a, b)
        mesh = dm.initialize_mesh(mesh_shape=[-1], mesh_dim_names=["vector"])
        placements = (Shard(0),)
        a_sharded = scatter_tensor(
            tensor=a, global_src=0, mesh=mesh, placements=placements
        )
        b_sharded = scatter_tensor(
            tensor=b, global_src=0, mesh=mesh, placements=placements
        )
        c_sharded = f(a_sharded, b_sharded)
        assert c_sharded.placements == (Replicate(),)
        assert torch.allclose(c_baseline, c_sharded.full_tensor(), atol=1e-3)
        start = time.time()
        for _ in range(10):
            f(a_sharded, b_sharded)
        assert time.time() > start

        with pytest.raises(NotImplementedError, match="expected equal placements"):
            f(a_sharded, b_sharded.redistribute(placements=(Replicate(),)))
    finally:
        ShardTensor.unregister_function_handler(torch.dot)


# ---- FSDP with ShardTensor --------------------------------------------------


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.GroupNorm(2, 8)
        self.last = torch.nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        return self.last(torch.nn.functional.gelu(self.norm(self.first(x))))


@ranks(4)
def test_data_parallel_by_fsdp_beside_a_domain_axis(mesh):
    """2 samples on the data axis, each cut over 2 domain ranks; the weights
    move as on one device that takes the mean of both."""
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((-1, 2), mesh_dim_names=("data", "domain"))
    domain, data = mesh["domain"], mesh["data"]

    torch.manual_seed(0)
    with dm.device:
        reference = Blocks()
        images = torch.randn(2, 1, 3, 16, 12)
        torch.manual_seed(dm.rank)  # a program that seeds its ranks differently
        model = Blocks()
    if dm.rank == 0:
        model.load_state_dict(reference.state_dict())
    sync_module_over_mesh(model, domain, src_mesh_rank=0)
    sync_module_over_mesh(model, data, src_mesh_rank=0)

    shardtensor.set_gradient_policy("immediate")
    fully_shard(model, mesh=data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        sample = images[dm.group_rank("data")] if domain.get_local_rank() == 0 else None
        source = dist.get_global_rank(domain.get_group(), 0)
        x = scatter_tensor(sample, source, domain, (Shard(2),))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

        expected.zero_grad()
        losses = [reference(image).square().mean() for image in images]
        (sum(losses) / 2).backward()
        expected.step()
        torch.testing.assert_close(loss.full_tensor(), losses[dm.group_rank("data")])
    for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), whole)


# ---- the manager ------------------------------------------------------------


@ranks(1, 4)
def test_the_manager_tells_a_program_where_it_is(mesh):
    DistributedManager.initialize()
    dm = DistributedManager()
    assert dm.world_size == mesh.size() and dm.rank == dist.get_rank()
    assert dm.device == torch.device("cpu") and dm.local_rank == dm.rank
    x = torch.ones(3, device=dm.device) * dm.rank
    dist.all_reduce(x)
    assert x.tolist() == [sum(range(dm.world_size))] * 3

    grid = dm.initialize_mesh([-1, 1], mesh_dim_names=["data", "model"])
    assert dm.group_size("data") == dm.world_size
    assert dm.mesh("data").size() == grid["data"].size()
    DistributedManager.create_process_subgroup("halves", max(dm.world_size // 2, 1))
    DistributedManager.create_orthogonal_process_group("across", "halves")
    assert dm.group_size("halves") * dm.group_size("across") == dm.world_size
    dist.barrier(group=dm.group("halves"))
