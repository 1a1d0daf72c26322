"""What one rank of a very large job plans: time and memory of the first call.

One process stands for the rank in the middle of 64 to 16,384; PyTorch's fake
process group says nothing to nobody, so the processor's time is all there is. Each
operation runs in a child of its own, first on a mesh of three ranks, for code and
memory that come with any first call, then on the whole mesh, whose plans nobody
has made before.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from memory import status

RANKS = (64, 256, 1024, 4096, 16384)
ROWS = 8  # per rank along each cut dim
MESHES = {"1-D": lambda ranks: (ranks,), "2-D": lambda ranks: (int(ranks**0.5),) * 2}


def report():
    """The tables' lines, from jobs that this process starts."""
    return "\n\n".join(tables_of(name) for name in MESHES)


def tables_of(mesh):
    results = {ranks: measure_with(MESHES[mesh](ranks)) for ranks in RANKS}
    title = f"What one rank plans on a {mesh} mesh: time and memory of the first call"
    head = ["", *(f"{ranks} ranks" for ranks in RANKS)]
    lines = [f"### {title}", "", row(head), row(["---"] * len(head))]
    for name in results[RANKS[0]]:
        lines.append(row([name, *(cell(results[r][name]) for r in RANKS)]))
    lines += ["", f"### Of one UNet step on a {mesh} mesh, per rank", ""]
    lines += [row(head), row(["---"] * len(head))]
    for what in ("messages", "all-reduces", "KiB"):
        counts = (results[r]["UNet step"][what] for r in RANKS)
        lines.append(row([what, *(f"{count:.0f}" for count in counts)]))
    return "\n".join(lines)


def row(cells):
    return f"| {' | '.join(cells)} |"


def cell(result):
    if "error" in result:
        return result["error"]
    return f"{result['seconds'] * 1e3:.1f} ms, {result['bytes'] / 2**20:.1f} MiB"


def measure_with(shape, names=()):
    command = [sys.executable, __file__, "x".join(map(str, shape)), *names]
    # Freed tensors go back to the system at once.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


# ---- one job ----------------------------------------------------------------


def main():
    shape = tuple(map(int, sys.argv[1].split("x")))
    mesh, small = job(shape)
    names = sys.argv[2:] or [n for n in operations(small) if can_be_told(n)]
    print(json.dumps({name: in_child(name, mesh, small) for name in names}))


