"""One file that says what tests and benchmarks came to on a machine."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = [sys.executable, ROOT / "tools" / "report.py", "--no-cpp"]
FAILING = (
    "def test_good():\n    pass\n\ndef test_bad():\n    assert 1 + 1 == 3, '<&>'\n"
)

ON_DEVICE = """
import os, torch

GPU = torch.cuda.is_available()

def test_device():
    assert os.environ['DEVICE'] == ('{}')
"""

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize(
    "device, told",
    [
        ("cuda", "DEVICE=cuda: this PyTorch sees no GPU; nothing was run\n"),
        pytest.param(
            "tpu",
            "DEVICE=tpu: expected cpu or cuda; nothing was run\n",
            marks=pytest.mark.tail,
        ),
    ],
)
def test_one_line_without_the_device(tmp_path, device, told):
    environment = os.environ | {"DEVICE": device}
    page = tmp_path / "report.html"
    command = [*PROGRAM, f"--output={page}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")
    assert not page.exists()


@pytest.mark.tail
def test_the_guarded_device_has_tests_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("DEVICE", raising=False)
    (tmp_path / "test_here.py").write_text(ON_DEVICE.format("cuda' if GPU else 'cpu"))
    (tmp_path / "test_there.py").write_text(ON_DEVICE.format("guarded"))
    tests = f"--tests={tmp_path}/test_here.py", f"--guarded={tmp_path}/test_there.py"
    status, page = report(tmp_path, *tests, "--parts")
    assert status == 0
    assert page.index("Python tests") < page.index("Tests on the guarded device")


def test_a_failure_is_told(tmp_path):
    (tmp_path / "test_some.py").write_text(FAILING)
    status, page = report(tmp_path, f"--tests={tmp_path}", "--parts")
    assert status == 1
    assert "<td>all</td><td>1</td><td>1</td><td>0</td>" in page
    assert "test_bad" in page and "&lt;&amp;&gt;" in page
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    assert "PyTorch" in page and gpu in page


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
