"""What the network made of the slices that it never learnt from."""

import torch.nn.functional as F
from brain import CLASSES, held_out_slices
from report import console, plt, save
from unet import dice


def show_scores(scores):
    """Of each class, on the slices that were held out."""
    each = ", ".join(
        f"{name} {score:.3f}" for name, score in zip(CLASSES, scores, strict=True)
    )
    console.print(f"Dice on slices never learnt from: {each}")


def dice_of_classes(prediction, labels):
    """Of each class, on the slices that were held out."""
    unseen = held_out_slices(labels.shape[-1])
    certain = F.one_hot(prediction[..., unseen], len(CLASSES)).movedim(-1, 1)
    return dice(certain, labels[..., unseen]).tolist()


def draw(path, volume, labels, prediction, borders, scores):
    """One axial slice that was held out: volume, truth and prediction. `borders`
    says where the shards meet, {tensor dim: [index, ...]}; dims 2 and 3 are seen
    here."""
    unseen = held_out_slices(labels.shape[-1])
    height = (unseen.start + unseen.stop) // 2
    slices = {
        "T1": volume[0, 0, :, :, height],
        "truth": labels[0, :, :, height],
        "prediction": prediction[0, :, :, height],
    }
    figure, axes = plt.subplots(1, 3, figsize=(12, 5.2), layout="constrained")
    for axis, (title, image) in zip(axes, slices.items(), strict=True):
        colours = "gray" if title == "T1" else "viridis"
        axis.imshow(image.T, origin="lower", cmap=colours)
        axis.set_title(title)
        axis.set_axis_off()
        for border in borders.get(2, []):
            axis.axvline(border - 0.5, color="tab:red", linestyle="--")
        for border in borders.get(3, []):
            axis.axhline(border - 0.5, color="tab:red", linestyle="--")
    overlaps = ", ".join(f"{n} {s:.2f}" for n, s in zip(CLASSES, scores, strict=True))
    figure.suptitle(f"a slice never learnt from; Dice: {overlaps}; dashed: shards meet")
    save(figure, path)
