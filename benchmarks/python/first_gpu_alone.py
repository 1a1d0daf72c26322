"""What first_gpu.py measures on one rank, over NCCL where there is a GPU."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from first_gpu_tools import (
    CALLS,
    EXTENT,
    FIELD,
    ON_GPU,
    compared,
    holds,
    milliseconds,
    need_gpu,
    peak_mebibytes,
    queued_microseconds,
    sharded,
    step,
)
from torch import nn
from unet import UNet

import shardtensor


def values(mesh):
    """0-d tensors, channels last, a scaled loss, indices of the host, halos."""
    x = torch.randn(2, 8, 6, 5)
    scale = torch.tensor(3.0)
    last = x.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(5, (2, 6, 5))
    layer = nn.Conv2d(8, 4, 3, padding=1)
    rows = torch.tensor([3, 0, 5], device="cpu")
    programs = {
        "x * 0-d": lambda of: of(x) * scale,
        "channels last * 0-d": lambda of: of(last) * scale,
        "scaled mean": lambda of: of(x).square().mean() * scale,
        "index on the host": lambda of: of(x)[:, :, rows],
        "cross entropy": lambda of: F.cross_entropy(of(x), labels),
        "convolution": lambda of: layer(of(x)),
        "norm": lambda of: F.group_norm(of(last), 4),
        "softmax": lambda of: of(x).softmax(2),
    }
    wrong = []
    for name, program in programs.items():
        got = program(lambda tensor: sharded(tensor, mesh))
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        if not torch.allclose(got, program(lambda tensor: tensor), atol=1e-5):
            wrong.append(name)
    return holds(wrong)


def scaled_gradients(mesh):
    need_gpu()
    scaler = torch.amp.GradScaler("cuda")
    layer = nn.Conv2d(3, 4, 3, padding=1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = layer(sharded(torch.randn(1, 3, 32, 32), mesh)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return f"scale {scaler.get_scale():.0f}, loss {loss.full_tensor().item():.4f}"


def host_syncs(mesh):
    """Which calls wait for the GPU."""
    need_gpu()
    x = sharded(torch.randn(1, 3, 64, 64), mesh)
    unet = UNet()
    labels = sharded(torch.randint(3, (1, 64, 64)), mesh, 1)
    rows = torch.tensor([1, 5])
    programs = {
        "UNet": lambda: step(unet, x),
        "align_corners": lambda: F.interpolate(
            x, scale_factor=2, mode="bilinear", align_corners=True
        ),
        "cross entropy": lambda: F.cross_entropy(x, labels).backward(),
        "argmax": lambda: x.argmax(),
        "index": lambda: x[:, :, rows],
    }
    waiting = []
    for name, program in programs.items():
        program()  # plans
        torch.cuda.set_sync_debug_mode("error")
        try:
            program()
        except RuntimeError:
            waiting.append(name)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return f"wait: {', '.join(waiting) or 'none'}"


def norm(kind, dtype):
    def run(mesh):
        channels, *grid = FIELD[1:]
        layers = {
            "group": lambda: nn.GroupNorm(8, channels),
            "batch": lambda: nn.BatchNorm2d(channels),
            "layer": lambda: nn.LayerNorm([channels, *grid]),
        }
        layer = layers[kind]().to(dtype)
        x = torch.randn(FIELD, dtype=dtype, requires_grad=True)
        y = sharded(x, mesh)
        return compared(*(milliseconds(lambda z=z: step(layer, z)) for z in (x, y)))

    return run


def convolution(channels, rows, dtype, last=False):
    def run(mesh):
        shape = (1, channels, rows if ON_GPU else 8, FIELD[3])
        layer = nn.Conv2d(channels, channels, 3, padding=1).to(dtype)
        x = torch.randn(shape, dtype=dtype)
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        y = sharded(x, mesh)
        x.requires_grad_()
        return compared(*(milliseconds(lambda z=z: step(layer, z)) for z in (x, y)))

    return run


def host_time(call):
    def run(mesh):
        x = torch.randn(8, 8, 16, 16)
        y = sharded(x, mesh)
        with torch.no_grad():
            times = [queued_microseconds(lambda z=z: call(z)) for z in (x, y)]
        return compared(*times, "us")

    return run


def unet_step(mesh, extent=EXTENT):
    model = UNet()
    x = torch.randn(1, 3, extent, extent)
    y = sharded(x, mesh)
    return compared(*(milliseconds(lambda z=z: step(model, z)) for z in (x, y)))


def large_unet_step(mesh):
    """Where the GPU has more to do than its host."""
    return unet_step(mesh, 4 * EXTENT)


def message_time(limit):
    """c10d's own calls, with a work of their own and in the caller's queue."""

    def run(mesh):
        x, y = torch.ones(1024), torch.empty(1024)
        calls = {
            "all_reduce": lambda **how: dist.all_reduce(x, **how),
            "all_to_all_single": lambda **how: dist.all_to_all_single(y, x, **how),
        }
        told = []
        for name, call in calls.items():
            queued = queued_microseconds(call)
            waited = queued_microseconds(lambda c=call: c(async_op=True).wait())
            told.append(f"{name} {queued:.0f} us, async {waited:.0f} us")
        shardtensor.set_communication_timeout(limit)
        try:
            own = sharded(torch.ones(4, 4), mesh, 0)
            ours = queued_microseconds(lambda: own.sum().full_tensor())
        finally:
            shardtensor.set_communication_timeout(0.0)
        return ", ".join([*told, f"sum and full_tensor {ours:.0f} us"])

    return run


def streams(mesh, wrap=lambda model: model):
    """Forward in a side stream, backward outside."""
    need_gpu()
    model = wrap(UNet())
    x = sharded(torch.randn(1, 3, 64, 64), mesh)
    step(model, x)
    expected = [p.grad.clone() for p in model.parameters()]
    furthest = 0.0
    for _ in range(CALLS):
        model.zero_grad(set_to_none=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = model(x).square().mean()
            torch.cuda._sleep(10_000_000)
        torch.cuda.current_stream().wait_stream(side)
        loss.backward()
        pairs = zip(model.parameters(), expected, strict=True)
        furthest = max(furthest, *((p.grad - e).abs().max().item() for p, e in pairs))
    return f"largest difference of a gradient in {CALLS} runs: {furthest:.1e}"


def dropout(policy):
    def run(mesh):
        x = torch.randn(FIELD)
        y = sharded(x, mesh)
        shardtensor.set_random_policy(policy)
        try:
            return compared(*(milliseconds(lambda z=z: F.dropout(z)) for z in (x, y)))
        finally:
            shardtensor.set_random_policy("one_device")

    return run


def peak_memory(mesh):
    need_gpu()
    peaks = []
    for place in (lambda x: x, lambda x: sharded(x, mesh)):
        model, x = UNet(), place(torch.randn(1, 3, EXTENT, EXTENT))
        peaks.append(peak_mebibytes(lambda m=model, x=x: step(m, x)))
    return compared(*peaks, "MiB")


def graph(mesh):
    need_gpu()
    model, x = UNet(), sharded(torch.randn(1, 3, EXTENT, EXTENT), mesh)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, x)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(captured):
        model(x).square().mean().backward()
    return f"{milliseconds(captured.replay):.3g} ms a replay"


def compiled(mode):
    def run(mesh):
        need_gpu()
        model, x = UNet(), sharded(torch.randn(1, 3, EXTENT, EXTENT), mesh)
        fast = torch.compile(copy.deepcopy(model), mode=mode)
        return compared(*(milliseconds(lambda m=m: step(m, x)) for m in (model, fast)))

    return run


MEASUREMENTS = {
    "values at the edges": (values, "right"),
    "GradScaler": (scaled_gradients, "a finite loss"),
    "calls that wait for the GPU": (host_syncs, "wait: none"),
    "GroupNorm, fp32": (norm("group", torch.float32), "1.0"),
    "BatchNorm, fp32": (norm("batch", torch.float32), "1.0"),
    "LayerNorm, fp32": (norm("layer", torch.float32), "1.0"),
    "GroupNorm, bf16": (norm("group", torch.bfloat16), "1.0"),
    "conv 64, 361 rows, fp32": (convolution(64, 361, torch.float32), "1.0"),
    "conv 64, 361 rows, bf16": (convolution(64, 361, torch.bfloat16), "1.0"),
    "conv 64, 16 rows, fp32": (convolution(64, 16, torch.float32), "1.0"),
    "conv 256, 90 rows, bf16, channels last": (
        convolution(256, 90, torch.bfloat16, last=True),
        "1.0",
    ),
    "host: add": (host_time(lambda x: x + x), "0.7 to 2 us more"),
    "host: group_norm": (host_time(lambda x: F.group_norm(x, 4)), "0.7 to 2 us more"),
    "host: relu": (host_time(F.relu), "0.7 to 2 us more"),
    "UNet step": (unet_step, "1.0 to 1.15"),
    "UNet step, 16 times as large": (large_unet_step, "1.0"),
    "messages, no limit": (message_time(0.0), "18 to 30 us"),
    "messages, limit of 60 s": (message_time(60.0), "as without"),
    "two streams": (streams, "0"),
    "dropout, one_device": (dropout("one_device"), "1.0 on one rank"),
    "dropout, counter": (dropout("counter"), "1.0"),
    "peak memory of a step": (peak_memory, "at most 1.05"),
    "CUDA graph": (graph, "captured"),
    "torch.compile": (compiled("default"), "below 1"),
    "torch.compile, reduce-overhead": (compiled("reduce-overhead"), "below 1"),
}
