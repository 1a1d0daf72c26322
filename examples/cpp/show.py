"""The tables and pictures of `make demo`, of what train_unet.cpp wrote with several
ranks and with one.

    python examples/cpp/show.py out/unet
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import brain_report
import report
from tensor_file import read
from training import Run, Step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    ranks = [read_rank(args.folder, args.ranks, rank) for rank in range(args.ranks)]
    single = run_of(read_rank(args.folder, 1, 0), "steps")
    runs = [run_of(found, "steps") for found in ranks]
    report.show_losses(runs[0], single)
    report.show_costs(runs, [run_of(found, "alone") for found in ranks], single)
    brain = read(args.folder / "brain.bin")
    prediction, truth = ranks[0]["prediction"], brain["truth"]
    scores = brain_report.dice_of_classes(prediction, truth)
    brain_report.show_scores(scores)
    picture = args.folder / "brain.png"
    where = borders(ranks[0])
    brain_report.draw(picture, brain["volume"], truth, prediction, where, scores)
    report.draw_curves(args.folder / "training.png", runs, single)


def read_rank(folder, ranks, rank):
    return read(folder / f"{ranks}_ranks" / f"rank_{rank}.bin")


def run_of(found, kind):
    def step(loss, seconds, waiting, *counts):
        return Step(loss, seconds, waiting, *(int(count) for count in counts))

    steps = [step(*row) for row in found[kind].tolist()]
    return Run(steps, *found["memory"].tolist())


def borders(found):
    """Where the pieces of each cut dim meet."""
    return {
        int(name.split()[-1]): torch.cumsum(extents, 0)[:-1].tolist()
        for name, extents in found.items()
        if name.startswith("cut of dim")
    }


if __name__ == "__main__":
    main()
