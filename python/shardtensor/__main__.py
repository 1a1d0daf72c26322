"""python -m shardtensor --cmake-prefix: what C++ programs put in front of
find_package(shardtensor)."""

import argparse
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m shardtensor")
    parser.add_argument(
        "--cmake-prefix",
        action="store_true",
        required=True,
        help="print the folder to add to CMAKE_PREFIX_PATH",
    )
    parser.parse_args()
    if not (PACKAGE / "share" / "cmake" / "shardtensor").is_dir():
        sys.exit(
            f"{PACKAGE} is a source tree, without the C++ headers. Install the "
            "package with pip, or run cmake --install build --prefix ..."
        )
    print(PACKAGE)


if __name__ == "__main__":
    main()
