"""Wrong arguments: PyTorch's samples with one argument changed.

`python -m conformance --wrong`: ranks must do what one device does, raise with one text
on all of them or give its values, and nobody may wait for another. That ranks refuse
what one device takes by chance, or take what one of its kernels lacks, is no failure.
"""

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from conformance import subjects
from conformance.sample import Sample

FAILED = ("wrong", "differs", "hang", "died")
# Of numbers that do not fit, PyTorch's kernels read or write outside of memory, take
# any mode, or rows for a batch (lstsq): processes end, and values are whatever was
# there. More vectors than a matrix has directions are any.
UNCHECKED = (
    "_batch_norm_with_update", "_native_batch_norm_legit", "_segment_reduce.lengths",
    "_segment_reduce.offsets", "grid_sampler_2d", "grid_sampler_3d", "linalg.lstsq",
    "linalg.lstsq.grad_oriented", "lu_unpack", "native_batch_norm", "nn.CTCLoss",
    "nn.functional.ctc_loss", "nn.functional.scaled_dot_product_attention",
    "pca_lowrank", "resize_", "resize_as_", "svd_lowrank",
)  # fmt: skip


def samples(name, count, turn=0):
    """Those of a subject, each with one argument changed."""
    if name in UNCHECKED or name.startswith("torch."):
        return []
    return [x for sample in _right(name, count, turn) for x in _wrong(sample)]


def _right(name, count, turn):
    if name in subjects.MODULES:
        return subjects.module_samples(subjects.MODULES[name], count, turn)
    info = subjects.OPERATORS[name]
    taken = info.supported_dtypes("cpu")
    dtype = next((d for d in subjects.DTYPES if d in taken), None)
    found = subjects._samples_of(info, dtype, count, turn) if dtype else ()
    return [s for s in found if "out" not in s.kwargs]


def _wrong(sample):
    leaves, tree = tree_flatten((sample.args, sample.kwargs))
    for i, leaf in enumerate(leaves):
        for what, other in _others(leaf):
            args, kwargs = tree_unflatten([*leaves[:i], other, *leaves[i + 1 :]], tree)
            label = f"{sample.label}, argument {i} {what}"
            yield Sample(label, sample.call, args, kwargs)


def _others(leaf):
    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
        for what, x in _other_tensors(leaf.detach()):
            needs_grad = leaf.requires_grad and x.is_floating_point()
            yield what, x.clone().requires_grad_(needs_grad)
    elif isinstance(leaf, int) and not isinstance(leaf, bool):
        for more in (1, -3, 9):
            yield f"{leaf} + {more}", leaf + more


def _other_tensors(x):
    for dim in range(x.dim() if x.numel() else 0):
        if x.size(dim) > 1:
            yield f"shorter in {dim}", x.narrow(dim, 0, x.size(dim) - 1)
        yield f"longer in {dim}", torch.cat([x, x.narrow(dim, 0, 1)], dim)
    if x.dim() and x.numel():
        yield "without its first dim", x[0]
        yield "without its last dim", x[..., 0]
    yield "with one more dim", x[None]
    yield "of another dtype", x.long() if x.is_floating_point() else x.double()
