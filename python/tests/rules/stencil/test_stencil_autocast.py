"""Stencils under autocast: some compute in float32."""

import pytest
import rig
import torch
import torch.nn.functional as F
from ranks import check_op, ranks, sharded
from torch.distributed.tensor import Shard

DTYPES = [torch.float32, torch.bfloat16]
if rig.DEVICE == "guarded":
    del DTYPES[1]  # its autocast widens nothing, and kernels of the CPU refuse it


def reflect(x):
    return F.pad(x, [1, 2] * min(x.dim() - 2, 2), mode="reflect")


def repeat(x):
    return F.pad(x, [1, 2] * (x.dim() - 2), mode="replicate")


def pool(name):
    def pooled(x):
        return getattr(F, f"{name}_pool{x.dim() - 2}d")(x, 2)

    return pooled


def resize(mode):
    def resized(x):
        return F.interpolate(x, scale_factor=1.5, mode=mode)

    return resized


STENCILS = {
    "reflect": (reflect, (1, 2)),
    "replicate": (repeat, (1, 2, 3)),
    "avg": (pool("avg"), (2, 3)),
    "max": (pool("max"), (2, 3)),
    "adaptive avg": (pool("adaptive_avg"), (1, 2, 3)),
    "adaptive max": (pool("adaptive_max"), (1, 2, 3)),
    "nearest": (resize("nearest"), (1, 2, 3)),
    "nearest-exact": (resize("nearest-exact"), (1, 2, 3)),
    "bilinear": (resize("bilinear"), (2,)),
    "bicubic": (resize("bicubic"), (2,)),
}


class Autocast:
    def __init__(self, stencil):
        self.stencil = stencil

    def __call__(self, x):
        with rig.autocast(torch.bfloat16):
            return self.stencil(x)


@ranks(2, 3)
@pytest.mark.parametrize("kind", STENCILS)
def test_the_dtype_is_that_of_one_device(mesh, kind):
    stencil, dims = STENCILS[kind]
    first = [5] + [0] * (mesh.size() - 1)
    for n in dims:
        for dtype in DTYPES:
            x = torch.randn([2, 3] + [5] * n).to(dtype).requires_grad_()
            for cut in ({}, {2: first}):
                part = sharded(x, [Shard(2)], cut)
                check_op(Autocast(stencil), part, mesh=mesh, rtol=5e-2, atol=5e-2)
