"""The training loop, the same for one process and for many."""

import dataclasses
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
    peak_memory: int  # bytes over what the process held before training
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
    """Trains on one volume; calls on_step(step, peak memory so far)."""
    memory = PeakMemory(volume.device)
    model = make_model(args).to(volume.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    steps = []
    for _ in range(args.steps):
        steps.append(timed(lambda: one_step(args, model, optimizer, volume, labels)))
        on_step(steps[-1], memory.peak())
    peak = memory.peak()
    return Run(steps, peak, predict(args, model, volume))


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
