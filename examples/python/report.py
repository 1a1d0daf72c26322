"""What the demo shows: progress, tables and a picture."""

from pathlib import Path

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from brain import CLASSES
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

console = Console(highlight=False)


class StepProgress:
    """A bar on a terminal; elsewhere a line per step."""

    def __init__(self, title, steps):
        self.title, self.count = title, 0
        columns = ["{task.description}", BarColumn(), MofNCompleteColumn()]
        self.bar = Progress(
            *columns,
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(title, total=steps, text="")
        self.steps = steps

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *_):
        self.bar.stop()

    def __call__(self, step, peak):
        self.count += 1
        text = f"loss {step.loss:.4f}  {step.seconds:.2f} s  peak {mib(peak):.0f} MiB"
        self.bar.update(self.task, advance=1, text=text)
        if not console.is_terminal:
            console.print(f"{self.title} {self.count}/{self.steps}  {text}")


# ---- tables -----------------------------------------------------------------


def show_losses(sharded, single):
    table = Table("step", "sharded", "one process", "difference", title="loss")
    for i, (a, b) in enumerate(zip(sharded.steps, single.steps, strict=True)):
        difference = f"{abs(a.loss - b.loss):.1e}"
        table.add_row(str(i + 1), f"{a.loss:.6f}", f"{b.loss:.6f}", difference)
    console.print(right_aligned(table))
    console.print(f"largest difference of the losses: {largest(sharded, single):.1e}")


def largest(sharded, single):
    pairs = zip(sharded.steps, single.steps, strict=True)
    return max(abs(a.loss - b.loss) for a, b in pairs)


def show_costs(runs, single=None):
    """One row per rank. The first step, which plans and warms up, is left out
    of the times where there are others."""
    table = Table(
        "", "peak MiB", "step s", "compute s", "comm. s", "messages",
        "all-reduces", "sent MiB",
        title="per step",
    )  # fmt: skip
    for rank, run in enumerate(runs):
        table.add_row(f"rank {rank}", *costs(run))
    if single is not None:
        table.add_row("one process", *costs(single))
    console.print(right_aligned(table))
    if single is not None:
        share = max(run.peak_memory for run in runs) / single.peak_memory
        console.print(f"largest peak memory of a rank: {share:.0%} of one process")


def costs(run):
    steps = run.steps[1:] or run.steps
    seconds = median(s.seconds for s in steps)
    waiting = median(s.waiting for s in steps)
    last = steps[-1]
    return (
        f"{mib(run.peak_memory):.0f}",
        f"{seconds:.2f}",
        f"{seconds - waiting:.2f}",
        f"{waiting:.2f}",
        str(last.messages),
        str(last.all_reduces),
        f"{mib(last.bytes):.2f}",
    )


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


def mib(count):
    return count / 2**20


def right_aligned(table):
    for column in table.columns[1:]:
        column.justify = "right"
    return table


# ---- the picture ------------------------------------------------------------


def draw(path, volume, labels, prediction, borders):
    """One axial slice: volume, truth and prediction. `borders` says where the
    shards meet, {tensor dim: [index, ...]}; dims 2 and 3 are seen here."""
    height = int(volume.shape[4] * 0.55)
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
    figure.suptitle(f"classes: {', '.join(CLASSES)}; dashed: where shards meet")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    console.print(f"picture: {path}")
