"""The stub of the extension says what the extension has."""

import ast
import sys
from types import SimpleNamespace

import pytest
from programs import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import check_stubs  # noqa: E402


def compare(stub, **names):
    members = check_stubs.read_stub(ast.parse(stub).body)
    return check_stubs.compare(members, SimpleNamespace(**names))


class Pair:
    first = 1
    second = 2


class Size:
    def rows(self):
        "(self: shardtensor._C.Size) -> int"

    rows = property(rows)


def test_stub_matches_extension(capsys):
    assert check_stubs.main() == 0, capsys.readouterr().out


def test_missing_and_extra_names_are_found():
    assert compare("def f(): ...", g=print) == [
        "_C.g is not in the stub",
        "_C.f is in the stub only",
    ]
    assert compare("class Pair:\n    first: int", Pair=Pair) == [
        "_C.Pair.second is not in the stub"
    ]


@pytest.mark.parametrize(
    ("doc", "found"),
    [
        ("f(x: int, y: list[str] = ['a']) -> int", 0),
        ("f(arg0: int, arg1: list) -> int", 0),
        ("f(x: typing.SupportsInt | typing.SupportsIndex, y: object) -> int", 0),
        ("f(x: int, y: list[str] = <object at 0x7f>) -> int", 0),
        ("f(*args, **kwargs)\nOverloaded.\n\n1. f(x: int, y: list) -> int", 0),
        ("Not a signature.", 0),
        ("f(x: int) -> int", 1),
        ("f(x: int, z: list[str]) -> int", 1),
        ("f(x: int, *, y: list[str]) -> int", 1),
        ("f(x: int, y: list[int]) -> int", 1),
        ("f(x: int, y: list[str]) -> float", 1),
        ("1. f(x: int, y: list) -> int\n2. f(x: int) -> int", 1),
    ],
)
def test_parameters_and_types_are_compared(doc, found):
    stub = "def f(x: int, y: list[str] = ...) -> int: ..."
    assert len(compare(stub, f=SimpleNamespace(__doc__=doc))) == found


@pytest.mark.parametrize(("type_", "found"), [("int", 0), ("str", 1)])
def test_types_of_properties_are_compared(type_, found):
    stub = f"class Size:\n    @property\n    def rows(self) -> {type_}: ..."
    assert len(compare(stub, Size=Size)) == found
