"""Writes what train_unet.cpp reads: the brain volume, the class of each voxel,
once without those of the slices that are held out, and the weights that
Python's demo starts from.

    python examples/cpp/prepare.py out/unet
    mpirun -n 2 build/examples/train_unet out/unet
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import brain
from tensor_file import write
from unet import UNet


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mm", type=int, default=2, help="size of a voxel")
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    volume, labels = brain.load(args.mm)
    tensors = {"volume": volume, "labels": brain.hold_out(labels), "truth": labels}
    write(args.folder / "brain.bin", tensors)
    torch.manual_seed(args.seed)
    channels = [args.channels * 2**level for level in range(args.levels)]
    write(args.folder / "weights.bin", UNet(channels).state_dict())


if __name__ == "__main__":
    main()
