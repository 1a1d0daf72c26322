"""Calls that make ShardTensors, models and graphs, and do not fit on one rank, or to
those of the others: one error on every rank of the mesh, and it goes on."""

import time

import rig
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta

import shardtensor
from shardtensor import ShardTensor, ShardTensorSpec, partition_nodes
from shardtensor.device_mesh import whole_group
from shardtensor.nn.functional import partition_points

SOON = 5.0  # seconds; groups wait for minutes
DIFFERENT = ValueError, "ranks were told different things"
EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])


def bad_pieces(mesh, mine):
    """(What is wrong, the call, the error's kind, its text) of pieces that ranks have,
    where this rank is told something else than the others if it is `mine`."""
    x, rows = torch.ones(1, 2), [Shard(0)] * mesh.ndim
    ask, on = ShardTensor.from_local, f"on {x.device.type}"

    def open_spec(local, shape=None):
        meta = TensorMeta(torch.Size((mesh.size(), 2)), (2, 1), x.dtype)
        spec = ShardTensorSpec(mesh=mesh, placements=rows, tensor_meta=meta)
        if shape is not None:
            spec.local_shape = shape
        return ShardTensor(local, spec)

    for wrong, kind, text in (
        (None, TypeError, "from_local: expected a plain tensor, got a NoneType"),
        ([1.0], TypeError, "from_local: expected a plain tensor, got a list"),
        (x.to("meta"), ValueError, "infer_spec of Float tensors of 2 dims on meta"),
        (x.double(), ValueError, "infer_spec of Double tensors of 2 dims " + on),
        (x[0], ValueError, "infer_spec of Float tensors of 1 dims " + on),
        (x.clone().requires_grad_(), ValueError, on + ", which require grad, Shard"),
        (torch.ones([1] * 31), ValueError, "expected at most 30 dims, got 31"),
    ):
        told = wrong if mine else x
        yield f"from_local: {text}", lambda t=told: ask(t, mesh, rows), kind, text
    if rig.DEVICE != "guarded":  # it has no sparse tensors
        told = x.to_sparse() if mine else x
        text = "infer_spec: expected a strided tensor, got layout"
        yield f"from_local: {text}", lambda t=told: ask(t, mesh, rows), TypeError, text
    for wrong, kind, text in (
        (None, ValueError, "Replicate()"),
        ([], ValueError, f"expected one placement for each of the {mesh.ndim} mesh"),
        (["x"] * mesh.ndim, TypeError, "expected Shard, Replicate or Partial of"),
        (7, TypeError, "expected Shard, Replicate or Partial of"),
        ([Shard(5)] * mesh.ndim, ValueError, "Shard(dim=5)"),
    ):
        told = wrong if mine else rows
        yield f"from_local: {wrong}", lambda t=told: ask(x, mesh, t), kind, text
    for wrong, kind, text in (
        ((mesh.size() + 1, 2), ValueError, f"global_shape [{mesh.size() + 1}, 2]"),
        (None, ValueError, "do not make the same call"),
        (7, TypeError, "'int' object is not iterable"),
    ):
        told = wrong if mine else (mesh.size(), 2)
        call = lambda t=told: ask(x, mesh, rows, "infer", t)  # noqa: E731
        yield f"from_local: global_shape {wrong}", call, kind, text
    how = "infr" if mine else "infer"
    yield (
        "from_local: no such way",
        lambda: ask(x, mesh, rows, how),
        ValueError,
        "from_local: sharding_shapes: expected 'infer', 'chunk' or a dict",
    )
    for wrong, kind, text in (
        (None, TypeError, "ShardTensor: expected a tensor, got None"),
        (x[0], ValueError, "tensors of 1 dims"),
    ):
        told = wrong if mine else x
        yield f"open spec: {text}", lambda t=told: open_spec(t), kind, text
    shape = torch.Size([2, 2] if mine else [1, 2])
    yield (
        "open spec: another shape",
        lambda: open_spec(x, shape),
        ValueError,
        "ShardTensor: local_shape says (2, 2), the tensor has (1, 2)",
    )


def bad_sources(mesh, mine):
    """The same of tensors that one rank has."""
    x, rows = torch.ones(6, 2), [Shard(0)] * mesh.ndim
    bad = int(mesh.mesh.flatten()[-1])  # where it is `mine`
    for wrong in (x.cpu().to_sparse(), x.cpu().to_sparse_csr()):
        told = wrong if mine else x
        text = ": expected a strided tensor that has values, got one of"
        yield (
            f"scatter_tensor: {wrong.layout}",
            lambda t=told: shardtensor.scatter_tensor(t, bad, mesh, rows),
            ValueError,
            "scatter_tensor" + text,
        )
        yield (
            f"distribute_tensor: {wrong.layout}",
            lambda t=told: shardtensor.distribute_tensor(
                t, mesh, rows, src_data_rank=mesh.size() - 1
            ),
            ValueError,
            "distribute_tensor" + text,
        )


