"""What `make test` runs, and what waits for `make test-all`."""

import os
from collections import Counter

import oracle
import pytest
import ranks
import rig

FEW = 2  # cases of one test, of whose meshes all but 2, beside 3, always run
MANY = 8
LONG = "checkpoint comm conformance distributed examples mpi package training".split()


def pytest_configure(config):
    if "not tail" not in config.option.markexpr:
        os.environ["SWEEP"] = "whole"  # for ranks, which start later: oracle.py
        oracle.WHOLE = True
    if reason := rig.missing():
        pytest.exit(reason, returncode=0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A table of operators, swept over the ranks: 3 (uneven and empty pieces, a
    middle one) show what is wrong with an operator; 1, 2 and 4 ranks are the tail. Of
    many operators every third is on 2x2 and the others on 3; of a few, every second is
    on 2x2, too: two axes are a family's matter. And so is inductor, a minute of g++, on
    a second mesh. What else is in the tail says so where it stands."""
    left_out = OF_THE_CPU | LEFT_OUT[rig.DEVICE] if rig.DEVICE != "cpu" else set()
    items[:] = [i for i in items if left_out.isdisjoint((_test(i)[1], i.name))]
    items.sort(key=_when)
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
        if not meshes[test, "3"]:
            continue
        if cases[test] <= FEW:
            if mesh == "2":
                item.add_marker(pytest.mark.tail)
            continue
        many, place = cases[test] > MANY, seen[test, mesh] - 1
        if mesh in ("1", "2", "4") and "inductor" not in item.name:
            item.add_marker(pytest.mark.tail)
        if mesh == "2x2" and place % (3 if many else 2):
            item.add_marker(pytest.mark.tail)
        if mesh == "3" and many and meshes[test, "2x2"] and place % 3 == 0:
            item.add_marker(pytest.mark.tail)


def _when(item):
    """Files that take long come first, or the last of them keeps one process busy and
    the other idle; among them those together that preload the same."""
    folder = item.path.parent.name
    return (folder not in LONG, getattr(item.module, "PRELOAD", ()), folder)


def pytest_collection_finish(session):
    on_ranks = (item for item in session.items if _mesh(item) or _preloads(item))
    ranks.foresee(item.module for item in on_ranks)


# Their subject is the CPU's: its errors (a device asserts, or says nothing) and what
# finds them, what its kernels make of two dtypes, what those of attention take, add up
# and how their results lie, its memory and threads, queries that travel (on a device
# points do).
OF_THE_CPU = {
    "test_a_mask_beside_is_causal",
    "test_a_rank_holds_one_whole_tensor_at_a_time",
    "test_a_target_out_of_bounds_is_the_same_error_everywhere",
    "test_all_ranks_refuse_an_index_of_one",
    "test_an_index_out_of_bounds_is_every_ranks_error",
    "test_bad_matrices",
    "test_changed_arguments",
    "test_compiled_code_refuses_what_is_out_of_bounds",
    "test_every_rank_raises",
    "test_faces_of_no_points_and_of_no_cells",
    "test_gradients_of_one_block_are_no_sums",
    "test_gradients_at_a_large_mean_are_closer_than_pytorchs",
    "test_indices_out_of_bounds",
    "test_masked_scatter_refuses_what_one_device_refuses",
    "test_masks_of_too_few_dims",
    "test_narrow_types",
    "test_neighbours_of_partitioned_points_are_near",
    "test_ordered_points_hardly_travel",
    "test_pieces_of_one_column_in_half_precision",
    "test_queries_travel_only_where_a_nearer_point_may_be",
    "test_ranks_ask_once_whether_an_index_is_within_bounds",
    "test_strides_are_those_of_one_device",
    "test_threads_change_no_number",
    "test_threads_share_the_work",
    "test_types_of_native_statistics",
    "test_what_every_rank_has_whole_becomes_numbers",
    "test_what_is_wrong_is_the_same_error_everywhere",
    "test_what_one_type_takes_another_does_not",
    "test_wrong_indices_raise",
}

LEFT_OUT = {
    "cuda": {
        # It has no such kernels: of truth values, bytes and strides.
        "test_channel_shuffle_of_any_strides",
        "test_images_of_bytes",
        "test_truth_values_are_reduced_into_rows",
        # gloo's own collectives, by which a GPU's tensors go, take any size.
        "test_sums_of_different_sizes_are_an_error_on_every_rank",
    },
    "guarded": {
        # It has no sparse tensors,
        "test_a_plain_tensor_that_is_filled_is_gathered_and_said",
        "test_batches_of_sparse_matrices",
        "test_convolutions",
        "test_convolutions_stay_cut_in_latitude",
        "test_convolutions_train_without_a_change",
        "test_products_with_a_sparse_matrix",
        "test_products_with_a_sparse_matrix_refuse_what_one_device_does",
        "test_sums_and_products_from_the_right",
        "test_terms_of_a_sum_cut_along_both_other_axes",
        "test_the_gradient_of_a_sparse_matrix_is_that_of_its_entries",
        "test_transposed_convolutions",
        "test_values_of_a_sparse_matrix_are_learned",
        "test_what_a_product_with_a_sparse_matrix_moves",
        # no fused cells of recurrent layers,
        "test_layers_are_those_of_one_device_and_gather_nothing",
        "test_layers_take_packed_sequences",
        "test_modules[2-lstm]",
        "test_one_sample_is_gathered_step_by_step",
        "test_steps_become_whole_and_samples_cut",
        # no fused attention where none is asked for: scores overflow elsewhere,
        "test_keys_at_minus_infinity_have_no_weight",
        # no flex attention, and its backend sends no lists of tensors.
        "test_flex_attention_names_our_function",
        "test_the_transforms_that_torch_harmonics_distributes_itself",
    },
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
