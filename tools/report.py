#!/usr/bin/env python3
"""Runs tests and benchmarks on whatever this machine has, into one file.

    make report                                  # everything, out/report.html
    make report ARGS="--tests python/tests/halo --parts operators unet"
    make report ARGS="--tests --parts unet"      # no tests, one benchmark
    make report DEVICE=cpu                       # though there is a GPU

Python tests and benchmarks run on a GPU where there is one; C++ tests, and those on
the guarded device, need none. The file stands alone (tables, plots, the text of each
failure), so that it can be sent. Exit status 1 where a test failed or a benchmark did
not come to its end.
"""

import argparse
import base64
import dataclasses
import datetime
import html
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks" / "python" / "run.py"
STYLE = """
body { font: 15px/1.45 sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 0.6em 0 }
td, th { border-bottom: 1px solid #ccc; padding: 0.2em 0.9em 0.2em 0 }
td, th { text-align: right }
td:first-child, th:first-child { text-align: left }
pre { background: #f4f4f4; padding: 0.7em; overflow-x: auto; font-size: 12px }
.failed { color: #b00020; font-weight: bold } .passed { color: #06702c }
"""


def main():
    args = parse()
    if told := choose_device():
        print(told)
        return 0
    args.output.parent.mkdir(parents=True, exist_ok=True)
    sections = [heading(), machine()]
    suites = run_tests(args.tests, args.guarded, args.cpp)
    sections += [section_of(suite) for suite in suites]
    failed = [suite for suite in suites if suite.failures or not suite.cases]
    for part in parts_of(args.parts):
        text, status = run_benchmark(part)
        sections.append(benchmark_section(part, text, status))
        failed += [part] if status else []
    body = "\n".join(sections)
    head = f"<title>shardtensor</title><style>{STYLE}</style>"
    args.output.write_text(f"<!doctype html><meta charset=utf-8>{head}\n{body}\n")
    print(f"report: {args.output}")
    return 1 if failed else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--tests", nargs="*", help="for pytest; none: none, default: all")
    add("--guarded", nargs="*", help="the same on the guarded device")
    add("--no-cpp", dest="cpp", action="store_false", help="without ctest")
    add("--parts", nargs="*", help="benchmarks; none: none, default: all")
    add("--output", type=Path, default=Path("out/report.html"))
    args = parser.parse_args()
    if args.tests is None:
        args.tests = ["python/tests"]
        args.guarded = args.guarded or os.environ.get("GUARDED_TESTS", "").split()
    return args


def choose_device():
    """DEVICE, which all that is started reads: what was asked for, else what the
    machine has. Why nothing can run there, in one line."""
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = os.environ.setdefault("DEVICE", found) or found
    os.environ["DEVICE"] = wanted
    if wanted not in ("cpu", "cuda"):
        return f"DEVICE={wanted}: expected cpu or cuda; nothing was run"
    if wanted == "cuda" and found == "cpu":
        return "DEVICE=cuda: this PyTorch sees no GPU; nothing was run"
    return None


# ---- the machine ------------------------------------------------------------


def heading():
    now = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    return f"<h1>shardtensor on {escape(platform.node())}</h1><p>{escape(now)}</p>"


def machine():
    rows = [
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    ]
    rows += [("processor", processor()), ("cores", str(len(os.sched_getaffinity(0))))]
    rows += [("memory", memory()), ("Python", platform.python_version())]
    rows += [("tests and benchmarks on", os.environ["DEVICE"])]
    rows += torch_rows()
    rows += [(name, version(*command)) for name, command in PROGRAMS.items()]
    return f"<h2>Machine</h2>{table(['', ''], rows)}"


PROGRAMS = {
    "commit": ("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    "compiler": (os.environ.get("CXX", "c++"), "--version"),
    "MPI": ("mpirun", "--version"),
    "GPU driver": ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv"),
}


def torch_rows():
    import torch

    rows = [("PyTorch", torch.__version__)]
    if not torch.cuda.is_available():
        return [*rows, ("GPU", "none")]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    nccl = ".".join(str(n) for n in torch.cuda.nccl.version())
    return [*rows, ("GPU", ", ".join(names)), ("NCCL", nccl)]


def processor():
    lines = read_lines("/proc/cpuinfo")
    return next((x.split(":")[1].strip() for x in lines if "model name" in x), "?")


def memory():
    lines = read_lines("/proc/meminfo")
    kib = next((int(x.split()[1]) for x in lines if x.startswith("MemTotal")), 0)
    return f"{kib / 2**20:.1f} GiB"


def read_lines(path):
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def version(program, *arguments):
    if shutil.which(program) is None:
        return "none"
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1 if "nvidia" in program else 0] if lines else "?"


# ---- tests ------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    group: str
    name: str
    seconds: float
    outcome: str  # passed, failed or skipped
    text: str = ""


@dataclasses.dataclass
class Suite:
    title: str
    cases: list[Case]

    @property
    def failures(self):
        return [case for case in self.cases if case.outcome == "failed"]


