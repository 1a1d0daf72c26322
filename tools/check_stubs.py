#!/usr/bin/env python3
"""Checks that _C.pyi tells the truth about the built extension.

Both must have the same functions, classes and members, and functions that
pybind11 documents must have the parameters that the stub gives them.
Needs the built package on the path: `make build`, PYTHONPATH=python.
"""

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python" / "shardtensor" / "_C.pyi"

# A signature: its parameters, a * for each keyword-only border.
Signatures = set[tuple[str, ...]]


def parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    given = function.args
    names = [a.arg for a in [*given.posonlyargs, *given.args]]
    if given.vararg is not None:
        names.append("*" + given.vararg.arg)
    elif given.kwonlyargs:
        names.append("*")
    names += [a.arg for a in given.kwonlyargs]
    if given.kwarg is not None:
        names.append("**" + given.kwarg.arg)
    return tuple(n for n in names if n not in ("self", "cls"))


def read_stub(body: list[ast.stmt]) -> dict[str, object]:
    """Name -> Signatures of a function, members of a class, None for a value."""
    names: dict[str, object] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            is_property = any(
                isinstance(d, ast.Name) and d.id == "property"
                for d in node.decorator_list
            )
            if is_property:
                names[node.name] = None
            elif isinstance(names.setdefault(node.name, set()), set):
                names[node.name].add(parameters(node))
        elif isinstance(node, ast.ClassDef):
            names[node.name] = read_stub(node.body)
        elif isinstance(node, ast.AnnAssign):
            names[node.target.id] = None
    return names


def documented(value: object) -> Signatures:
    """The signatures in a docstring of pybind11's; none where it has none."""
    found = set()
    for line in (getattr(value, "__doc__", None) or "").splitlines():
        match = re.match(r"(?:\d+\. )?\w+(\(.*)", line)
        if match is None:
            continue
        # Defaults are printed by repr, which is not always an expression.
        text = re.sub(r"<[^<>]*>", "None", match[1])
        try:
            (function,) = ast.parse(f"def f{text}: ...").body
        except SyntaxError:
            continue
        if parameters(function) != ("*args", "**kwargs"):
            found.add(parameters(function))
    return found


def agree(stub: Signatures, built: Signatures) -> bool:
    """Equal, where pybind11's nameless arg0, arg1, ... match any name."""

    def same(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
        return len(a) == len(b) and all(
            x == y or re.fullmatch(r"arg\d+", y) for x, y in zip(a, b, strict=True)
        )

    return len(stub) == len(built) and all(any(same(s, b) for b in built) for s in stub)


def is_public(name: str) -> bool:
    return not name.startswith("__") and name != "_pybind11_conduit_v1_"


def compare(stub: dict[str, object], built: object, where: str) -> list[str]:
    found = []
    present = {n for n in vars(built) if is_public(n)}
    present -= {n for n in present if isinstance(vars(built)[n], ModuleType)}
    for name in sorted(present - set(stub)):
        found.append(f"{where}.{name} is not in the stub")
    for name, entry in sorted(stub.items()):
        if not hasattr(built, name):
            found.append(f"{where}.{name} is in the stub only")
            continue
        value = getattr(built, name)
        if isinstance(entry, dict):
            found += compare(entry, value, f"{where}.{name}")
        elif isinstance(entry, set) and is_public(name):
            signatures = documented(value)
            if signatures and not agree(entry, signatures):
                found.append(
                    f"{where}.{name}: the stub has {sorted(entry)}, "
                    f"the extension {sorted(signatures)}"
                )
    return found


def main() -> int:
    import torch  # noqa: F401  loads the libraries that _C links

    from shardtensor import _C

    stub = read_stub(ast.parse(STUB.read_text()).body)
    found = compare(stub, _C, "_C")
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
