"""Fails when two files define a class of the same name in the library's one
namespace: the linker would merge their inline functions without a word."""

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFINITION = re.compile(r"^(?:class|struct)\s+(\w+)\b(?!::)[^;{]*\{", re.MULTILINE)
ANONYMOUS = re.compile(r"^namespace \{.*?^\} // namespace$", re.MULTILINE | re.DOTALL)


def main() -> int:
    places = defaultdict(set)
    for path in sorted((ROOT / "shardtensor").rglob("*")):
        if path.suffix in {".h", ".cpp"}:
            shared = ANONYMOUS.sub("", path.read_text())
            for name in DEFINITION.findall(shared):
                places[name].add(str(path.relative_to(ROOT)))
    repeated = {name: files for name, files in places.items() if len(files) > 1}
    for name, files in sorted(repeated.items()):
        print(f"{name} is defined in {', '.join(sorted(files))}")
    return 1 if repeated else 0


if __name__ == "__main__":
    sys.exit(main())
