"""Calls of collectives that do not fit on one rank, or to those of the others: one
error on every rank, before anything is sent. Under gloo and under MPI."""

import itertools
import time

import rig
import torch
import torch.distributed as dist
from bad_steps import bad_halos, bad_kinds, bad_steps, bad_transforms
from torch.distributed.device_mesh import init_device_mesh

import shardtensor
from shardtensor import _ops
from shardtensor import distributed as st
from shardtensor.distributed import DistributedManager
from shardtensor.distributed.fft import DistributedIRFFT2, DistributedRFFT2
from shardtensor.distributed.mappings import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    reduce_from_parallel_region,
    scatter_to_parallel_region,
)
from shardtensor.distributed.utils import distributed_transpose
from shardtensor.ring import (
    perform_ring_iteration,
    perform_ring_iteration_async,
    ring_sum,
    ring_tour,
)

SOON = 5.0  # seconds; groups wait for a minute


def _ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


def _pass(owner, block):
    pass


def bad_calls(rank, ranks, bad):
    """(What is wrong, the call, the error's kind, its text) where the rank `bad` is
    told something else than the others."""
    mine = rank == bad
    name = dist.group.WORLD.group_name
    even, other = [1] * ranks, [2, *[1] * (ranks - 1)]
    sizes = other if mine else even
    wide = torch.float64 if mine else torch.float32
    index = [torch.tensor([0])] * ranks
    table = [[1] * ranks] * ranks
    mesh = init_device_mesh(rig.DEVICE, (ranks,))
    shapes = [(2,)] * ranks
    differ = ValueError, "do not make the same call"

    def square(n, dtype=torch.float32):
        return _ones(n, 2, dtype=dtype)

    yield (
        "all_gather_v: one rank's piece is larger than it says",
        lambda: st.all_gather_v(square(1 + mine), even),
        (ValueError, f"expected 1 in dim 0 (on rank {bad} of group"),
    )
    yield (
        "all_gather_v: sizes differ",
        lambda: st.all_gather_v(square(sizes[rank]), sizes),
        differ,
    )
    yield (
        "all_gather_v: dtypes differ",
        lambda: st.all_gather_v(square(1, wide), even),
        (ValueError, f"rank {bad}: all_gather_v of Double tensors [*, 2] along dim 0"),
    )
    yield (
        "all_gather_v: other dims differ",
        lambda: st.all_gather_v(_ones(1, 2 + mine), even),
        differ,
    )
    yield (
        "all_gather_v: a dim that one rank lacks",
        lambda: st.all_gather_v(_ones(*[1] * (2 - mine)), even, dim=1),
        (IndexError, "Dimension out of range"),
    )
    yield (
        "all_gather_v: too few sizes",
        lambda: st.all_gather_v(square(1), [1] if mine else even),
        (ValueError, f"sizes is [1], expected {ranks} numbers, one for each rank"),
    )
    yield (
        "gather_v: another destination",
        lambda: st.gather_v(square(1), even, dst=int(mine)),
        differ,
    )
    yield (
        "gather_v: a rank that there is not",
        lambda: st.gather_v(square(1), even, dst=ranks if mine else 0),
        (ValueError, f"gather_v: dst is {ranks}, expected one of the {ranks} ranks"),
    )
    yield (
        "scatter_v: the source has other rows",
        lambda: st.scatter_v(square(ranks + mine), even, src=bad),
        (ValueError, f"scatter_v: x has sizes [{ranks + 1}, 2], expected {ranks} in"),
    )
    yield (
        "scatter_v: sizes differ",
        lambda: st.scatter_v(square(sum(sizes)), sizes),
        differ,
    )
    yield (
        "reduce_scatter_v: other rows",
        lambda: st.reduce_scatter_v(square(ranks + mine), even),
        (ValueError, f"expected {ranks} in dim 0"),
    )
    yield (
        "reduce_scatter_v: sizes differ",
        lambda: st.reduce_scatter_v(square(sum(sizes)), sizes),
        differ,
    )
    yield (
        "all_to_all_v: splits do not add up",
        lambda: st.all_to_all_v(square(ranks + mine), even, even),
        (ValueError, f"all_to_all_v: x has sizes [{ranks + 1}, 2], expected {ranks}"),
    )
    yield (
        "all_to_all_v: a negative split",
        lambda: st.all_to_all_v(square(ranks), even, [-1] * ranks if mine else even),
        (ValueError, "expected no negative number"),
    )
    yield (
        "all_to_all_v: other rows for itself than from itself",
        lambda: st.all_to_all_v(square(ranks), even, [3] * ranks if mine else even),
        (ValueError, f"rank {bad} keeps 1 rows by in_splits, 3 by out_splits"),
    )
    more = [1 if r == rank else 2 for r in range(ranks)]
    yield (
        "all_to_all_v: more is expected than is sent",
        lambda: st.all_to_all_v(square(ranks), even, more if mine else even),
        (ValueError, f"rank {bad}: all_to_all_v of Float tensors [*, 2] along dim 0"),
    )
    yield (
        "all_to_all_v: more is sent than is expected",
        lambda: st.all_to_all_v(
            square(sum(more) if mine else ranks), more if mine else even, even
        ),
        differ,
    )
    yield (
        "indexed_all_to_all_v: an index out of range",
        lambda: st.indexed_all_to_all_v(
            square(1), [torch.tensor([7 * mine])] * ranks, table
        ),
        (
            IndexError,
            "indexed_all_to_all_v: an index is 7, expected 0 or more and less than 1, "
            f"the extent of dim 0 (on rank {bad} of group",
        ),
    )
    yield (
        "indexed_all_to_all_v: a negative index",
        lambda: st.indexed_all_to_all_v(
            square(1), [torch.tensor([-int(mine)])] * ranks, table
        ),
        (IndexError, "an index is -1, expected 0 or more and less than 1"),
    )
    yield (
        "indexed_all_to_all_v: other rows than the table says",
        lambda: st.indexed_all_to_all_v(
            square(1), [torch.tensor([0, 0])] * ranks if mine else index, table
        ),
        (ValueError, "keeps 2 rows by in_splits, 1 by out_splits"),
    )
    yield (
        "indexed_all_to_all_v: no table",
        lambda: st.indexed_all_to_all_v(square(1), index, [[]] if mine else table),
        (ValueError, f"out_splits is [], expected {ranks} numbers"),
    )
    yield (
        "broadcast: sizes differ",
        lambda: st.broadcast(square(1 + mine)),
        differ,
    )
    yield (
        "broadcast: dtypes differ",
        lambda: st.broadcast(square(1, wide)),
        differ,
    )
    yield (
        "all_reduce: sizes differ",
        lambda: st.all_reduce(square(1 + mine)),
        (ValueError, f"rank {bad}: all_reduce (sum) of a torch.float32 tensor [2, 2]"),
    )
    yield (
        "all_reduce: another reduction",
        lambda: st.all_reduce(square(1), "max" if mine else "sum"),
        differ,
    )
    yield (
        "fused_all_reduce: another key",
        lambda: st.fused_all_reduce({"loss" if mine else "error": _ones(1)}),
        (ValueError, f"rank {bad}: fused_all_reduce (sum) as torch.float32: loss [1]"),
    )
    yield (
        "fused_all_reduce: nothing",
        lambda: st.fused_all_reduce([] if mine else [_ones(1)]),
        differ,
    )
    yield (
        "fused_all_reduce: later on one rank",
        lambda: st.fused_all_reduce([_ones(1)], async_op=mine),
        (ValueError, f"rank {bad}: fused_all_reduce (sum, async) as torch.float32"),
    )
    yield (
        "fused_all_reduce: no tensor",
        lambda: st.fused_all_reduce([3.0] if mine else [_ones(1)]),
        (
            TypeError,
            "expected tensors, mappings, sequences or TensorDicts, got a float",
        ),
    )
    yield (
        "reduce_loss: to another rank",
        lambda: st.reduce_loss(1.0, int(mine)),
        differ,
    )
    yield (
        "reduce_loss: more than one number",
        lambda: st.reduce_loss(_ones(2) if mine else 1.0),
        (ValueError, "reduce_loss: expected one number, got [2]"),
    )
    yield (
        "reduce_loss: no number",
        lambda: st.reduce_loss("low" if mine else 1.0),
        (TypeError, "reduce_loss: expected one number, got 'low'"),
    )
    yield (
        "reduce_loss: a rank that there is not",
        lambda: st.reduce_loss(1.0, ranks if mine else 0),
        (ValueError, f"reduce_loss: dst_rank is {ranks} of {ranks} ranks"),
    )
    yield (
        "distributed_transpose: rows that do not divide",
        lambda: distributed_transpose(square(ranks + mine), 0, 1),
        (ValueError, f"{ranks + 1} rows of dim 0 do not divide by {ranks} ranks"),
    )
    yield (
        "distributed_transpose: a dim that there is not",
        lambda: distributed_transpose(square(ranks), 2 * mine, 1),
        (IndexError, "distributed_transpose: dims 2 and 1 of 2 dims"),
    )
    yield (
        "distributed_transpose: other sizes",
        lambda: distributed_transpose(_ones(ranks, 2 + mine), 0, 1),
        differ,
    )
    yield (
        "copy_to_parallel_region: sizes differ",
        lambda: copy_to_parallel_region(square(1 + mine), None),
        differ,
    )
    yield (
        "copy_to_parallel_region: one rank's needs no gradient",
        lambda: copy_to_parallel_region(square(1).requires_grad_(not mine), None),
        differ,
    )
    yield (
        "reduce_from_parallel_region: sizes differ",
        lambda: reduce_from_parallel_region(square(1 + mine), None),
        differ,
    )
    yield (
        "scatter_to_parallel_region: too few rows",
        lambda: scatter_to_parallel_region(square(1 if mine else ranks), 0, None),
        (ValueError, f"1 rows of dim 0 for {ranks} ranks"),
    )
    yield (
        "scatter_to_parallel_region: a dim that there is not",
        lambda: scatter_to_parallel_region(square(ranks), 3 * mine, None),
        (IndexError, "scatter_to_parallel_region: dim 3 of 2 dims"),
    )
    yield (
        "gather_from_parallel_region: other rows",
        lambda: gather_from_parallel_region(square(1 + mine), 0, even, None),
        (ValueError, "gather_from_parallel_region: x has sizes [2, 2], expected 1 in"),
    )
    yield (
        "ring_step: the rank before has other sizes",
        lambda: _ops.ring_step(_ones(2, 3), 1, [3, 2] if mine else [2, 3], name),
        (ValueError, f"rank {bad}: ring_step of Float tensors by 1"),
    )
    yield (
        "ring_step: another step",
        lambda: _ops.ring_step(_ones(2), 1 - 2 * mine, [2], name),
        differ,
    )
    for step in (perform_ring_iteration, perform_ring_iteration_async):
        for what, call, error in bad_steps(mine, mesh, step):
            yield f"{step.__name__}: {what}", call, error
    yield (
        "ring_tour: shapes on one rank alone",
        lambda: ring_tour(_ones(2), _pass, mesh, 0, shapes if mine else None),
        differ,
    )
    yield (
        "ring_tour: another dtype",
        lambda: ring_tour(_ones(2, dtype=wide), _pass, mesh),
        (ValueError, f"rank {bad}: ring_tour of 1-D Double blocks"),
    )
    yield (
        "ring_tour: too few shapes",
        lambda: ring_tour(_ones(2), _pass, mesh, 0, shapes[mine:]),
        (ValueError, f"expected the sizes of {ranks} blocks, one for each rank, got"),
    )
    yield (
        "ring_tour: another shape than promised",
        lambda: ring_tour(_ones(2 + mine), _pass, mesh, 0, shapes),
        (
            ValueError,
            "expected a block of sizes [2], as `sizes` say of this rank, got [3]",
        ),
    )
    yield (
        "ring_tour: shapes that are none",
        lambda: ring_tour(_ones(2), _pass, mesh, 0, 2 if mine else shapes),
        (TypeError, "'int' object is not iterable"),
    )
    yield (
        "ring_sum: shapes on one rank alone",
        lambda: ring_sum(
            torch.sum, _ones(2), mesh=mesh, shapes=shapes if mine else None
        ),
        differ,
    )
    yield (
        "ring_sum: an axis that there is not",
        lambda: ring_sum(torch.sum, _ones(2), mesh=mesh, mesh_dim=3 * mine),
        (IndexError, "ring_sum: mesh_dim: expected an axis of"),
    )
    for transform in (DistributedRFFT2, DistributedIRFFT2):
        for what, call, error in bad_transforms(mine, ranks, transform.apply):
            yield f"{transform.__name__}: {what}", call, error
    yield (
        "halo_padding: too few rows",
        lambda: _ops.halo_padding(_ones(1 if mine else 5, 2), 0, 2, 0, name),
        (ValueError, "halo_padding: x has sizes [1, 2], expected at least 2 rows in"),
    )
    yield (
        "halo_padding: another width",
        lambda: _ops.halo_padding(_ones(5), 0, 1 + mine, 0, name),
        differ,
    )
    yield (
        "another operator",
        lambda: st.broadcast(square(1)) if mine else st.all_gather_v(square(1), even),
        differ,
    )


