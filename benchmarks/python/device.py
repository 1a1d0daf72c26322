"""Where benchmarks run: DEVICE=cpu (the default) or cuda. Or guarded, the device of the
tests, with their support on the path: a dry run of what a GPU is given."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardtensor.distributed import DistributedManager

DEVICE = os.environ.get("DEVICE") or "cpu"
NAMES = ("cpu", "cuda", "guarded")


def missing():
    """Why nothing can be measured on DEVICE here, in one line; None where it can."""
    if DEVICE not in NAMES:
        return f"DEVICE={DEVICE}: expected cpu or cuda; nothing was measured"
    if DEVICE == "cuda" and not torch.cuda.is_available():
        return "DEVICE=cuda: this PyTorch sees no GPU; nothing was measured"
    return None


def backend(ranks):
    """None: DistributedManager's choice. NCCL wants a GPU for each rank; else messages
    go through the host."""
    if DEVICE == "guarded":
        return "cpu:gloo,guarded:guarded"
    if DEVICE == "cuda" and torch.cuda.device_count() < ranks:
        return "gloo"
    return None


def join(ranks):
    """The job that the launcher has started; its mesh, on DEVICE."""
    enter(int(os.environ.get("LOCAL_RANK", 0)))
    if chosen := backend(ranks):  # DistributedManager would take host tensors
        dist.init_process_group(chosen)
    else:
        DistributedManager.initialize()
    return init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("domain",))


def leave():
    if DistributedManager.is_initialized():
        DistributedManager.cleanup()
    else:
        dist.destroy_process_group()


def enter(rank):
    """From now on tensors and modules are made on this rank's device."""
    if DEVICE == "guarded":
        import guarded  # noqa: F401

        torch.set_default_device("guarded")
    if DEVICE == "cuda":
        place = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
        torch.set_default_device(place)


def finish():
    """What a call has queued is done when it returns."""
    if DEVICE != "cpu":
        torch.accelerator.synchronize()
