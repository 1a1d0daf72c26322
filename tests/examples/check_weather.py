"""shallow_water.cpp gives one process's fields on its ranks, and Python's solver's.

python check_weather.py mpirun -n 3 build/examples/shallow_water
"""

import math
import re
import subprocess
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples/python"))
from shallow_water import GEOPOTENTIAL, ShallowWater, sines

LATITUDES, HOURS = 20, 3


def main():
    command = [*sys.argv[1:], str(LATITUDES), str(HOURS)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(text)
    found = re.search(r"from one process: (\S+)$", text, re.M)
    assert float(found.group(1)) < 1e-11, text
    found = re.search(r"^geopotential, vorticity, divergence: (.*)$", text, re.M)
    figures = [float(x) for x in found.group(1).split()]
    fields = ShallowWater(LATITUDES, 2 * LATITUDES)(weather(), HOURS * 6)
    expected = fields.square().mean((1, 2)).sqrt()
    torch.testing.assert_close(
        torch.tensor(figures, dtype=torch.float64), expected, rtol=1e-7, atol=0
    )


def weather():
    """As in shallow_water.cpp."""
    sine = sines(LATITUDES)[:, None]
    cosine = (1 - sine.square()).sqrt()
    longitude = torch.arange(2 * LATITUDES, dtype=torch.float64) * (math.pi / LATITUDES)
    high = cosine.square() * sine * (2 * longitude).cos()
    waves = cosine**4 * sine * (4 * longitude).cos()
    return torch.stack(
        [
            GEOPOTENTIAL * (1 + 0.02 * high),
            2e-5 * sine + 3e-5 * waves,
            1e-6 * cosine**3 * (3 * longitude).sin(),
        ]
    )


if __name__ == "__main__":
    main()
