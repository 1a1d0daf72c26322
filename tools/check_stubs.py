#!/usr/bin/env python3
"""Checks that _C.pyi tells the truth about the built extension.

Both must have the same functions, classes and members; functions, methods and
properties must have the parameters and types that pybind11 documents. The stub
may say more than pybind11 knows: `dict[str, int]` for its `dict`.
Needs the built package on the path: `make build`, PYTHONPATH=python.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python" / "shardtensor" / "_C.pyi"
# pybind11's way of writing what a reader calls by a shorter name.
SPELLINGS = {
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
    "typing.SupportsInt": "int",  # pybind11 3.1
    "typing.SupportsFloat": "float",
    "collections.abc.": "",
    "typing_extensions.": "",
    "shardtensor._C.": "",
    "torch._C._distributed_c10d.": "",
    "torch.": "",
}


@dataclass(frozen=True)
class Signature:
    """Names (a * before the keyword-only ones) and types, the result's last."""

    names: tuple[str, ...]
    types: tuple[str, ...]

    def __str__(self) -> str:
        typed = [f"{n}: {t}" if t else n for n, t in zip(self.names, self.types)]
        return f"({', '.join(typed)}) -> {self.types[-1]}"


Signatures = list[Signature]
# Name -> signatures of a function, type of a value, members of a class.
Members = dict[str, "Signatures | str | Members"]


def signature(function: ast.FunctionDef) -> Signature:
    given = function.args
    arguments = [*given.posonlyargs, *given.args]
    if given.vararg is not None:
        arguments.append(ast.arg("*" + given.vararg.arg, given.vararg.annotation))
    elif given.kwonlyargs:
        arguments.append(ast.arg("*"))
    arguments += given.kwonlyargs
    if given.kwarg is not None:
        arguments.append(ast.arg("**" + given.kwarg.arg, given.kwarg.annotation))
    arguments = [a for a in arguments if a.arg not in ("self", "cls")]
    types = [a.annotation for a in arguments] + [function.returns]
    return Signature(
        tuple(a.arg for a in arguments),
        tuple("" if t is None else ast.unparse(t) for t in types),
    )


def read_stub(body: list[ast.stmt]) -> Members:
    members: Members = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found = signature(node)
            decorators = {getattr(d, "id", None) for d in node.decorator_list}
            if "property" in decorators:
                members[node.name] = found.types[-1]
            else:
                members.setdefault(node.name, []).append(found)
        elif isinstance(node, ast.ClassDef):
            members[node.name] = read_stub(node.body)
        elif isinstance(node, ast.AnnAssign):
            members[node.target.id] = ast.unparse(node.annotation)
    return members


def documented(value: object) -> Signatures:
    """The signatures in a docstring of pybind11's; none where it has none."""
    found = []
    for line in (getattr(value, "__doc__", None) or "").splitlines():
        match = re.match(r"(?:\d+\. )?\w*(\(.*)", line)
        if match is None:
            continue
        # Defaults are printed by repr, which is not always an expression.
        text = re.sub(r"<[^<>]*>", "None", match[1])
        for long, short in SPELLINGS.items():
            text = text.replace(long, short)
        try:
            (function,) = ast.parse(f"def f{text}: ...").body
        except SyntaxError:
            continue
        if signature(function).names != ("*args", "**kwargs"):
            found.append(signature(function))
    return found


def fits(stub: str, built: str) -> bool:
    """Whether the stub's type is pybind11's, or more precise."""
    return built in ("", "object", stub.removesuffix(" | None"), stub.split("[")[0])


def agree(stub: Signature, built: Signature) -> bool:
    """Whether both are the same, where arg0, arg1, ... stand for any name."""
    return (
        len(stub.names) == len(built.names)
        and all(
            ours == theirs or re.fullmatch(r"arg\d+", theirs)
            for ours, theirs in zip(stub.names, built.names)
        )
        and all(map(fits, stub.types, built.types))
    )


def compare_functions(stub: Signatures, built: Signatures, where: str) -> list[str]:
    unknown = [b for b in built if not any(agree(s, b) for s in stub)]
    if not unknown and len(stub) == len(built) or not built:
        return []
    have, want = "; ".join(map(str, stub)), "; ".join(map(str, built))
    return [f"{where}: the stub has {have}, the extension {want}"]


def is_public(name: str) -> bool:
    return not name.startswith("__") and name != "_pybind11_conduit_v1_"


def compare(stub: Members, built: object, where: str = "_C") -> list[str]:
    """What differs, one line each."""
    present = {
        name
        for name, value in vars(built).items()
        if is_public(name) and not isinstance(value, ModuleType)
    }
    found = [f"{where}.{n} is not in the stub" for n in sorted(present - stub.keys())]
    for name, entry in sorted(stub.items()):
        place = f"{where}.{name}"
        if not hasattr(built, name):
            found.append(f"{place} is in the stub only")
            continue
        value = getattr(built, name)
        if isinstance(entry, dict):
            found += compare(entry, value, place)
        elif isinstance(entry, list) and is_public(name):
            found += compare_functions(entry, documented(value), place)
        elif isinstance(value, property):
            types = [s.types[-1] for s in documented(value.fget)]
            if not all(fits(entry, t) for t in types):
                found.append(f"{place}: the stub has {entry}, the extension {types[0]}")
    return found


def main() -> int:
    import torch  # noqa: F401  loads the libraries that _C links

    from shardtensor import _C

    found = compare(read_stub(ast.parse(STUB.read_text()).body), _C)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
