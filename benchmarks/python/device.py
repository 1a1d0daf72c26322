"""Where benchmarks run: DEVICE=cpu (the default) or cuda."""

import os

import torch

DEVICE = os.environ.get("DEVICE") or "cpu"


def missing():
    """Why nothing can be measured on DEVICE here, in one line; None where it can."""
    if DEVICE not in ("cpu", "cuda"):
        return f"DEVICE={DEVICE}: expected cpu or cuda; nothing was measured"
    if DEVICE == "cuda" and not torch.cuda.is_available():
        return "DEVICE=cuda: this PyTorch sees no GPU; nothing was measured"
    return None


def backend(ranks):
    """NCCL wants a GPU for each rank; else messages go through the host."""
    if DEVICE == "cuda":
        return "nccl" if torch.cuda.device_count() >= ranks else "gloo"
    return None


def enter(rank):
    """From now on tensors and modules are made on this rank's device."""
    if DEVICE == "cuda":
        place = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
        torch.set_default_device(place)


def finish():
    """What a call has queued is done when it returns."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
