"""What `make test` runs, and what waits for `make test-all`."""

import os
from collections import Counter

import pytest
import ranks
import rig

FEW = 2  # cases of one test, all of whose meshes always run
MANY = 8


def pytest_configure(config):
    if "not tail" not in config.option.markexpr:
        os.environ["SWEEP"] = "whole"  # before ranks start: oracle.py
    if reason := rig.missing():
        pytest.exit(reason, returncode=0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A table of operators, swept over the ranks: 3 (uneven and empty pieces, a
    middle one) show what is wrong with an operator; 1, 2 and 4 ranks are the tail. Of
    many operators every third is on 2x2 and the others on 3; of a few, every second is
    on 2x2, too: two axes are a family's matter. And so is inductor, a minute of g++, on
    a second mesh. What else is in the tail says so where it stands."""
    if rig.DEVICE != "cpu":
        items[:] = [item for item in items if _test(item)[1] not in OF_THE_CPU]
    if rig.DEVICE == "guarded":
        _keep_two_ranks(items)
        return
    cases = Counter(map(_test, items))
    meshes = Counter((_test(item), _mesh(item)) for item in items)
    seen = Counter()
    for item in items:
        test, mesh = _test(item), _mesh(item)
        seen[test, mesh] += 1
        if "inductor" in item.name and mesh != "2" and meshes[test, "2"]:
            item.add_marker(pytest.mark.tail)
        if cases[test] <= FEW or not meshes[test, "3"]:
            continue
        many, place = cases[test] > MANY, seen[test, mesh] - 1
        if mesh in ("1", "2", "4") and "inductor" not in item.name:
            item.add_marker(pytest.mark.tail)
        if mesh == "2x2" and place % (3 if many else 2):
            item.add_marker(pytest.mark.tail)
        if mesh == "3" and many and meshes[test, "2x2"] and place % 3 == 0:
            item.add_marker(pytest.mark.tail)


def pytest_collection_finish(session):
    on_ranks = (item for item in session.items if _mesh(item) or _preloads(item))
    ranks.foresee(item.module for item in on_ranks)


# Their subject is the CPU's: its errors (a device asserts), its autocast, what its
# kernels make of two dtypes, what those of attention take and how their results lie,
# and queries that travel (on a device points do).
OF_THE_CPU = {
    "test_a_mask_beside_is_causal",
    "test_a_target_out_of_bounds_is_the_same_error_everywhere",
    "test_autocast",
    "test_autocast_casts_before_rows_travel",
    "test_every_rank_raises",
    "test_gradients_at_a_large_mean_are_closer_than_pytorchs",
    "test_indices_out_of_bounds",
    "test_narrow_types",
    "test_ordered_points_hardly_travel",
    "test_pieces_of_one_column_in_half_precision",
    "test_queries_travel_only_where_a_nearer_point_may_be",
    "test_strides_are_those_of_one_device",
    "test_types_of_native_statistics",
    "test_under_autocast",
    "test_wrong_indices_raise",
}


# Half a minute for each case on the guarded device.
LONG_WHEN_GUARDED = {"test_long_sequences_that_divide_by_nothing"}


def _keep_two_ranks(items):
    """Two ranks show whether a rule takes a device's memory for the host's."""
    items[:] = [item for item in items if "inductor" not in item.name]
    for item in items:
        is_other = _mesh(item) != "2" and "device" not in item.path.parts
        if is_other or _test(item)[1] in LONG_WHEN_GUARDED:
            item.add_marker(pytest.mark.tail)


def _test(item):
    return item.path, getattr(item, "originalname", item.name)


def _preloads(item):
    return hasattr(item.module, "PRELOAD")


def _mesh(item):
    return item.callspec.params.get("ranks") if hasattr(item, "callspec") else None
