"""What the documents show is what runs."""

import os
import re
import subprocess
import sys

import pytest
import rig
from programs import ENVIRONMENT, ROOT, blocks
from ranks import ranks
from torch.distributed.device_mesh import init_device_mesh

import shardtensor

PRELOAD = ("torch._inductor.compile_fx",)

DOCS = ROOT / "docs"


def test_the_readme_program_prints_what_it_says(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(blocks(ROOT / "README.md", "python")[0])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher += ["--redirects=1", f"--log-dir={tmp_path}"]  # a file for each rank
    done = subprocess.run(
        [sys.executable, *launcher, str(program)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    expected = blocks(ROOT / "README.md", "text")[0]
    printed = [log.read_text() for log in tmp_path.glob("**/stdout.log")]
    assert sorted("".join(printed).splitlines()) == expected.splitlines()


@ranks(1, 2, 3)
@pytest.mark.parametrize("index", [0, 1])
def test_python_code_about_own_operators(mesh, index):
    source = blocks(DOCS / "adding_an_op.md", "python")[index]
    exec(compile(source, "adding_an_op.md", "exec"), {"mesh": mesh})


@ranks(1, 3)
@pytest.mark.parametrize("page", ["points.md", "graphs.md", "mesh.md", "spectra.md"])
def test_python_code_about_domains(mesh, page):
    names = {"mesh": mesh}
    for source in blocks(DOCS / page, "python"):
        exec(compile(source, page, "exec"), names)


@ranks(4)
def test_python_code_about_jobs(mesh):
    axes = ("data", "domain")
    names = {"mesh": init_device_mesh(rig.DEVICE, (2, 2), mesh_dim_names=axes)}
    for source in blocks(DOCS / "jobs.md", "python"):
        exec(compile(source, "jobs.md", "exec"), names)


@ranks(1, 2)
def test_python_code_about_settings(mesh):
    x = shardtensor.rand(5, device_mesh=mesh, requires_grad=True)
    names = {"model": lambda x: x.square().sum(), "x": x}
    before = shardtensor.get_random_policy()
    try:
        for page in ("random.md", "errors.md"):
            for source in blocks(DOCS / page, "python"):
                exec(compile(source, page, "exec"), names)
    finally:
        shardtensor.set_random_policy(before)
    assert x.grad is not None


@ranks(1, 3)
@pytest.mark.parametrize("page", ["data", "checkpoints"])
def test_python_code_about_files(mesh, tmp_path, page):
    names = {"mesh": mesh, "folder": tmp_path}
    for source in blocks(DOCS / f"{page}.md", "python"):
        exec(compile(source, f"{page}.md", "exec"), names)


def test_cpp_code_about_own_operators_is_tested():
    tested = (ROOT / "tests" / "dispatch" / "own_operator_test.cpp").read_text()
    quoted = blocks(DOCS / "adding_an_op.md", "cpp")
    assert len(quoted) == 5
    for block in quoted:
        assert block in tested, block


def test_the_cpp_program_is_built_by_ctest():
    built = ROOT / "tests" / "package" / "main.cpp"
    assert blocks(DOCS / "cpp.md", "cpp") == [built.read_text()]


@pytest.mark.parametrize(
    "path", sorted([ROOT / "README.md", *DOCS.glob("*.md")]), ids=lambda p: p.name
)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), target
