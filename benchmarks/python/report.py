"""Tables in Markdown, on the screen and in benchmarks/README.md."""

import dataclasses
import platform
import statistics
from pathlib import Path

import torch
from timing import median_ratio

BEGIN, END = "<!-- results: written by run.py -->", "<!-- end of results -->"


@dataclasses.dataclass
class Table:
    """rows: {what: {variant: [seconds per round]}}."""

    title: str
    base: str | None  # the variant that ratios refer to
    rows: dict
    note: str = ""

    def text(self):
        names = list(dict.fromkeys(n for times in self.rows.values() for n in times))
        compared = [n for n in names if self.base and n != self.base]
        head = ["", *names, *(f"{n} / {self.base}" for n in compared)]
        lines = [f"### {self.title}", "", row(head), row(["---"] * len(head))]
        for what, times in self.rows.items():
            cells = [duration(times.get(n)) for n in names]
            cells += [ratio(times, n, self.base) for n in compared]
            lines.append(row([what, *cells]))
        return "\n".join([*lines, "", self.note] if self.note else lines)


def row(cells):
    return f"| {' | '.join(cells)} |"


def duration(seconds):
    if seconds is None:
        return "-"
    middle = statistics.median(seconds)
    return f"{middle * 1e6:.2f} µs" if middle < 1e-3 else f"{middle * 1e3:.2f} ms"


def ratio(times, name, base):
    if name not in times or base not in times:
        return "-"
    return f"{median_ratio(times, name, base):.2f}"


def show(table):
    print(table.text(), end="\n\n", flush=True)


def write(path: Path, texts):
    """Replaces what stands between the two marks."""
    before, rest = path.read_text().split(BEGIN)
    after = rest.split(END)[1]
    results = "\n\n".join(texts)
    middle = f"{BEGIN}\n\n{machine()}\n\n{results}\n{END}"
    path.write_text(before + middle + after)


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((x.split(":")[1].strip() for x in lines if "model name" in x), "?")
    return f"PyTorch {torch.__version__}, Python {platform.python_version()}, {name}."