def collectives(x, ranks, dim=0):
    """A call of each, right where all ranks have ones of (ranks, 2) and dim 0."""
    one, even, mesh = x[:1], [1] * ranks, init_device_mesh(rig.DEVICE, (ranks,))
    rows = [torch.zeros(1, dtype=torch.int64, device=x.device)] * ranks
    along = {
        "all_gather_v": lambda: st.all_gather_v(one, even, dim),
        "gather_v": lambda: st.gather_v(one, even, dim),
        "scatter_v": lambda: st.scatter_v(x, even, dim),
        "reduce_scatter_v": lambda: st.reduce_scatter_v(x, even, dim),
        "all_to_all_v": lambda: st.all_to_all_v(x, even, even, dim),
        "indexed_all_to_all_v": lambda: st.indexed_all_to_all_v(
            x, rows, [even] * ranks, dim=dim
        ),
        "distributed_transpose": lambda: distributed_transpose(x, dim, 1),
        "scatter_to_parallel_region": lambda: scatter_to_parallel_region(x, dim, None),
        "gather_from_parallel_region": lambda: gather_from_parallel_region(
            one, dim, even, None
        ),
        "halo_padding": lambda: _ops.halo_padding(
            x, dim, 1, 0, dist.group.WORLD.group_name
        ),
    }
    return along, {
        "broadcast": lambda: st.broadcast(x),
        "all_reduce": lambda: st.all_reduce(x),
        "fused_all_reduce": lambda: st.fused_all_reduce([x]),
        "copy_to_parallel_region": lambda: copy_to_parallel_region(x, None),
        "reduce_from_parallel_region": lambda: reduce_from_parallel_region(x, None),
        "ring_step": lambda: _ops.ring_step(
            x, 1, [ranks, 2], dist.group.WORLD.group_name
        ),
        "ring_tour": lambda: ring_tour(x, _pass, mesh),
        "ring_sum": lambda: ring_sum(torch.sum, x, mesh=mesh),
    }


