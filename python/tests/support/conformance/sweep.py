"""All cases of a subject on the ranks of a mesh.

The ranks agree about each case before the next one. Where they don't, or one of
them hangs or dies, the case is recorded as that, and the sweep goes on behind
it on fresh ranks.
"""

import dataclasses
import hashlib
import importlib
import json
import os
import tempfile
import time
import warnings
from datetime import timedelta

import ranks
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import shardtensor
from conformance import WAIT, check

PRELOAD = ("conformance.tagged:recorded_calls", "conformance.check")
SUBJECTS = "conformance.subjects"  # imported by the ranks alone: it takes seconds
SLICE = 6 * WAIT  # seconds after which the ranks report and are called again
WATCHDOG = 18 * WAIT  # seconds after which they hang

# What a case may come to. `raised`: one device raised, too.
FINE = ("native", "gathered", "refused", "raised")
FAILED = ("wrong", "differs", "hang", "died", "accepted", "unexplained")


@dataclasses.dataclass
class Record:
    """What a case came to."""

    subject: str
    mesh: str
    index: int
    case: str
    kind: str
    text: str = ""
    forward: tuple = (0, 0, 0)  # most of any rank: exchanges, all-reduces, bytes
    backward: tuple = (0, 0, 0)
    gathered: dict = dataclasses.field(default_factory=dict)


def sweep(mesh, subject, count, source=SUBJECTS, only=None, watchdog=WATCHDOG):
    """The records of a subject's cases on a mesh (3, or "2x2"); `count` samples
    per dtype and kind, which `source`.samples gives."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "rank0")
        done = False
        while not done:
            case = (subject, source, count, len(records), only, log)
            try:
                done = ranks.run(mesh, sweep_on_rank, *case, timeout=watchdog)[0]
            except ranks.RankError as error:
                done = not _take(log, records, (subject, str(mesh)), str(error))
            else:
                _take(log, records, (subject, str(mesh)))
    return [r for r in records if r.kind != "skipped"]


def described(records, failures=FAILED):
    """The failures among them, with what runs each again."""
    return "".join(
        f"{r.kind}: --only {r.subject} --mesh {r.mesh} --case {r.index} ({r.case})\n"
        f"{r.text}\n\n"
        for r in records
        if r.kind in failures
    )


def _take(log, records, where, error=None):
    """Adds the cases that rank 0 has logged; one that it only began is what
    `error` says. False if it began none."""
    lines = open(log).read().splitlines() if os.path.exists(log) else []
    if not lines and error:
        raise ranks.RankError(error)
    if os.path.exists(log):
        os.remove(log)
    begun = None
    for line in map(json.loads, lines):
        if "kind" in line:
            records.append(Record(*where, len(records), begun, **line))
            begun = None
        else:
            begun = line["case"]
    if begun is not None:
        kind = "died" if ": died\n" in error else "hang"
        records.append(Record(*where, len(records), begun, kind, error))
    return True


# ---- on the ranks -----------------------------------------------------------


def sweep_on_rank(mesh, subject, source, count, first, only, log):
    """Runs the cases from `first` on; rank 0 logs. True when all are done."""
    warnings.simplefilter("ignore")
    shardtensor.set_fallback_mode("silent")
    shardtensor.set_communication_timeout(WAIT)
    deadline = time.monotonic() + SLICE
    expected = {}
    for index, (sample, label, place) in enumerate(cases(mesh, subject, source, count)):
        if index < first:
            continue
        _log(log, case=label)
        if only is not None and index != only:
            _log(log, kind="skipped")
            continue
        undefined = subject.startswith(check.UNDEFINED)
        if id(sample) not in expected:
            expected = {id(sample): check.perform(sample, check.plain, undefined)}
        verdict = check.judge(sample, place, expected[id(sample)], undefined)
        late = agree(verdict, time.monotonic() > deadline, log)
        if late:
            return False
    return True


def cases(mesh, subject, source, count):
    """(sample, label, how its tensors are put down): each tensor cut on each dim,
    then all that have the first one's sizes together."""
    for sample in _samples(source, subject, count, mesh):
        leaves = tree_leaves((sample.args, sample.kwargs))
        tensors = sample.tensors()
        shape = leaves[tensors[0]].shape
        alike = [i for i in tensors if leaves[i].shape == shape]
        for chosen in [*[[i] for i in tensors], *[alike] * (len(alike) > 1)]:
            for name, placements, sizes in check.layouts(leaves[chosen[0]].shape, mesh):
                if len(chosen) == 1 or "uneven" in name:
                    which = " and ".join(map(str, chosen))
                    place = check.cut_at(chosen, placements, sizes, mesh, sample)
                    yield sample, f"{sample.label}, tensor {which} {name}", place


_kept = {}


def _samples(source, subject, count, mesh):
    """Other samples on other meshes: on 2, 3 and 4 ranks three times as many."""
    turn = {"turn": (mesh.size() - 2) % 3 / 3} if source == SUBJECTS else {}
    key = source, subject, count, *turn.values()
    if key not in _kept:
        _kept.clear()
        found = importlib.import_module(source).samples(subject, count, **turn)
        _kept[key] = [sample for sample in found if sample.tensors()]
    return _kept[key]


def agree(verdict, late, log):
    """Logs what all ranks make of a case; whether rank 0 is late."""
    bad = verdict.kind in ("wrong", "accepted")
    error = "" if bad or verdict.kind in ("native", "gathered") else verdict.text
    mine = [bad, late, _digest(error), _digest(verdict.layouts)]
    everyone = _gather([*mine, *verdict.forward, *verdict.backward])
    most = everyone.amax(0).tolist()
    verdict.forward, verdict.backward = most[4:7], most[7:10]
    alike = (everyone == everyone[0]).all(0).tolist()
    differs = not alike[2] or (not alike[3] and not most[0])
    if differs or most[0]:
        said = [None] * dist.get_world_size()
        what = verdict.kind, verdict.text, verdict.layouts
        dist.all_gather_object(said, what, _group())
        verdict.kind, verdict.text = _joined(said, differs)
    if verdict.kind == "refused" and not stated(verdict.text):
        verdict.kind = "unexplained"
    entry = dataclasses.asdict(verdict)
    del entry["layouts"]
    _log(log, **entry)
    if differs:  # messages may be under way: these ranks are of no further use
        raise RuntimeError(f"rank {dist.get_rank()} disagrees")
    return bool(everyone[0, 1])


def _digest(text):
    return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=7).digest(), "big")


def _joined(said, differs):
    if not differs:
        rank = next(r for r, s in enumerate(said) if s[0] in ("wrong", "accepted"))
        return said[rank][0], f"rank {rank}: {said[rank][1]}"
    lines = [
        f"rank {r}: {kind} {text or where}"
        for r, (kind, text, where) in enumerate(said)
    ]
    return "differs", "\n".join(lines)


def stated(text):
    """Whether an error says that it is about sharding, and what."""
    return "shard" in text.lower()


def _gather(numbers):
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine, _group())
    return torch.stack(parts)


_groups = []


def _group():
    """A group beside that of the cases, which an error may leave unusable."""
    if not _groups:
        _groups.append(dist.new_group(timeout=timedelta(seconds=4 * WAIT)))
    return _groups[0]


def _log(log, **entry):
    if dist.get_rank() == 0:
        with open(log, "a") as file:
            file.write(json.dumps(entry) + "\n")
