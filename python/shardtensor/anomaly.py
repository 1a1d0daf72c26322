"""torch.autograd.detect_anomaly where one rank's piece alone has the NaN."""

from __future__ import annotations

import contextlib
import math
import warnings
from functools import partial

import torch

from shardtensor import _C
from shardtensor.agree import gather


@contextlib.contextmanager
def found_by_all_ranks(loss: torch.Tensor):
    """Around a backward of a ShardTensor. PyTorch raises at once, on a rank whose
    piece has a NaN, while others wait for its messages; here backward goes on, and
    all ranks raise the same error after it: that of the node that ran first.
    Communication, in anomaly mode only: a gather of objects."""
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        yield
        return
    search = _Search()
    handles = [
        node.register_hook(partial(search.look, node.name(), node.metadata))
        for node in _nodes(loss.grad_fn)
    ]
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            yield
    finally:
        for handle in handles:
            handle.remove()
    everyone = gather(loss.device_mesh, None, search.found)
    places = [found or (math.inf, "") for found in everyone]
    count, text = min(places)
    if text:
        ranks = [rank for rank, place in enumerate(places) if place[0] == count]
        some = "" if len(ranks) == len(places) else f" (on mesh rank {ranks[0]})"
        raise RuntimeError(text + some)


def _nodes(root):
    """Those that compute: what accumulates gives nothing on."""
    seen, todo = set(), [root]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return [node for node in seen if node.next_functions]


class _Search:
    """For the first node that gives a NaN on, among those that have run."""

    def __init__(self):
        self.count = 0
        self.found: tuple[int, str] | None = None

    @torch.no_grad()
    def look(self, name, metadata, outputs, _):
        self.count += 1
        for i, output in enumerate(outputs):
            if self.found or output is None:
                continue
            own = _C.local(output) if _C.is_shard_tensor(output) else output
            if own.isnan().any():
                text = f"Function '{name}' returned nan values in its {i}th output."
                self.found = (self.count, text)
                lines = "".join(metadata.get("traceback_", ()))
                warnings.warn(
                    f"Error detected in {name}. Traceback of forward call that "
                    f"caused the error:\n{lines}",
                    stacklevel=2,
                )
