"""Where the time of the UNet's step goes, by torch.profiler."""

import torch
import torch.distributed as dist
from report import Table
from torch.profiler import ProfilerActivity, profile
from unet import EXTENT, variants

VARIANTS = ("no communication", "only meeting", "ShardTensor")
ROUNDS = 7
# The first group that has a piece of the event's name takes its time.
GROUPS = {
    "waiting and messages": ("shardtensor::messages", "::all_reduce", "c10d::", "Meet"),
    "convolutions": ("convolution", "conv2d"),
    "norms": ("group_norm", "NormBackward"),
    "up-sampling": ("upsample", "UpsampleBackward"),
    "activations": ("silu",),
    "copies, zeros, sums": ("copy_", "cat", "fill_", "aten::add"),
    "everything else": ("",),
}


def table(mesh):
    image = torch.randn(1, 3, EXTENT, EXTENT)
    steps = variants(image, mesh)
    for name in VARIANTS:
        steps[name]()
    rounds = [
        {name: groups_of(steps[name]) for name in VARIANTS} for _ in range(ROUNDS)
    ]
    rows = {
        group: {name: [r[name][group] for r in rounds] for name in VARIANTS}
        for group in GROUPS
    }
    title = "Where the time of that step goes, mean over ranks, with the profiler on"
    return Table(title, None, rows)


def groups_of(step):
    """Seconds of this rank's own thread in each group, mean over ranks."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    times = dict.fromkeys(GROUPS, 0.0)
    for event in profiled.key_averages():
        group = next(g for g, words in GROUPS.items() if any_in(words, event.key))
        times[group] += event.self_cpu_time_total * 1e-6
    seconds = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(seconds)
    return dict(zip(GROUPS, (seconds / dist.get_world_size()).tolist()))


def any_in(words, key):
    return any(word in key for word in words)
