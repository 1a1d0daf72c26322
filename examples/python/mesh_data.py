"""A real surface mesh, the left cortex of fsaverage5 from the files that the nilearn
package carries, and heat that flows on it, by linear finite elements."""

from importlib.util import find_spec
from pathlib import Path

import nibabel
import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import splu

NODES, FACES, EDGES = 10242, 20480, 61440
UNSEEN = 8  # fields that nobody learns from, the last ones
SOURCES = 60  # warm and cold nodes of a field
SPREAD = 20.0  # diffusivity x time in mm^2 that makes fields of sources
FLOW = 40.0  # and from what is given to what is asked
STEPS = 10  # of implicit Euler, each way
# Found without importing nilearn, whose dependencies are not needed here.
DATA = Path(find_spec("nilearn").origin).parent / "datasets" / "data" / "fsaverage5"


def surface(name="pial"):
    """Nodes in mm, (NODES, 3) float32, and triangles, (FACES, 3) int64: "pial" is
    the folded surface; "infl", smooth, shows what lies in its folds."""
    image = nibabel.load(DATA / f"{name}_left.gii.gz")
    points, faces = (torch.from_numpy(np.array(x.data)) for x in image.darrays)
    return points, faces.long()


def edges(faces):
    """Each side of a triangle, both ways, once: (2, EDGES)."""
    sides = torch.cat([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
    return torch.cat([sides, sides.flip(1)]).unique(dim=0).T.contiguous()


def heat_flow(fields, seed):
    """Heat on the nodes before and after the flow, (2, NODES, fields) float32, as
    deviations from no heat."""
    points, faces = surface()
    mass, stiffness = elements(points.double().numpy(), faces.numpy())
    sources = random_sources(fields, np.random.default_rng(seed)) / mass[:, None]
    before = diffuse(mass, stiffness, sources, SPREAD)
    after = diffuse(mass, stiffness, before, FLOW)
    heat = np.stack([before, after]) / before.std()
    return torch.from_numpy(heat).float()


def random_sources(fields, random):
    heat = np.zeros((NODES, fields))
    for field in heat.T:
        places = random.choice(NODES, SOURCES, replace=False)
        field[places] = random.standard_normal(SOURCES)
    return heat


def elements(points, faces):
    """Of linear triangles: lumped masses, (NODES), and the stiffness matrix."""
    corners = points[faces]
    # opposite[:, i] is the side that faces corner i.
    opposite = np.roll(corners, 1, axis=1) - np.roll(corners, 2, axis=1)
    area = np.linalg.norm(np.cross(opposite[:, 0], opposite[:, 1]), axis=1) / 2
    local = np.einsum("fik,fjk->fij", opposite, opposite) / (4 * area[:, None, None])
    rows, columns = np.repeat(faces, 3, axis=1), np.tile(faces, (1, 3))
    entries = (local.ravel(), (rows.ravel(), columns.ravel()))
    stiffness = sparse.csc_matrix(entries, shape=(NODES, NODES))
    mass = np.bincount(faces.ravel(), np.repeat(area / 3, 3), minlength=NODES)
    return mass, stiffness


def diffuse(mass, stiffness, heat, spread):
    solver = splu((sparse.diags(mass) + spread / STEPS * stiffness).tocsc())
    for _ in range(STEPS):
        heat = solver.solve(mass[:, None] * heat)
    return heat
