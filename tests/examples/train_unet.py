"""train_unet.cpp gives the losses of Python's demo: same volume, same weights. show.py
shows what its ranks and one process wrote.

python train_unet.py FOLDER mpirun -n 2 build/examples/train_unet
"""

import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/python"))

import brain
import torch
from segmentation import Segmentation
from training import train

PREPARE = Path(__file__).resolve().parents[2] / "examples/cpp/prepare.py"
STEPS = 3
SMALL = {"mm": 4, "channels": 4, "levels": 2, "seed": 0}
STYLE = {"norm": "group", "activation": "silu", "down": "conv", "up": "trilinear"}


def main():
    folder, *program = sys.argv[1:]
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    subprocess.run([sys.executable, PREPARE, folder, *options], check=True)
    arguments = [folder, "--steps", str(STEPS)]
    text = output_of(*program, *arguments)
    losses = [float(loss) for loss in re.findall(r"^step .* loss (\S+)", text, re.M)]
    expected = one_process()
    print(text, "one process:", expected)
    assert len(losses) == STEPS, text
    assert expected[-1] < expected[0], expected
    assert re.search(r"^Dice on slices .* white matter \d\.\d{3}$", text, re.M), text
    for ours, theirs in zip(losses, expected, strict=True):
        assert abs(ours - theirs) < 1e-4, (losses, expected)
    output_of(program[-1], *arguments)
    check_shown(output_of(sys.executable, PREPARE.with_name("show.py"), folder), folder)


def output_of(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def check_shown(text, folder):
    found = re.search(r"^largest difference of the losses: (\S+)$", text, re.M)
    assert float(found.group(1)) < 1e-4, text
    assert re.search(r"^training adds to a rank: \d+% of one process$", text, re.M), (
        text
    )
    assert re.search(r"^speed: \d+% of the pieces", text, re.M), text
    for picture in ("brain.png", "training.png"):
        assert Path(folder, picture).stat().st_size > 10_000


def one_process():
    args = Namespace(
        **SMALL,
        **STYLE,
        steps=STEPS,
        bf16=False,
        checkpoint=False,
        learning_rate=4e-2,
    )
    torch.set_num_threads(1)
    volume, labels = brain.load(SMALL["mm"])
    job = Segmentation(args, volume, brain.hold_out(labels))
    run = train(args, job, lambda step, added: None)
    return [step.loss for step in run.steps]


if __name__ == "__main__":
    main()
