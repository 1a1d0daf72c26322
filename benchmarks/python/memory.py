"""Peak memory of a UNet training step, of attention, of an FNO's step, of a
MeshGraphNet's and of planning a graph, on 1, 2 and 4 ranks, and what FSDP leaves.

Each count of ranks is a job of its own. A rank measures by how much its resident
memory grows from before the step to the step's peak, parameters and their
gradients included.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

EXTENT = 1536
RANKS = (1, 2, 4)
# Of one sample's attention.
ROWS, HEADS, FEATURES = 32768, 8, 64
# The Fourier operator's.
PIXELS, CHANNELS, MODES = 512, 32, 16
# FSDP's: wide enough for parameters to count.
WIDTH, FSDP_EXTENT = 64, 512


def report():
    """The lines of the tables, from jobs that this process starts."""
    import graphs

    unet = f"a UNet training step, {EXTENT} x {EXTENT}"
    attention = f"attention, {ROWS} rows, {HEADS} heads of {FEATURES}, both ways"
    fno = f"an FNO training step, {PIXELS} x {PIXELS}, {CHANNELS} channels"
    of_graph = f"a MeshGraphNet step, {graphs.SIDE}² nodes, {graphs.CHANNELS} channels"
    planning = f"planning a graph of {graphs.PLANNED_SIDE}² nodes, 10 M edges"
    titles = {
        "domain": unet,
        "attention": attention,
        "fno": fno,
        "graph": of_graph,
        "planning": planning,
    }
    tables = [report_of_ranks(what, title) for what, title in titles.items()]
    return "\n\n".join([*tables, report_of_fsdp()])


def report_of_ranks(what, title):
    grown = {ranks: measure_with(ranks, what)["step"] for ranks in RANKS}
    lines = [f"### Peak memory of {title}", ""]
    lines += ["| ranks | growth per rank | of one process | 1/N |", "|---|---|---|---|"]
    for ranks, size in grown.items():
        share = size / grown[1]
        lines.append(
            f"| {ranks} | {size / 2**20:.0f} MiB | {share:.3f} | {1 / ranks:.3f} |"
        )
    return "\n".join(lines)


def report_of_fsdp():
    alone, ours = measure_with(1, "fsdp"), measure_with(4, "fsdp")
    title = f"### FSDP2 on data x domain = 2 x 2, one {FSDP_EXTENT} x {FSDP_EXTENT} "
    lines = [f"{title}image per sample, UNet {WIDTH} channels wide, Adam", ""]
    lines += ["| | one rank | 2 x 2, per rank | share |", "|---|---|---|---|"]
    for what, size in alone.items():
        cells = [f"{x / 2**20:.2f} MiB" for x in (size, ours[what])]
        cells.append(f"{ours[what] / size:.3f}")
        lines.append(f"| {what} | {' | '.join(cells)} |")
    note = "Step: growth to the peak of forward and backward, mostly activations."
    return "\n".join([*lines, "", note])


def measure_with(ranks, what):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, what]
    # Freed tensors go back to the system at once, small ones of many ranks, too.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def growth(run):
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    run()
    return status("VmHWM") - before


def sample(extent, mesh):
    import torch
    from torch.distributed.tensor import Shard

    from shardtensor import ShardTensor

    piece = torch.randn(1, 3, extent // mesh.size(), extent)
    return ShardTensor.from_local(piece, mesh, (Shard(2),))


def by_domain(manager):
    from unet import make

    mesh = manager.initialize_mesh((-1,), ("domain",))

    def step(extent):
        make()(sample(extent, mesh)).square().mean().backward()

    step(64)  # code and threads that come with the first call
    return {"step": growth(lambda: step(EXTENT))}


def by_attention(manager):
    import torch.nn.functional as F

    mesh = manager.initialize_mesh((-1,), ("domain",))

    def step(rows):
        q, k, v = (sequence(rows, mesh).requires_grad_() for _ in range(3))
        F.scaled_dot_product_attention(q, k, v).square().mean().backward()

    step(64)
    return {"step": growth(lambda: step(ROWS))}


def sequence(rows, mesh):
    import torch
    from torch.distributed.tensor import Shard

    from shardtensor import ShardTensor

    piece = torch.randn(1, HEADS, rows // mesh.size(), FEATURES)
    return ShardTensor.from_local(piece, mesh, (Shard(2),))


def by_fno(manager):
    from neuralop.models import FNO

    from shardtensor import new_tensors_on

    mesh = manager.initialize_mesh((-1,), ("domain",))
    model = FNO((MODES, MODES), 3, 1, hidden_channels=CHANNELS, n_layers=4)

    def step(extent):
        with new_tensors_on(mesh):
            model(sample(extent, mesh)).square().mean().backward()

    step(64)
    model.zero_grad()
    return {"step": growth(lambda: step(PIXELS))}


def by_graph(manager):
    import graphs
    import torch

    mesh = manager.initialize_mesh((-1,), ("domain",))
    model = graphs.Processor()

    def step(side):
        tensors = graphs.sharded(mesh, *graphs.cut(mesh, side), graphs.CHANNELS)
        return graphs.step(model, *tensors)

    torch.manual_seed(0)
    step(16)()
    return {"step": growth(step(graphs.SIDE))}


def by_planning(manager):
    """By ShardGraph: from the edges as they come to each rank's halo."""
    import graphs

    from shardtensor import ShardGraph

    mesh = manager.initialize_mesh((-1,), ("domain",))
    ShardGraph(*graphs.scattered(mesh, 16))
    given = graphs.scattered(mesh, graphs.PLANNED_SIDE)
    return {"step": growth(lambda: ShardGraph(*given))}


def by_fsdp(manager):
    import torch
    from unet import make

    from shardtensor import parallelize

    side = 2 if manager.world_size == 4 else 1
    mesh = manager.initialize_mesh((side, side), ("data", "domain"))
    model = parallelize(make(width=WIDTH), mesh, "fsdp" if side > 1 else None)
    optimizer = torch.optim.Adam(model.parameters())

    def step(extent):
        model(sample(extent, mesh["domain"])).square().mean().backward()

    step(64)
    optimizer.step()
    model.zero_grad()
    grown = growth(lambda: step(FSDP_EXTENT))
    parameters = list(model.parameters())
    moments = [x for own in optimizer.state.values() for x in own.values()]
    return {
        "parameters": held(parameters),
        "gradients": held(p.grad for p in parameters),
        "optimizer": held(moments),
        "step": grown,
    }


def held(tensors):
    """The bytes that this rank has of them."""
    local = (x.to_local() if hasattr(x, "to_local") else x for x in tensors)
    return sum(x.numel() * x.element_size() for x in local)


def main():
    import torch
    import torch.distributed as dist

    from shardtensor.distributed import DistributedManager

    torch.set_num_threads(1)
    DistributedManager.initialize()
    ways = {
        "domain": by_domain,
        "attention": by_attention,
        "fno": by_fno,
        "graph": by_graph,
        "planning": by_planning,
        "fsdp": by_fsdp,
    }
    sizes = ways[sys.argv[1]](DistributedManager())
    most = torch.tensor(list(sizes.values()))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps(dict(zip(sizes, most.tolist(), strict=True))))
    DistributedManager.cleanup(barrier=True)


if __name__ == "__main__":
    main()
