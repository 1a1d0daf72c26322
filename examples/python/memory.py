"""How much memory a piece of work needs at its peak."""

import ctypes
import resource
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


class PeakMemory:
    """Bytes beyond what the process held when this was made: device memory on
    CUDA, else resident memory. The kernel keeps the mark, so no peak between
    two looks is missed. One at a time: making a second restarts the first."""

    def __init__(self, device):
        self.cuda = device if device.type == "cuda" else None
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.cuda)
        else:
            return_freed_memory()
            reset_peak_resident()
        self.before = self.mark()

    def peak(self):
        return self.mark() - self.before

    def mark(self):
        if self.cuda:
            return torch.cuda.max_memory_allocated(self.cuda)
        return peak_resident()


def return_freed_memory():
    """To the system, where C's library can. Else what was freed before counts
    as held, and is used again without a trace."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def reset_peak_resident():
    """Linux can; elsewhere the mark is that of the whole life of the process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_resident():
    if not STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    lines = STATUS.read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024
