"""What one writes without a library: rows exchanged between neighbours with
torch.distributed, and a UNet's layers on top. Even shards of dim 2 only."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def exchange_rows(x, above, below):
    """x with `above` rows of the previous rank before it and `below` rows of
    the next one behind; zeros at the ends of the domain. Differentiable."""
    return ExchangeRows.apply(x, above, below)


class ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, above, below):
        ctx.widths = above, below
        height = x.shape[2]
        first = x.narrow(2, 0, below)  # what the previous rank needs
        last = x.narrow(2, height - above, above)  # what the next rank needs
        from_previous, from_next = send_both_ways(first, last, above, below)
        return torch.cat([from_previous, x, from_next], 2)

    @staticmethod
    def backward(ctx, grad):
        above, below = ctx.widths
        height = grad.shape[2] - above - below
        first, inner, last = grad.split([above, height, below], 2)
        from_previous, from_next = send_both_ways(first, last, below, above)
        inner = inner.clone()
        inner.narrow(2, 0, below).add_(from_previous)
        inner.narrow(2, height - above, above).add_(from_next)
        return inner, None, None


def send_both_ways(to_previous, to_next, rows_from_previous, rows_from_next):
    """One message to each neighbour; zeros where there is none."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = [
        to_previous.new_zeros(with_rows(to_previous, rows))
        for rows in (rows_from_previous, rows_from_next)
    ]
    operations = []
    sides = [(rank - 1, to_previous, received[0]), (rank + 1, to_next, received[1])]
    for peer, send, receive in sides:
        if 0 <= peer < ranks:
            if send.numel():
                operations.append(dist.P2POp(dist.isend, send.contiguous(), peer))
            if receive.numel():
                operations.append(dist.P2POp(dist.irecv, receive, peer))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return received


def with_rows(x, rows):
    return [*x.shape[:2], rows, *x.shape[3:]]


class SumOverRanks(torch.autograd.Function):
    """All-reduce; every rank uses the sum for its own rows, so its gradient is
    a sum, too."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


# ---- layers -----------------------------------------------------------------


class HaloConv2d(nn.Conv2d):
    """3 x 3, padding 1, stride 1 or 2, on even heights."""

    def forward(self, x):
        if self.kernel_size[0] == 1:
            return super().forward(x)
        x = exchange_rows(x, 1, 2 - self.stride[0])
        return F.conv2d(x, self.weight, self.bias, self.stride, (0, 1))


class DomainGroupNorm(nn.GroupNorm):
    """Statistics over all ranks: one all-reduce each way."""

    def forward(self, x):
        groups = x.unflatten(1, (self.num_groups, -1))
        dims = (2, 3, 4)
        sums = torch.stack([groups.sum(dims), groups.square().sum(dims)])
        count = groups[0, 0].numel() * dist.get_world_size()
        mean, square = SumOverRanks.apply(sums) / count
        scale = (square - mean.square() + self.eps).rsqrt()
        shape = (*mean.shape, 1, 1, 1)
        x = (groups - mean.view(shape)) * scale.view(shape)
        weight = self.weight.view(-1, 1, 1)
        return x.flatten(1, 2) * weight + self.bias.view(-1, 1, 1)


class MeetingGroupNorm(nn.GroupNorm):
    """Of this rank's piece alone, which is wrong, but the ranks wait for each
    other where the statistics of the whole domain make them wait."""

    def forward(self, x):
        return super().forward(Meet.apply(x))


class Meet(torch.autograd.Function):
    """By the library's small messages: over gloo its own sums take longer."""

    @staticmethod
    def forward(ctx, x):
        meet()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        meet()
        return grad


def meet():
    name = dist.group.WORLD.group_name
    torch.ops.shardtensor.all_reduce(torch.zeros(8), "sum", name)


class HaloUpsample(nn.Module):
    """Twice as large, bilinear. Beyond the domain the outermost row repeats."""

    def forward(self, x):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        rows = exchange_rows(x, 1, 1)
        first = x[:, :, :1] if rank == 0 else rows[:, :, :1]
        last = x[:, :, -1:] if rank == ranks - 1 else rows[:, :, -1:]
        rows = torch.cat([first, x, last], 2)
        large = F.interpolate(rows, scale_factor=2, mode="bilinear")
        return large.narrow(2, 2, 2 * x.shape[2])


def sum_gradients(model):
    """The gradients of all parameters in one all-reduce."""
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    parts = flat.split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
