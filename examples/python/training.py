"""The training loop, the same for one process and for many."""

import dataclasses
import math
import time

import torch
from memory import PeakMemory
from unet import UNet, segmentation_loss

import shardtensor


@dataclasses.dataclass
class Step:
    """What one step came to, on this rank."""

    loss: float
    seconds: float
    waiting: float  # of these seconds, how many went into communication
    messages: int
    all_reduces: int
    bytes: int


@dataclasses.dataclass
class Run:
    steps: list[Step]
    added_memory: int  # bytes at the peak over what the process held before
    peak_memory: int  # bytes that the process held at the peak
    prediction: torch.Tensor | None = None  # the class of each voxel


def make_model(args):
    """The same weights in every process, from the seed."""
    torch.manual_seed(args.seed)
    return UNet(
        channels=[args.channels * 2**level for level in range(args.levels)],
        norm=args.norm,
        activation=args.activation,
        down=args.down,
        up=args.up,
        checkpointing=args.checkpoint,
    )


def train(args, volume, labels, on_step):
    """Trains on one volume; calls on_step(step, added memory so far)."""
    warm_up(args, volume, labels)
    memory = PeakMemory(volume.device)
    model, optimizer = make_training(args, volume.device)
    steps = []
    for number in range(args.steps):
        optimizer.param_groups[0].update(schedule(args, number))
        steps.append(timed(lambda: one_step(args, model, optimizer, volume, labels)))
        on_step(steps[-1], memory.peak())
    added, peak = memory.peak(), memory.mark()
    return Run(steps, added, peak, predict(args, model, volume))


def make_training(args, device):
    model = make_model(args).to(device)
    # Squares of the first steps' gradients are large; 0.95 soon forgets them.
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    return model, optimizer


def schedule(args, number):
    """One cycle: the learning rate rises to its peak in the first third and
    falls to zero, the momentum goes the other way; both as a cosine."""
    top = max(0.3 * args.steps - 1, 2)
    last = args.steps - 1
    if number < top:
        height = half_cosine(number / top)
        rate = args.learning_rate * (0.04 + 0.96 * height)
    else:
        height = 1 - half_cosine((number - top) / max(last - top, 1))
        rate = args.learning_rate * height
    return {"lr": rate, "betas": (0.95 - 0.1 * height, 0.95)}


def half_cosine(share):
    """From 0 to 1."""
    return (1 - math.cos(math.pi * share)) / 2


def warm_up(args, volume, labels):
    """One step of a model of its own on a few slices: what a process loads and
    opens with its first step is no part of training."""
    few = 2**args.levels
    model, optimizer = make_training(args, volume.device)
    one_step(args, model, optimizer, volume[..., :few], labels[..., :few])


def one_step(args, model, optimizer, volume, labels):
    optimizer.zero_grad()
    with autocast(args, volume.device):
        loss = segmentation_loss(model(volume), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def predict(args, model, volume):
    # Batch statistics, as in training: running ones lag after so few steps.
    with autocast(args, volume.device):
        return model(volume).argmax(1)


def autocast(args, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)


def timed(step):
    shardtensor.reset_comm_stats()
    begin = time.perf_counter()
    loss = step()
    seconds = time.perf_counter() - begin
    comm = shardtensor.comm_stats()
    return Step(
        loss, seconds, comm.seconds, comm.messages, comm.all_reduces, comm.bytes
    )