def job(shape):
    """The mesh of a job of so many ranks, of which this process is the one in the
    middle, and one of this rank and its neighbours along the first axis."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    ranks = torch.Size(shape).numel()
    middle = ranks // 2 + (shape[-1] // 2 if len(shape) > 1 else 0)
    dist.init_process_group("fake", store=FakeStore(), rank=middle, world_size=ranks)
    axes = ("height", "width")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    near = torch.tensor([middle - 1, middle, middle + 1])
    near = near.view(3, *[1] * (len(shape) - 1))
    return mesh, DeviceMesh("cpu", near, mesh_dim_names=axes)


def can_be_told(name):
    """A cut index acts on numbers that come from other ranks: the fake process group
    of PyTorch 2.11 leaves in their place what the memory held."""
    import torch
    import torch.distributed as dist

    sent = torch.zeros(dist.get_world_size())
    came = torch.ones_like(sent)
    dist.all_to_all_single(came, sent)
    return name != "index by a cut index" or came.equal(sent)


def in_child(name, mesh, small):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        result = guarded(name, mesh, small)
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def guarded(name, mesh, small):
    try:
        operations(small)[name]()()
        return measure(operations(mesh)[name])
    except Exception as error:  # said in the table
        return {"error": type(error).__name__}


def measure(call):
    import shardtensor

    call = call()
    shardtensor.reset_comm_stats()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begin = time.process_time()
    result = call()
    seconds = time.process_time() - begin
    grown = status("VmHWM") - before
    del result
    stats = shardtensor.comm_stats()
    return {
        "seconds": seconds,
        "bytes": grown,
        "messages": stats.messages,
        "all-reduces": stats.all_reduces,
        "KiB": stats.bytes / 1024,
    }


# ---- what is measured -------------------------------------------------------


def operations(mesh):
    """{name: function that prepares a call on `mesh` and returns it}."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.tensor import Partial, Replicate, Shard
    from unet import make

    import shardtensor

    cut = tuple(Shard(2 + axis) for axis in range(mesh.ndim))
    whole = (Replicate(),) * mesh.ndim
    moved = (Shard(1),) + cut[1:] if mesh.ndim == 1 else (Shard(3), Shard(2))
    rows = [ROWS * ranks for ranks in mesh.shape] + [4] * (2 - mesh.ndim)

    def ones(channels, placements=cut, **options):
        size = (1, channels, *rows)
        return shardtensor.ones(
            *size, device_mesh=mesh, placements=placements, **options
        )

    def to(before, after, channels=1):
        def prepare():
            x = ones(channels, before)
            return lambda: x.redistribute(placements=after)

        return prepare

    def partial_to(after):
        def prepare():
            x = ones(1, whole).redistribute(placements=(Partial(),) * mesh.ndim)
            return lambda: x.redistribute(placements=after)

        return prepare

    def on_image(function, channels=4):
        """The function and its gradient."""

        def prepare():
            x = ones(channels, requires_grad=True)
            return lambda: function(x).square().sum().backward()

        return prepare

    def along(function):
        def prepare():
            x = ones(1)
            return lambda: function(x)

        return prepare

    def module(make_module):
        return on_image(make_module())

    def scatter():
        x = torch.ones(1, 1, *rows)
        source = torch.distributed.get_rank()
        return lambda: shardtensor.scatter_tensor(x, source, mesh, cut)

    def index():
        # A plain one: which rows a cut one names, others would have to answer.
        # Each rank gets a row of the one before.
        x, indices = ones(1), torch.arange(mesh.shape[0]).roll(1) * ROWS
        return lambda: x[:, :, indices]

    def cut_index():
        # Its own rows: others would have to answer for theirs.
        x = ones(1)
        own = float(ROWS * mesh.get_local_rank(0))
        indices = shardtensor.full(
            (rows[0],),
            own,
            dtype=torch.long,
            device_mesh=mesh,
            placements=(Shard(0), *[Replicate()] * (mesh.ndim - 1)),
        )
        return lambda: x[:, :, indices]

    def unet_step():
        model = make()
        x = ones(3)
        return lambda: model(x).square().mean().backward()

    def cat(x):
        return torch.cat([x, x], 2)

    def spectrum(x):
        return torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:])

    channels = mesh.size() if mesh.ndim == 1 else 1
    return {
        "Shard to Replicate": to(cut, whole),
        "Replicate to Shard": to(whole, cut),
        "Shard(i) to Shard(j)": to(cut, moved, channels),
        "Partial to Shard": partial_to(cut),
        "conv2d": module(lambda: torch.nn.Conv2d(4, 4, 3, padding=1)),
        "conv2d, stride 2": module(lambda: torch.nn.Conv2d(4, 4, 3, 2, 1)),
        "conv_transpose2d": module(lambda: torch.nn.ConvTranspose2d(4, 4, 2, 2)),
        "max_pool2d": on_image(lambda x: F.max_pool2d(x, 3, 2, 1)),
        "avg_pool2d": on_image(lambda x: F.avg_pool2d(x, 3, 1, 1)),
        "adaptive_avg_pool2d": on_image(
            lambda x: F.adaptive_avg_pool2d(x, [n // 2 for n in rows])
        ),
        "interpolate, bilinear": on_image(
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")
        ),
        "interpolate, bicubic": on_image(
            lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic")
        ),
        "pad, circular": on_image(lambda x: F.pad(x, (1, 1, 1, 1), "circular")),
        "halo_exchange, periodic": on_image(
            lambda x: shardtensor.halo_exchange(x, 1, boundary="periodic")
        ),
        "group_norm": module(lambda: torch.nn.GroupNorm(2, 4)),
        "batch_norm": module(lambda: torch.nn.BatchNorm2d(4)),
        "layer_norm": on_image(lambda x: F.layer_norm(x, x.shape[1:])),
        "mean": along(lambda x: x.mean(2).full_tensor()),
        "var": along(lambda x: x.var(2)),
        "amax": along(lambda x: x.amax(2)),
        "argmax": along(lambda x: x.argmax(2)),
        "argmax of all": along(lambda x: x.argmax()),
        "logsumexp": along(lambda x: x.logsumexp(2)),
        "norm": along(lambda x: x.norm()),
        "softmax": on_image(lambda x: x.softmax(2)),
        "log_softmax": on_image(lambda x: x.log_softmax(2)),
        "scatter_tensor": scatter,
        "cat": along(cat),
        "index of a cut dim": index,
        "index by a cut index": cut_index,
        "mask of rows": along(lambda x: x[0, 0, :, 0][x[0, 0, :, 0] > 0]),
        "roll": along(lambda x: x.roll(1, 2)),
        "flip": along(lambda x: x.flip(2)),
        # Enough channels to cut instead.
        "rfft2 + irfft2": on_image(spectrum, channels=mesh.shape[0]),
        "UNet step": unet_step,
    }


if __name__ == "__main__":
    main()
