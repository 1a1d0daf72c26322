"""How well the unseen months were predicted."""

import ocean
from report import console, plt, save


def show_errors(fields, prediction):
    """In kelvin, beside those of saying that nothing changes."""
    of_model, of_persistence = errors(fields, prediction)
    better = sum(a < b for a, b in zip(of_model, of_persistence, strict=True))
    console.print(
        f"error of months never learnt from: {mean(of_model):.3f} K; that of the month "
        f"before: {mean(of_persistence):.3f} K; better in {better} of {len(of_model)}"
    )


def errors(fields, prediction):
    """Root mean squares over the sea, month by month: the model's, and those of
    the month before."""
    truth = fields[-ocean.UNSEEN :]
    before = ocean.temperature(fields[-ocean.UNSEEN - 1 : -1])
    return [
        [
            kelvin(ocean.error(guess, month))
            for guess, month in zip(x[:, None], truth[:, None])
        ]
        for x in (prediction, before)
    ]


def kelvin(mean_square):
    return mean_square.sqrt().item() * ocean.DEVIATION


def mean(values):
    return sum(values) / len(values)


def draw(path, fields, prediction, borders):
    """One unseen month: truth, prediction and error; and the errors of all.
    `borders` says where the shards meet, {tensor dim: [index, ...]}."""
    number = ocean.UNSEEN // 2
    month = fields[-ocean.UNSEEN :][number]
    land = month[1] == 0
    truth = month[0] * ocean.DEVIATION + ocean.MEAN
    guess = prediction[number, 0] * ocean.DEVIATION + ocean.MEAN
    figure, axes = plt.subplots(4, 1, figsize=(12, 8), layout="constrained")
    images = {"truth, K": truth, "prediction, K": guess, "error, K": guess - truth}
    for axis, (title, image) in zip(axes, images.items(), strict=False):
        is_error = title.startswith("error")
        limits = {"vmin": -2, "vmax": 2} if is_error else {"vmin": 296, "vmax": 304}
        colours = "RdBu_r" if is_error else "turbo"
        shown = axis.imshow(
            image.masked_fill(land, float("nan")),
            origin="lower",
            aspect="auto",
            extent=(0, 360, -5, 5),
            cmap=colours,
            **limits,
        )
        axis.set(title=title, ylabel="latitude")
        figure.colorbar(shown, ax=axis)
        for border in borders.get(2, []):
            axis.axhline(-5 + 10 * border / ocean.LATITUDES, color="black", ls="--")
        for border in borders.get(3, []):
            axis.axvline(360 * border / ocean.LONGITUDES, color="black", ls="--")
    of_model, of_persistence = errors(fields, prediction)
    months = range(1, ocean.UNSEEN + 1)
    axes[3].plot(months, of_persistence, "o-", color="gray", label="the month before")
    axes[3].plot(months, of_model, "o-", color="tab:red", label="the model")
    axes[3].set(xlabel="month never learnt from", ylabel="error, K", ylim=(0, None))
    axes[3].legend()
    figure.suptitle("sea-surface temperature, one month ahead; dashed: shards meet")
    save(figure, path)