def bad_calls_of_each(rank, ranks, bad):
    """What is wrong in the same way for any of them."""
    mine, x = rank == bad, _ones(ranks, 2)
    others = {"another dtype": x.double(), "one more dim": x.unsqueeze(2)}
    if rig.DEVICE != "cpu":
        others["a tensor of the host"] = x.cpu()
    for what, other in others.items():
        along, whole = collectives(other if mine else x, ranks)
        for name, call in {**along, **whole}.items():
            yield f"{name}: {what}", call, (ValueError, "do not make the same call")
    along, _ = collectives(x, ranks, 7 * mine)
    for name, call in along.items():
        yield f"{name}: a dim that there is not", call, (IndexError, "7")


class _NoSize:
    def __index__(self):
        raise KeyError("no size")


def bad_arguments(rank, ranks, bad):
    """The same for what is no argument of such a call at all."""
    mine, even = rank == bad, [1] * ranks
    index, table = [torch.tensor([0])] * ranks, [[1] * ranks] * ranks
    x = _ones(1, 2)
    mesh = init_device_mesh(rig.DEVICE, (ranks,))
    cut = shardtensor.distribute_tensor(x, mesh, [shardtensor.Replicate()])

    for what, call, error in bad_halos(mine, mesh, cut):
        yield f"halo_padding: {what}", call, error
    yield from bad_kinds(mine, mesh)
    for wrong in (3, None, [[1.0]], x.to("meta"), x.cpu().to_sparse(), cut):
        yield (
            f"all_gather_v: of {type(wrong)}",
            lambda wrong=wrong: st.all_gather_v(wrong if mine else x, even),
            (TypeError, f"(on rank {bad} of group"),
        )
    for wrong in (None, ["a"] * ranks, [1.5] * ranks, 1):
        yield (
            f"all_gather_v: sizes {wrong}",
            lambda wrong=wrong: st.all_gather_v(x, wrong if mine else even),
            (TypeError, f"all_gather_v: sizes: expected integers, got {wrong!r} (on"),
        )
    yield (
        "all_gather_v: more than 64 bits",
        lambda: st.all_gather_v(x, [2**63, *even[1:]] if mine else even),
        (ValueError, f"all_gather_v: expected an integer of 64 bits, got {2**63} (on"),
    )
    yield (
        "gather_v: more than 64 bits",
        lambda: st.gather_v(x, even, dst=2**63 if mine else 0),
        (ValueError, f"gather_v: expected an integer of 64 bits, got {2**63} (on rank"),
    )
    yield (
        "all_gather_v: a size that fails",
        lambda: st.all_gather_v(x, [_NoSize(), *even[1:]] if mine else even),
        (RuntimeError, f"all_gather_v: 'no size' (on rank {bad} of group"),
    )
    yield (
        "all_gather_v: no group",
        lambda: st.all_gather_v(x, even, group="world" if mine else None),
        (TypeError, "all_gather_v: expected a ProcessGroup or None, got 'world' (on"),
    )
    for name, rows in (("gather_v", 1), ("scatter_v", ranks)):
        yield (
            f"{name}: None",
            lambda n=name, r=rows: getattr(st, n)(None if mine else _ones(r), even),
            (TypeError, f"{name}: expected a tensor, got None (on rank {bad} of"),
        )
    for wrong in (None, cut):
        yield (
            f"copy_to_parallel_region: of {type(wrong)}",
            lambda wrong=wrong: copy_to_parallel_region(wrong if mine else x, None),
            (TypeError, f"(on rank {bad} of group"),
        )
    yield (
        "gather_from_parallel_region: halves of rows",
        lambda: gather_from_parallel_region(x, 0, [0.5] if mine else even, None),
        (TypeError, "gather_from_parallel_region: shapes: expected integers, got [0.5"),
    )
    for name in ("dim", "dst"):
        for wrong in (None, "a", 0.5):
            yield (
                f"gather_v: {name} {wrong}",
                lambda n=name, w=wrong: st.gather_v(
                    x, even, **({n: w} if mine else {})
                ),
                (
                    TypeError,
                    f"gather_v: {name}: expected an integer, got {wrong!r} (on",
                ),
            )
    for name, call in _numbers(ranks, "a" if mine else 0).items():
        yield (
            f"{name}: no number",
            call,
            (TypeError, f"{name}: {'src' if name == 'broadcast' else 'dim'}: expected"),
        )
    yield (
        "all_to_all_v: halves of rows",
        lambda: st.all_to_all_v(_ones(ranks), even, [0.5] * ranks if mine else even),
        (TypeError, "all_to_all_v: out_splits: expected integers, got [0.5"),
    )
    for name in ("all_reduce", "broadcast"):
        yield (
            f"{name}: None",
            lambda name=name: getattr(st, name)(None if mine else x),
            (TypeError, f"{name}: expected a tensor, got None (on rank {bad} of"),
        )
    yield (
        "all_reduce: what there is not",
        lambda: st.all_reduce(x, dist.ReduceOp.BOR if mine else "sum"),
        (ValueError, "all_reduce: op: expected one of ['sum', 'avg', 'product', 'max'"),
    )
    for wrong in (None, [[0]] * ranks, [torch.tensor([0.0])] * ranks):
        yield (
            f"indexed_all_to_all_v: indices {wrong}",
            lambda wrong=wrong: st.indexed_all_to_all_v(
                x, wrong if mine else index, table
            ),
            (TypeError, "indexed_all_to_all_v: "),
        )
    yield (
        "indexed_all_to_all_v: no table",
        lambda: st.indexed_all_to_all_v(x, index, None if mine else table),
        (TypeError, "indexed_all_to_all_v: "),
    )
    for wrong in ("meta", "nowhere"):
        yield (
            f"fused_all_reduce: on {wrong}",
            lambda wrong=wrong: st.fused_all_reduce(
                [x], device=wrong if mine else None
            ),
            (ValueError, "fused_all_reduce: device: "),
        )


