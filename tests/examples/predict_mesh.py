"""predict_mesh.cpp predicts what Python does, with the weights that it has trained.

python predict_mesh.py FOLDER mpirun -n 3 build/examples/predict_mesh
"""

import re
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "examples/python/train_mesh.py"
SMALL = ["--steps=2", "--fields=4", "--width=8", "--depth=2", "--no-compare"]


def main():
    folder, *program = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = f"{folder}/mesh.bin"
    files = [f"--picture={folder}/mesh.png", f"--curves={folder}/curves.png"]
    command = [sys.executable, TRAIN, *SMALL, *files, f"--save={file}"]
    subprocess.run(command, check=True)
    text = subprocess.run(
        [*program, file], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    print(text)
    found = re.search(r"^\d+ fields on 3 ranks, .*heat: (\S+)$", text, re.M)
    assert float(found.group(1)) < 1e-5, text


if __name__ == "__main__":
    main()
