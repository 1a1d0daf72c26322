"""Tensors whose dims lie in memory in another order than row-major."""

import torch
from layouts import placements_of
from ranks import uneven

# How a tensor gets strides that are not row-major.
MEMORY = {
    "row_major": ((3, 4, 6, 5), lambda x: x),
    "permuted": ((3, 4, 6, 5), lambda x: x.permute(2, 0, 3, 1)),
    "transposed": ((6, 5), lambda x: x.t()),
    "channels_last": (
        (3, 4, 6, 5),
        lambda x: x.contiguous(memory_format=torch.channels_last),
    ),
    "one_channel": (
        (3, 1, 6, 5),
        lambda x: x.contiguous(memory_format=torch.channels_last),
    ),
    "computed": ((3, 4, 6, 5), lambda x: x.permute(0, 2, 3, 1) * 2 + 1),
    "steps": ((8, 12, 3), lambda x: x[:, ::2]),
    "inner": ((8, 12), lambda x: x[:, 3:9]),
    "rows": ((12, 8), lambda x: x[2:9]),
    "permuted_steps": ((8, 12, 3), lambda x: x.permute(1, 2, 0)[::2]),
    "one_row": ((1, 7, 6), lambda x: x.transpose(1, 2)),
    "small": ((3, 5), lambda x: x.t()),
    "expanded": ((6, 1, 4), lambda x: x.expand(6, 5, 4)),
}


def layouts_of(mesh, shape):
    """Every dim cut unevenly, and two dims on a 2-D mesh."""
    dims = range(len(shape))
    for dim in dims:
        sizes = uneven(shape[dim], mesh.size())
        yield placements_of(mesh, dim), {dim: sizes}
    if mesh.ndim == 2:
        yield from ((placements_of(mesh, d, 1 - d), None) for d in (0, 1))
