"""How well the unseen fields were predicted, in numbers and on the surface."""

import mesh_data
import torch
from report import console, plt, save


def show_errors(heat, prediction):
    """Beside those of saying that nothing flows; 1 is the heat's deviation before."""
    before, after = heat[..., -mesh_data.UNSEEN :]
    of_model, of_persistence = (
        (guess - after).square().mean(0).sqrt() for guess in (prediction, before)
    )
    better = (of_model < of_persistence).sum().item()
    console.print(
        f"error of fields never learnt from: {of_model.mean():.3f}; of no flow: "
        f"{of_persistence.mean():.3f}; better in {better} of {mesh_data.UNSEEN}"
    )


def draw(path, heat, prediction, owners):
    """The pieces, and of one unseen field what is given, the truth, the prediction
    and the error, on the inflated surface seen from outside and from within."""
    before, after = heat[..., -mesh_data.UNSEEN]
    guess = prediction[:, 0]
    limit = after.abs().max().item()
    images = {
        "given": (before, before.abs().max().item()),
        "truth": (after, limit),
        "prediction": (guess, limit),
        "error": (guess - after, limit / 4),
    }
    figure, axes = plt.subplots(2, 5, figsize=(16, 5), layout="constrained")
    for row, side in zip(axes, (-1, 1), strict=True):
        place, triangles = view(side)
        owner = owners[triangles].amax(1)
        row[0].tripcolor(*place, triangles, facecolors=owner, cmap="tab10", vmax=10)
        row[0].set_title(f"{owners.max() + 1} pieces")
        for axis, (title, (field, high)) in zip(row[1:], images.items(), strict=True):
            colours = {"cmap": "RdBu_r", "vmin": -high, "vmax": high}
            values = field[triangles].mean(1)
            shown = axis.tripcolor(*place, triangles, facecolors=values, **colours)
            axis.set_title(title)
            figure.colorbar(shown, ax=axis, shrink=0.7)
    for axis in axes.flat:
        axis.set_aspect("equal")
        axis.axis("off")
    figure.suptitle("heat on the left cortex, from outside and from within")
    save(figure, path)


def view(side):
    """Places (2, nodes) on the page, and the triangles, far ones first: what is
    painted later hides them. Side -1 looks from the left, 1 from the right."""
    points, faces = mesh_data.surface("infl")
    x, y, z = points.T
    far_first = (side * x)[faces].mean(1).argsort()
    return torch.stack([side * y, z]), faces[far_first]
