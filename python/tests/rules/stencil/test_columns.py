"""Windows of cut images as columns, and back."""

import pytest
import torch
import torch.nn.functional as F
from layouts import placements_of
from ranks import check_op, partitions, ranks, sharded

import shardtensor

WINDOWS = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": (2, 3), "stride": 2, "padding": (0, 1)},
    "dilated": {"kernel_size": 2, "dilation": (2, 1)},
    "patches": {"kernel_size": 2, "stride": 2},
    "apart": {"kernel_size": 1, "stride": (3, 2)},
    "wide": {"kernel_size": 4, "padding": 3, "stride": (1, 3)},
}


def fold_of(x, windows, image):
    """As many columns as the windows of the image, from x."""
    like = F.unfold(torch.ones(1, 1, *image), **windows)
    return F.fold(F.unfold(x, **windows).exp()[..., : like.shape[-1]], image, **windows)


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("name", WINDOWS)
def test_columns_of_cut_images(mesh, name):
    windows = WINDOWS[name]
    for shape in ((2, 3, 8, 9), (2, 9, 6)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        first = len(shape) - 2
        for dim in (first, first + 1):
            for sizes in partitions(shape[dim], mesh.size()):
                image = sharded(x, placements_of(mesh, dim), {dim: sizes})
                with shardtensor.fallback_mode("error"):
                    check_op(lambda x: F.unfold(x, **windows), image, mesh=mesh)
                with shardtensor.fallback_mode("silent"):
                    check_op(
                        lambda x: fold_of(x, windows, tuple(x.shape[-2:])),
                        image,
                        mesh=mesh,
                    )


@ranks(2, 3)
def test_rows_of_columns_come_home(mesh):
    """What unfold cut by rows, fold brings back without a gather."""
    x = torch.randn(2, 3, 8, 6, dtype=torch.float64, requires_grad=True)
    for name, windows in WINDOWS.items():
        if name == "apart":
            continue  # rows that no window has
        with shardtensor.fallback_mode("error"):
            check_op(
                lambda x, w=windows: fold_of(x, w, (8, 6)),
                sharded(x, placements_of(mesh, 2)),
                mesh=mesh,
            )
