"""What first_gpu.py measures on two ranks: pieces of one tensor that meet."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from first_gpu_alone import streams, unet_step, values
from first_gpu_tools import (
    FIELD,
    ON_GPU,
    compared,
    launched,
    milliseconds,
    need_gpu,
    peak_mebibytes,
    queued_microseconds,
    sharded,
    step,
)
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardTensor

NEVER = 2**62
ROWS = FIELD[2] // 2  # of a rank
LAST = torch.channels_last


def missing_nccl(ranks):
    """Why NCCL has not so many ranks here; None where it has."""
    if not ON_GPU:
        return "needs a GPU"
    version = torch.cuda.nccl.version()
    if torch.cuda.device_count() >= ranks or version >= (2, 30):
        return None
    told = ".".join(map(str, version))
    return f"NCCL {told} has one rank on a GPU, 2.30 would have more"


# ---- correctness ------------------------------------------------------------


def label_out_of_range(mesh):
    labels = torch.full((1, 6, 5), 255)
    F.cross_entropy(sharded(torch.randn(1, 5, 6, 5), mesh), sharded(labels, mesh, 1))
    return "nothing was said"


def recorded_stream(mesh):
    """Memory that another stream still reads is not given to somebody else."""
    need_gpu()
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = sharded(torch.ones(64, 64), mesh, 0)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        y = x * 2
    x.record_stream(side)
    del x
    torch.zeros(32, 64)  # would have x's memory
    main.wait_stream(side)
    return "right" if (y.full_tensor() == 2).all() else "wrong: memory freed too early"


def parallel_streams(mesh):
    """DDP makes its reducer on the default stream."""

    def wrap(model):
        return shardtensor.parallelize(model, mesh, "ddp")

    return streams(mesh, wrap)


# ---- times, against the same rows by themselves ------------------------------


def norm(kind, dtype, form=torch.contiguous_format):
    def run(mesh):
        channels, columns = FIELD[1], FIELD[3]
        layers = {
            "group": lambda rows: nn.GroupNorm(8, channels),
            "batch": lambda rows: nn.BatchNorm2d(channels),
            "layer": lambda rows: nn.LayerNorm([channels, rows, columns]),
        }
        make = layers[kind]
        x = torch.randn(1, channels, ROWS, columns, dtype=dtype)
        x = x.contiguous(memory_format=form)
        y = ShardTensor.from_local(x, mesh, [Shard(2)]).requires_grad_()
        plain, ours = make(ROWS).to(dtype), make(2 * ROWS).to(dtype)
        pairs = (plain, x.clone().requires_grad_()), (ours, y)
        times = [milliseconds(lambda p=p: step(*p)) for p in pairs]
        (few, brief), (many, long) = (launched(lambda p=p: step(*p)) for p in pairs)
        kernels = f"{few} launches of {brief:.3g} ms, {many} of {long:.3g} ms"
        return f"{compared(*times)}; {kernels}"

    return run


def convolution(channels, rows, dtype, form=torch.contiguous_format):
    def run(mesh):
        layer = nn.Conv2d(channels, channels, 3, padding=1).to(dtype)
        shape = (1, channels, rows if ON_GPU else 8, FIELD[3])
        x = torch.randn(shape, dtype=dtype).contiguous(memory_format=form)
        y = ShardTensor.from_local(x, mesh, [Shard(2)]).requires_grad_()
        x = x.clone().requires_grad_()
        times = {"plain": milliseconds(lambda: step(layer, x))}
        for way, least in {"joined": NEVER, "apart": 0, "chosen": None}.items():
            with shardtensor.conv_overlap_bytes(least):
                times[way] = milliseconds(lambda: step(layer, y))
        return ", ".join(f"{way} {ms:.3g} ms" for way, ms in times.items())

    return run


def dropout_of_an_eighth(policy):
    """This rank has an eighth of the rows, the other has the rest."""

    def run(mesh):
        whole = list(FIELD)
        whole[2] -= whole[2] % 8
        eighth = whole[2] // 8
        shapes = [(*whole[:2], n, whole[3]) for n in (eighth, 7 * eighth)]
        x = torch.randn(shapes[mesh.get_local_rank()])
        y = ShardTensor.from_local(x, mesh, [Shard(2)], sharding_shapes={0: shapes})
        shardtensor.set_random_policy(policy)
        try:
            calls = [lambda z=z: F.dropout(z) for z in (x, y)]
            told = compared(*map(milliseconds, calls))
            if ON_GPU:
                told += f"; {compared(*map(peak_mebibytes, calls), 'MiB')}"
            return told
        finally:
            shardtensor.set_random_policy("one_device")

    return run


def all_to_all(mesh):
    return f"{microseconds_of_all_to_all():.0f} us"


def microseconds_of_all_to_all():
    x = torch.ones(4096)
    y = torch.empty_like(x)
    return queued_microseconds(lambda: dist.all_to_all_single(y, x))


def neighbours(mesh):
    """A halo's two ways: a collective of all ranks, messages of the neighbours."""
    other = 1 - mesh.get_local_rank()
    x, y = torch.ones(4096), torch.empty(4096)

    def messages():
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, y, other), dist.P2POp(dist.isend, x, other)]
        )
        for work in works:
            work.wait()

    told = f"all_to_all_single {microseconds_of_all_to_all():.0f} us"
    return f"{told}, messages {queued_microseconds(messages):.0f} us"


