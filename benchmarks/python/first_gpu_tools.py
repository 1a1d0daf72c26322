"""What the measurements of first_gpu.py share."""

import os
import statistics
import time

os.environ.setdefault("DEVICE", "cuda")

import device
import torch
from torch.autograd import DeviceType
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

import shardtensor

ON_GPU = device.DEVICE == "cuda"
EXTENT = 512 if ON_GPU else 32
FIELD = (1, 64, 721, 1440) if ON_GPU else (1, 16, 24, 32)
CALLS = 20 if ON_GPU else 3


class CannotRun(Exception):
    """Why a measurement has nothing to say here."""


def need_gpu():
    if not ON_GPU:
        raise CannotRun("needs a GPU")


def sharded(x, mesh, dim=2):
    x = shardtensor.scatter_tensor(x.detach(), 0, mesh, [Shard(dim)])
    return x.requires_grad_(x.is_floating_point())


def milliseconds(fn):
    for _ in range(3):
        fn()
    device.finish()
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        fn()
        device.finish()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def queued_microseconds(fn, calls=100):
    """What the host needs to queue a call."""
    fn()
    device.finish()
    begin = time.perf_counter()
    for _ in range(calls):
        fn()
    seconds = time.perf_counter() - begin
    device.finish()
    return 1e6 * seconds / calls


def launched(fn):
    """How many kernels and copies a call puts into the queue, and their milliseconds;
    on a CPU its copies."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * ON_GPU
    with profile(activities=kinds) as seen:
        fn()
        device.finish()
    if ON_GPU:
        queued = [
            event
            for event in seen.events()
            if event.device_type == DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
        ]
    else:
        queued = [event for event in seen.events() if event.name == "aten::copy_"]
    return len(queued), sum(e.time_range.elapsed_us() for e in queued) / 1e3


def peak_mebibytes(fn):
    fn()
    torch.cuda.reset_peak_memory_stats()
    fn()
    return torch.cuda.max_memory_allocated() / 2**20


def step(model, x):
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()


def compared(plain, ours, unit="ms"):
    return f"{plain:.3g} {unit} plain, {ours:.3g} {unit} sharded: {ours / plain:.2f}"


def holds(wrong):
    return "wrong: " + ", ".join(wrong) if wrong else "right"
