"""An example prints what the last indented block of its header promises.

python check_output.py examples/cpp/dot_product.cpp mpirun -n 2 build/dot_product
"""

import itertools
import re
import subprocess
import sys
from pathlib import Path


def main():
    source, *command = sys.argv[1:]
    lines = Path(source).read_text().splitlines()
    header = "\n".join(itertools.takewhile(lambda s: s.startswith("//"), lines))
    promised = re.findall(r"(?:^//     .+\n?)+", header, re.M)[-1]
    promised = [line.removeprefix("//     ") for line in promised.splitlines()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.returncode
    assert done.stdout.splitlines() == promised, f"{done.stdout}\nnot {promised}"


if __name__ == "__main__":
    main()
