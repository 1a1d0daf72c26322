"""Fair timing of several variants of the same work over all ranks."""

import ctypes
import gc
import statistics
import time

import device
import torch
import torch.distributed as dist

ROUNDS = 15
BLOCK = 0.02  # seconds that one variant runs before the next takes its turn
DRY = device.DEVICE == "guarded"  # nothing is measured: each variant runs once


def compare(variants, rounds=ROUNDS, calls=None):
    """Seconds per call of each variant, {name: function} -> {name: [seconds of
    each round]}. Variants take turns, so that a busy machine slows all alike;
    a round's time is that of the slowest rank. `calls` of a turn: by default as
    many as fill BLOCK; given, for long ones, one call warms up."""
    if DRY:
        return {name: slowest_rank([block(fn, 1)]) for name, fn in variants.items()}
    counts = {name: calls or calls_per_block(fn) for name, fn in variants.items()}
    for fn in variants.values() if calls else ():
        fn()
    times = {name: [] for name in variants}
    for _ in range(rounds):
        for name, fn in variants.items():
            times[name].append(block(fn, counts[name]))
    return {name: slowest_rank(seconds) for name, seconds in times.items()}


def on_rank_0(fn, threads=1):
    """Other ranks leave it their cores."""

    def run():
        if dist.get_rank() != 0:
            return None
        torch.set_num_threads(threads)
        try:
            return fn()
        finally:
            torch.set_num_threads(1)

    return run


def calls_per_block(fn):
    """The same on all ranks; warms up, too."""
    for _ in range(3):
        fn()
    seconds = slowest_rank([block(fn, 3)])[0]
    return max(1, int(BLOCK / seconds))


def block(fn, calls):
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        fn()
    device.finish()
    return (time.perf_counter() - begin) / calls


def give_back_memory():
    """To the system what is free but was kept: see KEEP_MEMORY in run.py."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def slowest_rank(seconds):
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def median_ratio(times, name, base):
    pairs = zip(times[name], times[base], strict=True)
    return statistics.median(a / b for a, b in pairs)
