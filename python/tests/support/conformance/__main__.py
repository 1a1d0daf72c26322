"""make conformance: sweeps everything and writes docs/coverage.md.

    python -m conformance                              # all of it
    python -m conformance --only add nn.Conv2d --mesh 2 --case 17
    python -m conformance --programs 20000             # random ones, on each mesh
    python -m conformance --wrong --samples 2          # arguments that do not fit

CONFORMANCE_WAIT=60: on a busy machine, the seconds a rank waits for another (5).
Exit status 1 where a case is wrong, hangs, differs between ranks, or is refused
without a reason.
"""

import argparse
import sys
from pathlib import Path

from ranks import RankError

from conformance import coverage, mutations, programs, subjects, sweep

PART = 1000  # programs
COVERAGE = Path(__file__).resolve().parents[4] / "docs" / "coverage.md"


def main():
    options = parse()
    if options.programs:
        return try_programs(options)
    records = []
    names = options.only or [*subjects.OPERATORS, *subjects.MODULES]
    failures = mutations.FAILED if options.wrong else sweep.FAILED
    source = mutations.__name__ if options.wrong else sweep.SUBJECTS
    for mesh in options.mesh:
        for count, name in enumerate(names, 1):
            found = sweep.sweep(mesh, name, options.samples, source, options.case)
            records += found
            print(sweep.described(found, failures), end="", flush=True)
            if count % 50 == 0:  # of an hour
                told = f"mesh {mesh}: {count} of {len(names)}, {len(records)} cases"
                print(told, file=sys.stderr, flush=True)
    if not options.only and not options.wrong:
        coverage.write(records, options.samples, COVERAGE)
    failed = sum(r.kind in failures for r in records)
    print(f"{len(records)} cases, {failed} failed")
    return failed > 0


def try_programs(options):
    """By parts, each of a seed of its own: hypothesis remembers what it has drawn."""
    count = options.programs
    for mesh in options.mesh:
        for part, done in enumerate(range(0, count, PART)):
            try:
                programs.search(mesh, min(PART, count - done), options.seed + part)
            except RankError as error:
                print(error)
                return 1
            told = f"mesh {mesh}: {min(done + PART, count)} of {count} programs"
            print(told, file=sys.stderr, flush=True)
        print(f"mesh {mesh}: {count} programs, 0 failed", flush=True)
    return 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mesh", nargs="+", default=["2", "3", "2x2"])
    parser.add_argument("--samples", type=int, default=4, help="per operator and dtype")
    parser.add_argument("--only", nargs="+", help="operators or modules")
    parser.add_argument("--case", type=int, help="one case of it, by its number")
    parser.add_argument("--wrong", action="store_true", help="arguments, one each")
    parser.add_argument("--programs", type=int, help="random programs instead")
    parser.add_argument("--seed", type=int, default=0, help="of the random programs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
