"""What the demos show: progress, tables and curves."""

from pathlib import Path

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from rich.box import SIMPLE_HEAD
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

    def __call__(self, step, added):
        self.count += 1
        text = f"loss {step.loss:.4f}  {step.seconds:.2f} s  {mib(added):.0f} MiB added"
        self.bar.update(self.task, advance=1, text=text)
        if not console.is_terminal:
            console.print(f"{self.title} {self.count}/{self.steps}  {text}")


# ---- tables -----------------------------------------------------------------


def show_losses(sharded, single):
    names = ("step", "sharded", "one process", "difference")
    table = Table(*names, title="loss", box=SIMPLE_HEAD, pad_edge=False)
    for i, (a, b) in enumerate(zip(sharded.steps, single.steps, strict=True)):
        difference = f"{abs(a.loss - b.loss):.1e}"
        table.add_row(str(i + 1), f"{a.loss:.6f}", f"{b.loss:.6f}", difference)
    console.print(right_aligned(table))
    console.print(f"largest difference of the losses: {largest(sharded, single):.1e}")


def largest(sharded, single):
    pairs = zip(sharded.steps, single.steps, strict=True)
    return max(abs(a.loss - b.loss) for a, b in pairs)


def show_costs(runs, pieces, single=None):
    """One row per rank, one for the same pieces without communication, if given.
    The first step, which plans, is left out of the times where there are others."""
    # Broken so that names are whole on 80 columns.
    table = Table(
        "", "added\nMiB", "peak\nMiB", "step\ns", "compute\ns", "comm.\ns",
        "messages", "all-\nreduces", "sent\nMiB",
        title="memory that training adds, and at the peak; time per step",
        box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False,
    )  # fmt: skip
    for rank, run in enumerate(runs):
        table.add_row(f"rank {rank}", *memory(run), *costs(run))
    slowest = max(pieces, key=step_seconds, default=None)
    if slowest is not None:
        table.add_row("pieces alone", "-", "-", *costs(slowest))
    if single is not None:
        table.add_row("one process", *memory(single), *costs(single))
    console.print(right_aligned(table))
    seconds = max(step_seconds(run) for run in runs)
    if slowest is not None:
        ceiling = step_seconds(slowest) / seconds
        console.print(f"speed: {ceiling:.0%} of the pieces' without communication")
    if single is not None:
        share = max(run.added_memory for run in runs) / single.added_memory
        time = seconds / step_seconds(single)
        console.print(f"training adds to a rank: {share:.0%} of one process")
        console.print(f"a step takes {time:.0%} of one process with the same cores")


def timed_steps(run):
    return run.steps[1:] or run.steps


def step_seconds(run):
    return median(s.seconds for s in timed_steps(run))


def memory(run):
    return f"{mib(run.added_memory):.0f}", f"{mib(run.peak_memory):.0f}"


def costs(run):
    seconds = step_seconds(run)
    waiting = median(s.waiting for s in timed_steps(run))
    last = run.steps[-1]
    return (
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


# ---- pictures ---------------------------------------------------------------


def draw_curves(path, runs, single=None):
    """Losses of both runs, and the memory that training adds to each process."""
    figure, (losses, bars) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    numbers = range(1, len(runs[0].steps) + 1)
    added = {f"rank {rank}": run.added_memory for rank, run in enumerate(runs)}
    if single is not None:
        values = [step.loss for step in single.steps]
        losses.plot(numbers, values, linewidth=6, alpha=0.4, label="one process")
        added = {"one process": single.added_memory, **added}
    values = [step.loss for step in runs[0].steps]
    losses.plot(numbers, values, color="black", label=f"{len(runs)} ranks")
    losses.set(xlabel="step", ylabel="loss", ylim=(0, None))
    losses.legend()
    drawn = bars.bar(list(added), [mib(value) for value in added.values()])
    bars.bar_label(drawn, fmt="%.0f")
    bars.set(ylabel="MiB that training adds")
    save(figure, path)


def save(figure, path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    console.print(f"picture: {path}")
