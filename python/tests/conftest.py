"""What `make test` runs, and what waits for `make test-all`."""

import os
from collections import Counter

import pytest
import ranks
import rig

MANY = 8  # cases of one test


def pytest_configure(config):
    if "not tail" not in config.option.markexpr:
        os.environ["SWEEP"] = "whole"  # before ranks start: oracle.py
    if reason := rig.missing():
        pytest.exit(reason, returncode=0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A table of many operators, swept over the ranks: 1 rank, 3 (uneven and
    empty pieces, a middle one) and 2x2 show what is wrong with an operator, 2
    and 4 ranks are the tail. What else is in it says so where it stands."""
    if rig.DEVICE == "guarded":
        _keep_two_ranks(items)
        return
    cases = Counter(map(_test, items))
    meshes = {(_test(item), _mesh(item)) for item in items}
    for item in items:
        many = cases[_test(item)] > MANY and (_test(item), "3") in meshes
        if many and _mesh(item) in ("2", "4"):
            item.add_marker(pytest.mark.tail)


def pytest_collection_finish(session):
    on_ranks = (item for item in session.items if _mesh(item) or _preloads(item))
    ranks.foresee(item.module for item in on_ranks)


# Their subject is the CPU's: its errors (a device asserts), its autocast and
# what its kernels make of two dtypes.
OF_THE_CPU = {
    "test_a_target_out_of_bounds_is_the_same_error_everywhere",
    "test_autocast_casts_before_rows_travel",
    "test_narrow_types",
    "test_types_of_native_statistics",
    "test_under_autocast",
    "test_wrong_indices_raise",
}


def _keep_two_ranks(items):
    """Two ranks show whether a rule takes a device's memory for the host's."""
    for item in items:
        if _mesh(item) != "2" and "device" not in item.path.parts:
            item.add_marker(pytest.mark.tail)
    items[:] = [item for item in items if _test(item)[1] not in OF_THE_CPU]


def _test(item):
    return item.path, getattr(item, "originalname", item.name)


def _preloads(item):
    return hasattr(item.module, "PRELOAD")


def _mesh(item):
    return item.callspec.params.get("ranks") if hasattr(item, "callspec") else None