def edge_of_a_convolution(mesh):
    layer = nn.Conv2d(8, 8, 3, padding=1)
    x = sharded(torch.randn(1, 8, 32, 32), mesh)
    with torch.no_grad():
        return f"{queued_microseconds(lambda: layer(x)):.0f} us"


FLOAT, HALF = torch.float32, torch.bfloat16
NORM = "1.3; gloo's messages come on top"
CONV = "chosen is the least"
MEASUREMENTS = {
    "values at the edges": (values, "right"),
    "record_stream": (recorded_stream, "right"),
    "two streams": (streams, "0"),
    "two streams, DDP": (parallel_streams, "0"),
    "GroupNorm, fp32": (norm("group", FLOAT), NORM),
    "BatchNorm, fp32": (norm("batch", FLOAT), NORM),
    "LayerNorm, fp32": (norm("layer", FLOAT), NORM),
    "GroupNorm, bf16": (norm("group", HALF), NORM),
    "GroupNorm, bf16, channels last": (norm("group", HALF, LAST), NORM),
    "BatchNorm, fp32, channels last": (norm("batch", FLOAT, LAST), NORM),
    "conv 64, 16 rows, fp32": (convolution(64, 16, FLOAT), CONV),
    "conv 64, 90 rows, fp32": (convolution(64, 90, FLOAT), CONV),
    "conv 64, 361 rows, fp32": (convolution(64, 361, FLOAT), CONV),
    "conv 64, 361 rows, bf16": (convolution(64, 361, HALF), CONV),
    "conv 64, 361 rows, bf16, channels last": (convolution(64, 361, HALF, LAST), CONV),
    "conv 256, 16 rows, bf16": (convolution(256, 16, HALF), CONV),
    "conv 256, 90 rows, bf16, channels last": (convolution(256, 90, HALF, LAST), CONV),
    "UNet step": (unet_step, "through the host: no figure"),
    "dropout of an eighth, one_device": (
        dropout_of_an_eighth("one_device"),
        "8: drawn for the whole",
    ),
    "dropout of an eighth, counter": (dropout_of_an_eighth("counter"), "1.0"),
    "all_to_all_single": (all_to_all, "through the host: no figure"),
    # Last: a kernel's assertion ends what its process can do on a GPU.
    "label 255": (label_out_of_range, "an error"),
}
OVER_NCCL = {
    "values at the edges": (values, "right"),
    "neighbours": (neighbours, "messages at most all_to_all_single"),
    "a halo": (edge_of_a_convolution, "below 200 us"),
    "UNet step": (unet_step, "1.0 to 1.15 of plain on a GPU of its own"),
}
