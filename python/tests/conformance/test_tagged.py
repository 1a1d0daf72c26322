"""Every operator that gets its rule from PyTorch's `pointwise` tag."""

import pytest
import ranks
from conformance import sweep, tagged

PRELOAD = sweep.PRELOAD
# They share one rule: every third tells whether it holds.
NAMES = [
    pytest.param(name, marks=[pytest.mark.tail] if i % 3 else [])
    for i, name in enumerate(sorted(tagged.OVERLOADS))
]


@pytest.mark.parametrize("name", NAMES)
def test_a_tag_is_true(name):
    records = sweep.sweep(3, name, 1, source=tagged.__name__)
    assert any(r.kind in ("native", "gathered") for r in records)
    assert not sweep.described(records)


def without_samples(mesh):
    return tagged.without_samples()


def test_every_tagged_operator_is_called():
    assert ranks.run(3, without_samples) == [[]] * 3
