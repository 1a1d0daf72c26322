"""The sweep finds what it is there to find, and goes on behind it."""

import pytest
import rig
from conformance import faults
from conformance.sweep import sweep


@pytest.mark.parametrize(
    "fault", ["wrong", "wrong_gradient", "differs", "waits", "unexplained", "accepted"]
)
def test_faults_are_told_apart(fault):
    kind = {"wrong_gradient": "wrong", "waits": "differs"}.get(fault, fault)
    records = sweep(2, fault, 1, source=faults.__name__, only=1)
    assert [r.kind for r in records] == [kind]


def test_a_hang_is_reported_and_left_behind():
    patience = 20 if rig.DEVICE == "cuda" else 2  # which takes seconds to start
    records = sweep(2, "hangs", 1, source=faults.__name__, watchdog=patience)
    assert [r.kind for r in records] == ["hang"] * 3  # even, uneven, an empty piece
    assert "faults.py" in records[0].text