class Unnamed(nn.Linear):
    def named_buffers(self, *args, **options):
        raise KeyError("no buffers")


def bad_models(mesh, mine):
    good = nn.Linear(2, 2)
    for wrong, kind, text in (
        (None, TypeError, "expected a module, got None"),
        ("net", TypeError, "expected a module, got 'net'"),
        (Unnamed(2, 2), RuntimeError, "no buffers"),
    ):
        module = wrong if mine else good
        calls = {"check_replicas": lambda m=module: shardtensor.check_replicas(m, mesh)}
        if mesh.ndim == 1:
            calls["sync_module_over_mesh"] = lambda m=module: (
                shardtensor.sync_module_over_mesh(m, mesh)
            )
        if mesh.mesh_dim_names:
            calls["parallelize"] = lambda m=module: shardtensor.parallelize(
                m, mesh, "ddp", mesh.mesh_dim_names
            )
        for name, call in calls.items():
            yield f"{name}: {wrong}", call, kind, text


def bad_partitions(mesh, mine):
    points, owners = torch.rand(8, 2), torch.arange(8) % 2
    way = "partition_nodes: expected one of owners, points and edge_index, got "

    def nodes(right, wrong):
        return lambda: partition_nodes(mesh, **(wrong if mine else right))

    def order(**wrong):
        told = {"points": points, "method": "rcb", **(wrong if mine else {})}
        return lambda: partition_points(told.pop("points"), mesh, **told)

    by_points, by_owners = {"points": points}, {"owners": owners}
    by_edges = {"edge_index": EDGES, "nodes": 4}
    cut = shardtensor.distribute_tensor(points, mesh, [Replicate()] * mesh.ndim)
    for right, wrong, kind, text in (
        (by_points, {}, ValueError, way + "0"),
        (by_points, {**by_points, **by_owners}, ValueError, way + "2"),
        (by_points, by_edges, *DIFFERENT),
        (by_points, {"points": points[1:]}, *DIFFERENT),
        (by_points, {"points": points.double()}, *DIFFERENT),
        (by_points, {"points": cut}, *DIFFERENT),
        (by_points, {**by_points, "method": "hilbert"}, *DIFFERENT),
        (by_points, {"points": [[1.0]]}, TypeError, "points: expected a tensor, got"),
        (by_points, {**by_points, "weights": torch.ones(3)}, *DIFFERENT),
        (by_owners, {**by_owners, "method": "rcb"}, ValueError, "expected no method"),
        (by_owners, {"owners": owners.float()}, *DIFFERENT),
        (by_edges, {"edge_index": [[0], [1]], "nodes": 4}, TypeError, "edge_index: ex"),
        (by_edges, {**by_edges, "method": "rcb"}, ValueError, "or 'metis' for a graph"),
        (by_edges, {"edge_index": EDGES}, ValueError, "number of nodes, got nodes="),
    ):
        yield f"partition_nodes: {wrong}", nodes(right, wrong), kind, text
    for wrong, kind, text in (
        ({"points": None}, TypeError, "partition_points: points: expected a tensor"),
        ({"points": points[1:]}, *DIFFERENT),
        ({"points": cut}, *DIFFERENT),
        ({"method": "hilbert"}, *DIFFERENT),
        ({"weights": torch.ones(8)}, *DIFFERENT),
        ({"weights": 1.0}, TypeError, "partition_points: weights: expected a tensor"),
        ({"owners": owners}, *DIFFERENT),
    ):
        yield f"partition_points: {wrong}", order(**wrong), kind, text


def check_bad_makers(mesh):
    group, ranks = whole_group(mesh), mesh.size()
    mine = dist.get_rank(group) == ranks - 1
    wrong = []
    for cases in (bad_pieces, bad_sources, bad_models, bad_partitions):
        for what, call, kind, text in cases(mesh, mine):
            start = time.monotonic()
            told = _error_of(call)
            seconds = time.monotonic() - start
            everyones = [None] * ranks
            dist.all_gather_object(everyones, repr(told), group)
            right = isinstance(told, kind) and text in str(told) and seconds < SOON
            if not right or len({*everyones}) > 1:
                wrong.append((what, seconds, everyones))
    assert not wrong, "\n".join(map(str, wrong))
    x = ShardTensor.from_local(torch.ones(1, 2), mesh, [Shard(0)] * mesh.ndim)
    assert x.sum().item() == 2 * ranks


def _error_of(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001  whatever it is, ranks compare it
        return error
    return None
