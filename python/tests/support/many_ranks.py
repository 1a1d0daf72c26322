"""One rank of a job of thousands, without the others: PyTorch's fake process group
says nothing to nobody, so what came has no meaning, and counts and sizes have."""

import ranks
import rig
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def run_on_one_of(count, body, *args):
    """What body(count, *args) returns, which joins such a job first."""
    (outcome,) = ranks.run_isolated(1, body, count, *args, world=False)
    assert outcome.kind == "ok", outcome.text
    return outcome.value


def join(count):
    """The mesh of a job of so many, of which this process is the one in the middle."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        "fake", store=FakeStore(), rank=count // 2, world_size=count
    )
    return init_device_mesh(rig.DEVICE, (count,))


def operators_of(call):
    """How many operators it runs, and the most bytes that one of them allocates."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        call()
    events = profile.function_events
    return len(events), max(event.self_cpu_memory_usage for event in events)
