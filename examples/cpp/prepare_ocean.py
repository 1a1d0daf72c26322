"""Writes what train_ocean_vit.cpp reads: the fields of all months and the weights
that Python's demo starts from.

    python examples/cpp/prepare_ocean.py out/ocean
    mpirun -n 2 build/examples/train_ocean_vit out/ocean
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import ocean
from ocean_vit import OceanViT
from tensor_file import write


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--patch", type=int, nargs=2, default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    write(args.folder / "ocean.bin", {"fields": ocean.load()})
    torch.manual_seed(args.seed)
    shape = args.width, args.depth, args.heads, tuple(args.patch)
    model = OceanViT(ocean.SHAPE[1], *shape)
    write(args.folder / "weights.bin", model.state_dict())


if __name__ == "__main__":
    main()
