"""nn.SyncBatchNorm on ShardTensors: statistics over data and domain."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardtensor.distributed.autograd import reduced
from shardtensor.placements import replicated
from shardtensor.shard_tensor import ShardTensor

_HALVES = (torch.float16, torch.bfloat16)


def normalize(layer: nn.SyncBatchNorm, x: ShardTensor) -> ShardTensor:
    """The layer's forward in training: the statistics are those of all samples that the
    ranks of `process_group` hold, each counted once however many ranks hold parts of
    it, on any device; those of 16-bit inputs in fp32. `process_group` has one rank of
    each domain, or complete domains; else ValueError. Communication: two sums over the
    domain, two all-reduces over the group, as many in backward."""
    layer._check_input_dim(x)
    layer._check_non_zero_input_channels(x)
    group = layer.process_group or dist.group.WORLD
    share = _share(x, group)
    wide = x.float() if x.dtype in _HALVES else x
    mean, variance, count = _moments(wide, group.group_name, share)
    if layer.track_running_stats:
        _track(layer, mean.to_local(), variance.to_local(), count)
    along = (-1, *[1] * (x.dim() - 2))
    y = (wide - mean.view(along)) * (variance + layer.eps).rsqrt().view(along)
    if layer.affine:
        y = y * layer.weight.view(along) + layer.bias.view(along)
    return y.to(x.dtype)


def _share(x, group):
    """What each rank of the group counts of x, which all ranks of its mesh have."""
    domain = {*x.device_mesh.mesh.flatten().tolist()}
    held = domain.intersection(dist.get_process_group_ranks(group))
    if len(held) not in (1, len(domain)):
        raise ValueError(
            f"SyncBatchNorm: process_group has {len(held)} of the {len(domain)} ranks "
            "of the input's mesh, expected one or all"
        )
    return 1 / len(held)


def _moments(x, group, share):
    """Mean and variance of each channel, and of how many numbers."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    number = x.numel() // x.shape[1]
    sums = F.pad(_whole(x.sum(dims)), (0, 1), value=number)
    totals = _over(sums, group, share)
    count = totals[-1].detach().round()
    if number < 2 and count < 2:  # the host waits for no more than it must
        raise ValueError(
            f"SyncBatchNorm: expected more than 1 value per channel, got {int(count)}"
        )
    mean = _everywhere(totals[:-1] / count, x.device_mesh)
    centred = x - mean.view(-1, *[1] * (x.dim() - 2))
    squares = _over(_whole(centred.square().sum(dims)), group, share)
    return mean, _everywhere(squares / count, x.device_mesh), count


def _over(local, group, share):
    """The sum over the group of what every rank of x's mesh has alike."""
    return reduced(local * share, "sum", group)


def _whole(x):
    return x.redistribute(placements=replicated(x.device_mesh.ndim)).to_local()


def _everywhere(local, mesh):
    alike = replicated(mesh.ndim)
    return ShardTensor.from_local(local, mesh, alike, sharding_shapes="chunk")


@torch.no_grad()
def _track(layer, mean, variance, count):
    steps = _local(layer.num_batches_tracked).add_(1)
    # Without one the mean of all steps.
    momentum = 1.0 / steps.item() if layer.momentum is None else layer.momentum
    unbiased = variance * (count / (count - 1))
    for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        _local(running).lerp_(new.to(running.dtype), momentum)


def _local(buffer):
    return buffer.to_local() if hasattr(buffer, "to_local") else buffer
