"""docs/coverage.md: what the sweep found, an operator a line."""

import re
from collections import Counter, defaultdict

from conformance.subjects import MODULES
from conformance.sweep import FAILED

HEAD = """\
# Coverage

Written by `make conformance`; not by hand.

Every operator of PyTorch's `op_db` and every module of its `module_db`, with
PyTorch's own samples of their arguments, at most {count} per operator and dtype, others
on other numbers of ranks, in place and with `out=`, too. Each tensor argument is cut on
each dim (evenly, unevenly, with an empty piece, as a dim merged from two), then all of
one shape together, on meshes {meshes}. Values, gradients, second derivatives and, with
one seed, random numbers are compared with those of one device; where one device raises,
the ranks must raise. What takes no tensor has no row.

- **native**: every rank works on its piece; what it sends is in the next column.
- **gathered**: an operator on the way has no rule for some of the layouts, and runs
  on the whole tensor on every rank (`shardtensor.fallback_counts()`).
- **refused**: an error, the same on every rank, that says why.
- **mixed**: it depends on the arguments or on the layout; how many cases were which.

*Communicates*: the most that one call did on a rank without gathering, forward and
backward: exchanges (x) and all-reduces (r).
"""


VARIANTS = ("call", "in place", "out=")
WAYS = ("native", "gathered", "refused", "mixed", "failed")


def write(records, count, path):
    subjects = defaultdict(list)
    for record in records:
        subjects[record.subject].append(record)
    meshes = ", ".join(dict.fromkeys(r.mesh for r in records))
    with open(path, "w") as file:
        file.write(HEAD.format(meshes=meshes, count=count))
        file.write("\n" + _summary(subjects))
        file.write(_failures(records))
        for title, chosen in _sections(subjects):
            columns = ["name", *VARIANTS, "communicates", "why"]
            file.write(f"\n## {title}\n\n" + _line(columns) + _rule(columns))
            file.writelines(_row(n, subjects[n]) for n in sorted(chosen, key=str.lower))


def _line(cells):
    return f"| {' | '.join(cells)} |\n"


def _rule(columns):
    return "|-" * len(columns) + "|\n"


def _sections(subjects):
    yield "Operators", [n for n in subjects if n not in MODULES]
    yield "Modules", [n for n in subjects if n in MODULES]


def _summary(subjects):
    text = _line(["", *WAYS]) + _rule(["", *WAYS])
    for title, chosen in _sections(subjects):
        for variant in VARIANTS:
            found = Counter(_way(_kinds(subjects[n], variant)) for n in chosen)
            if any(found[w] for w in WAYS):
                text += _line([f"{title}, {variant}", *[str(found[w]) for w in WAYS]])
    cases = Counter(r.kind for records in subjects.values() for r in records)
    listed = ", ".join(f"{n} {kind}" for kind, n in sorted(cases.items()))
    return text + f"\nCases: {listed}. Raised: one device raises, too.\n"


def _kinds(records, variant):
    return Counter(
        r.kind for r in records if _variant(r) == variant and r.kind != "raised"
    )


def _variant(record):
    found = [v for v in VARIANTS[1:] if f", {v}, " in record.case]
    return found[0] if found else "call"


def _way(kinds):
    if any(kinds[k] for k in FAILED):
        return "failed"
    return "mixed" if len(kinds) > 1 else next(iter(kinds), "")


def _failures(records):
    failed = [r for r in records if r.kind in FAILED]
    lines = [
        f"- {r.kind}: {r.subject}, mesh {r.mesh}, case {r.index} ({r.case})\n"
        for r in failed
    ]
    return "\nFailures:\n\n" + "".join(lines) if failed else ""


def _row(name, records):
    cells = []
    for variant in VARIANTS:
        kinds = _kinds(records, variant).most_common()
        several = ", ".join(f"{n} {kind}" for kind, n in kinds)
        cells.append(kinds[0][0] if len(kinds) == 1 else several)
    native = [r for r in records if r.kind == "native" and _variant(r) == "call"]
    sent = "; ".join(_sent(native, way) for way in ("forward", "backward"))
    return _line([f"`{name}`", *cells, sent, _why(records)])


def _sent(records, way):
    exchanges = max((getattr(r, way)[0] for r in records), default=0)
    all_reduces = max((getattr(r, way)[1] for r in records), default=0)
    said = f"{exchanges}x " * bool(exchanges) + f"{all_reduces}r" * bool(all_reduces)
    return said.strip() or "-"


def _why(records):
    operators = sorted({op for r in records for op in r.gathered})
    gathered = (
        "gathers " + ", ".join(f"`{op}`" for op in operators) if operators else ""
    )
    reasons = dict.fromkeys(
        _reason(r.text) for r in records if r.kind in ("refused", "unexplained")
    )
    return "; ".join(filter(None, [gathered, *list(reasons)[:3]]))


def _reason(text):
    """The first sentence of an error, without what is of one case."""
    text = text.split("\n")[0].split(": ", 1)[-1]
    text = re.sub(r"ShardSpec\(.*\)", "a layout", text)
    text = re.sub(r"\d+", "n", text)
    return text[:160].replace("|", "\\|")
