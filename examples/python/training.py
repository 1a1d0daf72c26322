"""The training loop of the demos, the same for one process and for many."""

import dataclasses
import math
import time

import torch
from memory import PeakMemory

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
    prediction: torch.Tensor | None = None


def train(args, job, on_step):
    """Trains; calls on_step(step, added memory so far). A job has the `device` of
    its data and these functions: warm_up(), start() -> its optimizer, step(number)
    -> the loss, predict() -> a tensor."""
    job.warm_up()
    memory = PeakMemory(job.device)
    optimizer = job.start()
    steps = []
    for number in range(args.steps):
        optimizer.param_groups[0].update(schedule(args, number))
        steps.append(timed(job.step, number))
        on_step(steps[-1], memory.peak())
    added, peak = memory.peak(), memory.mark()
    return Run(steps, added, peak, job.predict())


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


def timed(step, number):
    shardtensor.reset_comm_stats()
    begin = time.perf_counter()
    loss = step(number)
    seconds = time.perf_counter() - begin
    comm = shardtensor.comm_stats()
    return Step(
        loss, seconds, comm.seconds, comm.messages, comm.all_reduces, comm.bytes
    )
