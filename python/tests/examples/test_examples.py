"""The examples print what their headers promise, and the demo compares well."""

import os
import re
import subprocess
import sys

import pytest
from programs import ENVIRONMENT, EXAMPLES, launch, printed, promised

PRELOAD = ("matplotlib.pyplot", "rich.progress", "scipy.sparse.linalg", "nibabel")


@pytest.mark.parametrize(
    "ranks, script",
    [(4, "sharded_conv.py"), (2, "dot_product.py"), (2, "scatter_redistribute.py")],
)
def test_prints_what_its_header_says(ranks, script):
    assert printed(ranks, script).splitlines() == promised(script)


@pytest.mark.parametrize("script", ["dot_product.py", "scatter_redistribute.py"])
def test_right_on_other_numbers_of_ranks(script):
    lines = printed(3, script).splitlines()
    assert lines[-1] == promised(script)[-1]


def test_a_volume_predicted_by_piece_is_that_of_one_device():
    text = printed(2, "predict_volume.py", "--depth=24", "--extent=20")
    assert float(re.search(r"differs from one device by (\S+)", text).group(1)) < 1e-6
    assert re.search(r"a rank's peak: \S+ MiB", text), text


TINY = ("--mm=4", "--channels=4", "--levels=2", "--steps=3")


@pytest.mark.parametrize(
    "ranks, arguments, tolerance",
    [
        (2, (), 1e-4),
        pytest.param(
            4,
            ("--mesh=2x2", "--norm=batch", "--up=transpose", "--down=pool"),
            1e-4,
            marks=pytest.mark.tail,
        ),
        pytest.param(
            2,
            ("--bf16", "--checkpoint", "--activation=relu", "--steps=2"),
            2e-2,
            marks=pytest.mark.tail,
        ),
    ],
    ids=["default", "2x2", "bf16"],
)
def test_demo_equals_one_process(ranks, arguments, tolerance, tmp_path):
    picture, curves = tmp_path / "brain.png", tmp_path / "training.png"
    files = (f"--picture={picture}", f"--curves={curves}")
    text = launch(ranks, "train_unet.py", *TINY, *arguments, *files, timeout=600)
    difference = re.search(r"largest difference of the losses: (\S+)", text)
    assert float(difference.group(1)) < tolerance, text
    assert losses(text)[-1] < losses(text)[0], text
    check_costs(text, ranks)
    assert re.search(r"^Dice on slices .* white matter \d\.\d{3}$", text, re.MULTILINE)
    for file in (picture, curves):
        assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "ranks, arguments",
    [
        pytest.param(2, (), marks=pytest.mark.tail),
        (2, ("--window", "3", "9")),
        pytest.param(4, ("--mesh=2x2", "--window", "3", "9"), marks=pytest.mark.tail),
    ],
    ids=["all", "windows", "windows on 2x2"],
)
def test_ocean_demo_equals_one_process(ranks, arguments, tmp_path):
    picture, curves = tmp_path / "ocean.png", tmp_path / "training.png"
    small = ("--steps=3", "--width=16", "--depth=2", "--heads=2", "--batch=1")
    files = (f"--picture={picture}", f"--curves={curves}")
    text = printed(ranks, "train_ocean_vit.py", *small, *arguments, *files)
    difference = re.search(r"largest difference of the losses: (\S+)", text)
    assert float(difference.group(1)) < 1e-6, text
    check_costs(text, ranks)
    assert re.search(r"^error of months never learnt from: \d\.\d{3} K", text, re.M)
    for file in (picture, curves):
        assert file.read_bytes().startswith(b"\x89PNG")


def test_mesh_demo_equals_one_process(tmp_path):
    picture, curves = tmp_path / "mesh.png", tmp_path / "training.png"
    small = ("--steps=3", "--width=8", "--depth=2", "--fields=4")
    files = (f"--picture={picture}", f"--curves={curves}")
    text = printed(3, "train_mesh.py", *small, *files)
    difference = re.search(r"largest difference of the losses: (\S+)", text)
    assert float(difference.group(1)) < 1e-5, text
    check_costs(text, 3)
    # Hardly trained: much like no flow, if each value is at its node.
    errors = re.search(r"never learnt from: (\S+); of no flow: (\S+);", text)
    of_model, of_persistence = map(float, errors.groups())
    assert of_model < 1.2 * of_persistence, text
    for file in (picture, curves):
        assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.tail
def test_a_killed_job_goes_on_with_the_curve_of_one_left_alone(tmp_path):
    program = EXAMPLES / "train_climate.py"
    done = subprocess.run(
        [sys.executable, program, "--steps=12", "--every=4", f"--out={tmp_path}"],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a node dies\n1 x 2 ranks, from step 8\n" in done.stdout
    assert (tmp_path / "climate.png").read_bytes().startswith(b"\x89PNG")


def losses(text):
    """The sharded losses of the table, step by step."""
    return [float(x) for x in re.findall(r"^ +\d+ +(\d\.\d{6}) ", text, re.MULTILINE)]


def check_costs(text, ranks):
    """A row for each rank, and without a terminal, too, names that can be read."""
    assert len(re.findall(r"^ rank \d  ", text, re.MULTILINE)) == ranks, text
    assert "…" not in text, text
