"""A real brain volume: T1 at 1 mm, with maps of grey and white matter, from
the files that the nilearn package carries. Nothing is downloaded."""

from importlib.util import find_spec
from pathlib import Path

import nibabel
import numpy as np
import torch
import torch.nn.functional as F

CLASSES = ("other", "grey matter", "white matter")
SHAPE = (197, 233, 189)
# Found without importing nilearn, whose dependencies are not needed here.
DATA = Path(find_spec("nilearn").origin).parent / "datasets" / "data"
# The axial slices, as shares of the height, whose labels nobody learns from.
HELD_OUT = (0.45, 0.6)
UNSEEN = -100  # the class that cross_entropy leaves out
# Where the brain is, with a margin.
BRAIN = (slice(14, 182), slice(15, 219), slice(0, 172))


def load(mm=2):
    """The volume, (1, 1, *shape) float32, and the class of each voxel, (1, *shape)
    int64. Values are deviations from the brain's mean, cut at 1.5: what is
    outside must not hide the difference within. Voxels of 1 mm: all 197 x 233 x 189;
    of 2 mm: the brain only, 84 x 102 x 86; and so on."""
    volume, grey, white = (read(name) for name in ("t1", "gm", "wm"))
    if mm > 1:
        volume, grey, white = (coarser(x, mm) for x in (volume, grey, white))
    labels = torch.cat([1 - grey - white, grey, white], 1).argmax(1)
    inside = volume[volume > 0.1]
    return ((volume - inside.mean()) / inside.std()).clamp(-1.5, 1.5), labels


def hold_out(labels):
    """The labels to learn from: UNSEEN in the slices of HELD_OUT."""
    labels = labels.clone()
    labels[..., held_out_slices(labels.shape[-1])] = UNSEEN
    return labels


def held_out_slices(height):
    first, last = (int(share * height) for share in HELD_OUT)
    return slice(first, last)


def shape(mm=2):
    """What load gives, without loading."""
    if mm == 1:
        return SHAPE
    return tuple(-(-(s.stop - s.start) // mm) for s in BRAIN)


def read(name):
    """A map as (1, 1, *SHAPE), from 0 to 1."""
    file = f"mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz"
    image = nibabel.load(DATA / file)
    voxels = np.asarray(image.dataobj, dtype=np.float32) / 255
    return torch.from_numpy(voxels)[None, None]


def coarser(x, mm):
    return F.avg_pool3d(x[(..., *BRAIN)], mm, ceil_mode=True)