def run_tests(paths, guarded, with_cpp):
    pytest = [sys.executable, "-m", "pytest", "-m", "not tail"]
    suites = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.xml"

        def run(title, command, **settings):
            file.unlink(missing_ok=True)
            subprocess.run(command, cwd=ROOT, env=os.environ | settings)
            suites.append(Suite(title, cases_of(file)))

        if with_cpp and paths:
            ctest = ["ctest", "--preset", "dev", "-LE", "tail"]
            run("C++ tests", [*ctest, "--output-junit", file])
        xml = f"--junit-xml={file}"
        if paths:
            run("Python tests", [*pytest, *paths, xml])
        if guarded:
            command = [*pytest, *guarded, xml]
            run("Tests on the guarded device", command, DEVICE="guarded")
    return suites


def cases_of(file):
    """None where the tests did not come to their end."""
    if not file.exists():
        return []
    return [case_of(x) for x in ElementTree.parse(file).getroot().iter("testcase")]


def case_of(element):
    group = element.get("classname", "").removeprefix("python.tests.").split(".")[0]
    name, seconds = element.get("name", "?"), float(element.get("time") or 0)
    for kind, outcome in {
        "failure": "failed",
        "error": "failed",
        "skipped": "skipped",
    }.items():
        if (found := element.find(kind)) is not None:
            text = found.get("message") or ""
            return Case(group, name, seconds, outcome, found.text or text)
    return Case(group, name, seconds, "passed")


def section_of(suite):
    if not suite.cases:
        return f"<h2>{suite.title}</h2><p class=failed>did not come to their end</p>"
    groups = {}
    for case in suite.cases:
        groups.setdefault(case.group, []).append(case)
    rows = [(name, *counts(cases)) for name, cases in sorted(groups.items())]
    head = ["", "passed", "failed", "skipped", "seconds"]
    rows.append(("all", *counts(suite.cases)))
    failures = "".join(
        f"<h3 class=failed>{escape(case.name)}</h3><pre>{escape(case.text)}</pre>"
        for case in suite.failures
    )
    return f"<h2>{suite.title}</h2>{table(head, rows)}{failures}"


def counts(cases):
    of = [sum(c.outcome == o for c in cases) for o in ("passed", "failed", "skipped")]
    return (*map(str, of), f"{sum(case.seconds for case in cases):.0f}")


# ---- benchmarks -------------------------------------------------------------


def parts_of(wanted):
    if wanted is not None:
        return wanted
    listed = subprocess.run([sys.executable, BENCHMARKS, "--list"], capture_output=True)
    return listed.stdout.decode().split()


def run_benchmark(part):
    """What it printed, and its exit status. A part that fails takes no other along."""
    print(f"benchmark: {part}", flush=True)
    done = subprocess.run(
        [sys.executable, BENCHMARKS, part], capture_output=True, text=True
    )
    return done.stdout + (done.stderr if done.returncode else ""), done.returncode


def benchmark_section(part, text, status):
    parts = [f"<h2>{escape(part)}</h2>"]
    if status:
        return f"{parts[0]}<p class=failed>failed</p><pre>{escape(text)}</pre>"
    for title, head, rows in tables_of(text):
        parts.append(f"<h3>{escape(title)}</h3>{table(head, rows)}{plot(head, rows)}")
    return "".join(parts)


def tables_of(text):
    """(title, head, rows) of each table in Markdown."""
    found = []
    title = ""
    for line in text.splitlines():
        if line.startswith("###"):
            title = line.lstrip("# ")
        elif re.match(r"\|[\s|:-]+\|$", line):
            continue
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if title is not None:
                found.append((title, cells, []))
                title = None
            else:
                found[-1][2].append(cells)
        elif title is None:
            title = ""
    return found


def plot(head, rows):
    """The ratios of a table as bars; the line at 1 is what they refer to."""
    columns = [i for i, name in enumerate(head) if " / " in name]
    ratios = {head[i]: [number(row[i]) for row in rows] for i in columns}
    if not rows or not any(x is not None for values in ratios.values() for x in values):
        return ""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    height = 0.8 + 0.22 * len(rows) * len(columns)
    figure, axis = plt.subplots(figsize=(9, height), layout="constrained")
    width = 0.8 / len(columns)
    for place, (name, values) in enumerate(ratios.items()):
        at = [i + place * width for i in range(len(rows))]
        axis.barh(at, [value or 0 for value in values], width, label=name)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [row[0] for row in rows])
    axis.invert_yaxis()
    axis.legend(fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=90)
    plt.close(figure)
    data = base64.b64encode(picture.getvalue()).decode()
    return f'<p><img alt="ratios" src="data:image/png;base64,{data}"></p>'


def number(text):
    try:
        return float(text)
    except ValueError:
        return None


# ---- HTML -------------------------------------------------------------------


def table(head, rows):
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    lines = [line(head, "th")] if any(head) else []
    return f"<table>{''.join(lines + [line(row, 'td') for row in rows])}</table>"


def escape(text):
    return html.escape(str(text))


if __name__ == "__main__":
    sys.exit(main())
