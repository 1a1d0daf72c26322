"""train_ocean_vit.cpp gives the losses of Python's demo: same fields, same weights.

python train_ocean_vit.py FOLDER mpirun -n 2 build/examples/train_ocean_vit
"""

import re
import subprocess
import sys
from argparse import Namespace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/python"))

import ocean
import torch
from ocean_report import errors, mean
from training import train

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PREPARE = EXAMPLES / "cpp/prepare_ocean.py"
SHAPE = {"width": 16, "depth": 2, "heads": 2}
STEPS, BATCH = 3, 2


def main():
    folder, *program = sys.argv[1:]
    shape = [f"--{name}={value}" for name, value in SHAPE.items()]
    subprocess.run([sys.executable, PREPARE, folder, *shape], check=True)
    sizes = ["--steps", str(STEPS), "--batch", str(BATCH), "--heads", "2"]
    for window in (None, [3, 9]):
        text = subprocess.run(
            [*program, folder, *sizes, *(["--window", "3x9"] if window else [])],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        compare(text, one_process(window))


def compare(text, expected):
    losses = [float(loss) for loss in re.findall(r"^step .* loss (\S+)", text, re.M)]
    wanted = [step.loss for step in expected.steps]
    of_unseen = mean(errors(ocean.load(), expected.prediction)[0])
    print(text, "one process:", wanted, of_unseen)
    assert re.search(r"Shard\(dim=2\) \[10, 8\]", text), text
    assert len(losses) == STEPS, text
    assert min(abs(a - b) for a, b in zip(wanted, wanted[1:], strict=False)) > 1e-4
    for ours, theirs in zip(losses, wanted, strict=True):
        assert abs(ours - theirs) < 1e-5, (losses, wanted)
    found = re.search(r"^error of months never learnt from: (\S+) K$", text, re.M)
    assert abs(float(found.group(1)) - of_unseen) < 1e-3, text


def one_process(window):
    args = Namespace(
        **SHAPE,
        window=window,
        patch=[2, 4],
        batch=BATCH,
        steps=STEPS,
        seed=0,
        learning_rate=2e-3,
    )
    torch.set_num_threads(1)
    job = demo().NextMonth(args, ocean.load())
    return train(args, job, lambda step, added: None)


def demo():
    """Python's program, which has this file's name."""
    place = EXAMPLES / "python/train_ocean_vit.py"
    spec = spec_from_file_location("python_demo", place)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
