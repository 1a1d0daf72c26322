#!/usr/bin/env python3
"""Checks the layer order (a file includes only from its own and lower layers),
the list of headers that are installed, and that all others are `detail`."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# From low to high; those of one line know nothing of each other. A folder that is
# not listed is a part of the one around it. In rules/ each family is a folder; later
# lines may use simpler families. Nobody includes mpi, a library of its own.
LAYERS = [
    {"threads"},
    {"layout", "points"},
    {"layout/plans"},
    {"comm"},
    {"comm/primitives"},
    {"collectives"},
    {"tensor", "distributed"},
    {"halo", "mpi"},
    {"dispatch"},
    {
        "rules/ops",
        "rules/matrix",
        "rules/random",
        "rules/view",
        "rules/reduce",
        "rules/index",
        "rules/order",
        "rules/spectra",
    },
    {"rules/norm", "rules/stencil", "rules/attention", "rules/points"},
    {"rules/neighborhood"},
    {"graph", "cells"},
]
PUBLIC_HEADERS = ROOT / "cmake" / "public_headers.cmake"
# Exported for the Python package and not installed.
FOR_PYTHON = {
    "shardtensor/comm/check.h",
    "shardtensor/comm/roll_call.h",
    "shardtensor/comm/wire.h",
    "shardtensor/dispatch/handlers.h",
    "shardtensor/dispatch/arguments/promotion.h",
    "shardtensor/distributed/backends.h",
    "shardtensor/distributed/choices.h",
    "shardtensor/distributed/leaving.h",
    "shardtensor/layout/mesh_axes.h",
    "shardtensor/tensor/dtensor.h",
    "shardtensor/threads/setting.h",
}
FOLDERS = ["shardtensor", "python", "tests", "benchmarks", "examples"]
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')
# Whole-library headers are slow to compile; the core knows no Python.
WIDE = re.compile(r"torch/(torch|extension)\.h")
NEEDS_PYTHON = re.compile(r"Python\.h|pybind11/.*|torch/csrc/.*/(python_.*|pybind)\.h")
# Templates of ATen that are plain loops without OpenMP.
PLAIN_LOOPS = re.compile(r"at::parallel_(for|reduce)\(")
C10D = re.compile(r"torch/csrc/distributed/.*")
KNOW_C10D = {None, "comm", "distributed", "mpi"}


def layer_of(parts: tuple[str, ...]) -> str | None:
    """The layer of a file below shardtensor/; None for the few at its root."""
    folders = parts[1:-1]
    inner = "/".join(folders[:2])
    listed = folders[:1] == ("rules",) or any(inner in names for names in LAYERS)
    return (inner if listed else "/".join(folders[:1])) or None


def allowed(layer: str) -> set[str]:
    """The layers that a file in `layer` may include from, its own among them."""
    level = next(i for i, names in enumerate(LAYERS) if layer in names)
    return {layer}.union(*LAYERS[:level]) - ({"mpi"} - {layer})


def problems(path: Path) -> list[str]:
    part = path.parts[0]
    layer = layer_of(path.parts) if part == "shardtensor" else None
    if layer is not None and not any(layer in names for names in LAYERS):
        known = ", ".join(sorted(set().union(*LAYERS)))
        return [f"{path}: unknown layer {layer}, expected one of {known}"]
    found = []
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        if part == "shardtensor" and PLAIN_LOOPS.search(line):
            found.append(f"{path}:{number}: has no threads, see threads/parallel_for.h")
        match = INCLUDE.match(line)
        if match is None:
            continue
        bracket, header = match.groups()
        where = f"{path}:{number}: includes {header}"
        if WIDE.fullmatch(header):
            found.append(f"{where}: name the narrow headers instead")
        if part == "shardtensor" and NEEDS_PYTHON.fullmatch(header):
            found.append(f"{where}: only python/ knows Python")
        if layer not in KNOW_C10D and C10D.fullmatch(header):
            found.append(f"{where}: only comm, distributed and mpi know c10d")
        names = header.split("/")
        if names[0] != "shardtensor":
            if bracket == '"' and part == "shardtensor":
                found.append(f'{where}: write the path as "shardtensor/..."')
            continue
        if layer is not None and layer_of(tuple(names)) not in allowed(layer):
            below = ", ".join(sorted(allowed(layer)))
            found.append(f"{where}: {layer} may include from {below}")
    return found


def public_headers() -> set[str]:
    """shardtensor.h and all of ours that it includes, one through another."""
    reached, left = set(), ["shardtensor/shardtensor.h"]
    while left:
        header = left.pop()
        if header not in reached and (ROOT / header).exists():
            reached.add(header)
            lines = (ROOT / header).read_text().splitlines()
            left += [m.group(2) for m in map(INCLUDE.match, lines) if m]
    return {header for header in reached if header.startswith("shardtensor/")}


def unlisted_headers() -> list[str]:
    """What cmake/public_headers.cmake should say, and does not."""
    listed = set(re.findall(r"shardtensor/\S+\.h", PUBLIC_HEADERS.read_text()))
    listed.discard("shardtensor/version.h")
    return [
        f"cmake/public_headers.cmake: {header}: "
        + (
            "is not listed"
            if header not in listed
            else "shardtensor.h does not reach it"
        )
        for header in sorted(public_headers() ^ listed)
    ]


def outside_detail() -> list[str]:
    """Headers that are not installed say so by their namespace."""
    kept = public_headers() | FOR_PYTHON
    private = {str(h.relative_to(ROOT)) for h in (ROOT / "shardtensor").rglob("*.h")}
    return [
        f"{header}: not installed, so its namespace is shardtensor::detail"
        for header in sorted(private - kept)
        if re.search(r"^namespace shardtensor \{", (ROOT / header).read_text(), re.M)
    ]


def main() -> int:
    files = sorted(
        path.relative_to(ROOT)
        for folder in FOLDERS
        for pattern in ("*.h", "*.cpp")
        for path in (ROOT / folder).rglob(pattern)
    )
    found = [problem for path in files for problem in problems(path)]
    found += unlisted_headers() + outside_detail()
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
