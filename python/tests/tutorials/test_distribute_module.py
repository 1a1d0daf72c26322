"""PhysicsNeMo's programs that prepare a model by distribute_module: its
parameters are DTensors on the domain's mesh, the activations ShardTensors."""

import torch
import torch.distributed as dist
from ranks import ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardtensor import scatter_tensor
from shardtensor.distributed import DistributedManager


class Tokens(torch.nn.Module):
    """An embedding of patches, positions that are added, a head."""

    def __init__(self, rows):
        super().__init__()
        self.embed = torch.nn.Linear(6, 8)
        self.pos_embed = torch.nn.Parameter(0.1 * torch.randn(1, rows, 8))
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)
        )

    def forward(self, x):
        return self.head(self.norm(self.embed(x) + self.pos_embed))


def partition_model(name, submodule, device_mesh):
    """Positions are cut as the tokens are, everything else is replicated."""
    for key, parameter in submodule._parameters.items():
        if parameter is not None:
            cut = [Shard(1)] if "pos_embed" in key else [Replicate()]
            placed = distribute_tensor(parameter, device_mesh, cut)
            submodule.register_parameter(key, torch.nn.Parameter(placed))


@ranks(4)
def test_fsdp_of_a_model_with_sharded_positions(mesh):
    """2 samples on the data axis, each cut over 2 domain ranks."""
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((-1, 2), mesh_dim_names=("ddp", "domain"))
    domain, data = mesh["domain"], mesh["ddp"]
    torch.manual_seed(0)
    with dm.device:
        model, tokens = Tokens(10), torch.randn(2, 1, 10, 6)
        reference = Tokens(10)
    reference.load_state_dict(model.state_dict())

    model = distribute_module(model, domain, partition_fn=partition_model)
    fully_shard(model, mesh=data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        sample = tokens[dm.group_rank("ddp")]
        source = dist.get_global_rank(domain.get_group(), 0)
        x = scatter_tensor(sample, source, domain, (Shard(1),))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

        expected.zero_grad()
        losses = [reference(sample).square().mean() for sample in tokens]
        (sum(losses) / 2).backward()
        expected.step()
        torch.testing.assert_close(loss.full_tensor(), losses[dm.group_rank("ddp")])
    whole = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), whole[name])
