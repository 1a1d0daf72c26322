"""A convolution over a sharded image, checked against one device.

    torchrun --nproc-per-node 4 sharded_conv.py

Output on 4 ranks:

    Output placements and local shape: (Shard(dim=2),), torch.Size([1, 8, 256, 1024])
    Output, image gradient and weight gradient equal those of one device: True
    Distributed grad sharding and local shape: (Shard(dim=2),), torch.Size([1, 8, 256, 1024])
"""  # noqa: E501

import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardtensor import scatter_tensor
from shardtensor.distributed import DistributedManager


def main():
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), ("domain",))

    torch.manual_seed(0)  # the same weights and the same image on every rank
    conv = nn.Conv2d(8, 8, 3, padding=1).to(manager.device)
    image = torch.randn(1, 8, 1024, 1024, device=manager.device)

    sharded = scatter_tensor(image, 0, mesh, (Shard(2),), requires_grad=True)
    output = conv(sharded)
    output.mean().backward()
    weight_grad = conv.weight.grad

    image.requires_grad_()
    conv.zero_grad()
    expected = conv(image)
    expected.mean().backward()

    same = (
        torch.allclose(output.full_tensor(), expected, atol=1e-6)
        and torch.allclose(sharded.grad.full_tensor(), image.grad)
        and torch.allclose(weight_grad, conv.weight.grad, atol=1e-6)
    )
    if manager.rank == 0:
        print(
            "Output placements and local shape: "
            f"{output.placements}, {output.to_local().shape}"
        )
        print(
            "Output, image gradient and weight gradient equal those of one "
            f"device: {same}"
        )
        print(
            "Distributed grad sharding and local shape: "
            f"{sharded.grad.placements}, {sharded.grad.to_local().shape}"
        )
    DistributedManager.cleanup(barrier=True)


if __name__ == "__main__":
    main()
