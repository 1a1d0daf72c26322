"""One file that says what tests and benchmarks came to on a machine."""

import importlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = [sys.executable, ROOT / "tools" / "report.py", "--no-cpp"]
FAILING = (
    "def test_good():\n    pass\n\ndef test_bad():\n    assert 1 + 1 == 3, '<&>'\n"
)

PRINTED = """### first, over gloo

|  | plain | sharded | sharded / plain |
| --- | --- | --- | --- |
| add | 1.00 ms | 1.05 ms | 1.05 |

A note.

### second

| ranks | time |
| --- | --- |
| 64 | 3 ms |
"""


def report(tmp_path, *arguments):
    page = tmp_path / "report.html"
    done = subprocess.run([*PROGRAM, f"--output={page}", *arguments], cwd=ROOT)
    return done.returncode, page.read_text()


def test_a_failure_is_told(tmp_path):
    (tmp_path / "test_some.py").write_text(FAILING)
    status, page = report(tmp_path, f"--tests={tmp_path}", "--parts")
    assert status == 1
    assert "<td>all</td><td>1</td><td>1</td><td>0</td>" in page
    assert "test_bad" in page and "&lt;&amp;&gt;" in page
    assert "PyTorch" in page and "none" in page


def test_tests_that_end_early_are_told(tmp_path):
    (tmp_path / "test_end.py").write_text("import os\nos._exit(3)\n")
    status, page = report(tmp_path, f"--tests={tmp_path}", "--parts")
    assert status == 1 and "did not come to their end" in page


def test_benchmarks_become_tables_and_plots(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    section = importlib.import_module("report").benchmark_section("one", PRINTED, 0)
    assert section.count("<table>") == 2 and section.count("data:image/png") == 1
    assert "<h3>first, over gloo</h3>" in section and "<td>1.05</td>" in section


def test_a_benchmark_that_fails_is_told(tmp_path):
    status, page = report(tmp_path, "--tests", "--parts", "no_such_part")
    assert status == 1 and "no part &#x27;no_such_part&#x27;" in page