def _numbers(ranks, number):
    """Calls with a dim, or a rank, that is no number."""
    even, x = [1] * ranks, _ones(ranks, 2)
    rows = [torch.tensor([0])] * ranks
    return {
        "all_gather_v": lambda: st.all_gather_v(x[:1], even, number),
        "scatter_v": lambda: st.scatter_v(x, even, number),
        "reduce_scatter_v": lambda: st.reduce_scatter_v(x, even, number),
        "all_to_all_v": lambda: st.all_to_all_v(x, even, even, number),
        "indexed_all_to_all_v": lambda: st.indexed_all_to_all_v(
            x, rows, [even] * ranks, dim=number
        ),
        "broadcast": lambda: st.broadcast(x, number),
        "scatter_to_parallel_region": lambda: scatter_to_parallel_region(
            x, number, None
        ),
        "gather_from_parallel_region": lambda: gather_from_parallel_region(
            x[:1], number, even, None
        ),
    }


def check_bad_calls():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if "spatial_parallel" not in DistributedManager().group_names:
        DistributedManager.create_process_subgroup("spatial_parallel", ranks)
    wrong = []
    for bad in (0, ranks - 1):
        who = rank, ranks, bad
        calls = bad_calls(*who), bad_calls_of_each(*who), bad_arguments(*who)
        for what, call, (kind, text) in itertools.chain(*calls):
            start = time.monotonic()
            told = _error_of(call)
            seconds = time.monotonic() - start
            everyones = [None] * ranks
            dist.all_gather_object(everyones, repr(told))
            right = isinstance(told, kind) and text in str(told) and seconds < SOON
            if not right or len(set(everyones)) > 1:
                wrong.append((what, bad, seconds, everyones))
    assert not wrong, wrong
    # Everybody is still in step.
    assert st.all_reduce(torch.ones(1), dist.ReduceOp.SUM).item() == ranks


def _error_of(call):
    try:
        call()
    except (ValueError, IndexError, TypeError, RuntimeError) as error:
        return error
    return None
