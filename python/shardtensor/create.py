"""Making ShardTensors: from one rank's tensor, from equal ones, from nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._prims_common import suggest_memory_format
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C
from shardtensor.agree import agree, missing_ranks_named
from shardtensor.device_mesh import default_mesh, device_of, moves_on_host, whole_group
from shardtensor.placements import check_placements, replicated
from shardtensor.shard_tensor import ShardTensor
from shardtensor.spec import ShardTensorSpec, Sizes, make_spec

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def scatter_tensor(
    tensor: torch.Tensor | None,
    global_src: int,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    *,
    sizes: Sizes | None = None,
) -> ShardTensor:
    """What rank `global_src` holds, cut: each rank receives its shard only.
    Other ranks pass None. `sizes` asks for an uneven split; `global_shape` is
    checked against the tensor, `dtype` converts it. The result is a leaf, in the
    tensor's memory format. Raises alike on every rank for anything but a plain
    tensor, and for arguments that differ. Communication: one small reduction, one small
    broadcast, three integers from each rank to each, one message to each rank; an
    exchange where `sizes` has a repeated cut."""

    def told():
        ranks = mesh.mesh.flatten().tolist()
        if global_src not in ranks:
            raise ValueError(
                f"scatter_tensor: global_src {global_src} is not one of the mesh's "
                f"ranks {ranks}"
            )
        described = None
        if dist.get_rank() == global_src:
            described = _describe("scatter_tensor", tensor, global_shape, dtype)
        return ranks.index(global_src), requires_grad, described

    return _scatter("scatter_tensor", told, tensor, mesh, placements, sizes)


def _scatter(op, told, tensor, mesh, placements, sizes):
    """`told` raises what is wrong here, or says the source's position, whether the
    result requires grad and, on the source, what the others must know."""
    source, requires_grad, described = _agreed(op, told, mesh, placements, sizes)
    shape, dtype, device_type, memory_format = _tell(described, source, mesh)
    placements = check_placements(placements, mesh.ndim)
    spec = make_spec(mesh, shape, placements, sizes)
    if device_type == "meta":  # numbers that nobody has
        whole = torch.empty(shape, dtype=dtype, device="meta")
        whole = whole.contiguous(memory_format=memory_format)
        return _cut(whole.requires_grad_(requires_grad), spec, mesh)
    # A tensor on the host is cut there: one device may not hold it.
    where = device_of(mesh)
    if device_type == "cpu" and moves_on_host(mesh):
        where = torch.device("cpu")
    whole = tensor.detach() if described else torch.empty(0, device=where)
    whole = whole.to(device=where, dtype=dtype)
    scattered = _C.scatter(whole, source, spec._core, memory_format)
    if where != device_of(mesh):
        local = _C.local(scattered).to(device_of(mesh))
        scattered = _C.from_local(local, spec._core, memory_format)
    return scattered.requires_grad_(requires_grad)


def _agreed(op, told, mesh, placements, sizes):
    """What is told, where nothing is wrong or different on any rank."""
    problem = found = call = None
    try:
        source, requires_grad, _ = found = told()
        call = {
            "source": source,
            "placements": check_placements(placements, mesh.ndim),
            "sizes": sizes,
            "requires_grad": requires_grad,
        }
    except Exception as error:  # noqa: BLE001  whatever it is, others wait
        problem = error
    agree(mesh, problem, call, f"{op}: ")
    return found


def _describe(op, tensor, global_shape=None, dtype=None):
    """What the source tells the others."""
    _check_plain(op, tensor)
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{op}: expected a strided tensor that has values, got one of "
            f"{tensor.layout} and {tensor.dtype} on {tensor.device}"
        )
    if global_shape is not None and [*tensor.shape] != _shape(op, global_shape):
        raise ValueError(
            f"{op}: the source's tensor has shape {tuple(tensor.shape)}, global_shape "
            f"says {tuple(global_shape)}"
        )
    return (
        tuple(tensor.shape),
        dtype or tensor.dtype,
        tensor.device.type,
        suggest_memory_format(tensor),
    )


def _check_plain(op, tensor):
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{op}: expected a plain tensor, got {type(tensor).__name__}")
    if hasattr(tensor, "device_mesh"):
        raise ValueError(
            f"{op}: expected a plain tensor, got a {type(tensor).__name__} on "
            f"{tensor.device_mesh} of placements {tensor.placements}; redistribute() "
            "cuts a ShardTensor otherwise, ShardTensor.from_dtensor() makes one of a "
            "DTensor"
        )


def _shape(op, told):
    try:
        return [*torch.Size(told)]
    except TypeError:
        raise TypeError(f"{op}: global_shape: expected sizes, got {told!r}") from None


def _tell(told, source, mesh):
    message, group = [told], whole_group(mesh)
    with missing_ranks_named(group):
        dist.broadcast_object_list(
            message, group=group, device=device_of(mesh), group_src=source
        )
    return message[0]


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    sizes: Sizes | None = None,
    src_data_rank: int | None = 0,
) -> ShardTensor:
    """A leaf made of the leaf `tensor`, which every rank has in its whole size, in its
    memory format. The values are those of the mesh's rank number `src_data_rank`; None
    takes each rank's own values, which must be equal, without communication. Errors and
    communication else: as scatter_tensor."""
    mesh = default_mesh() if device_mesh is None else device_mesh
    placements = replicated(mesh.ndim) if placements is None else placements
    if src_data_rank is None:
        _check_leaf(tensor)
        return _cut(tensor, make_spec(mesh, tensor.shape, placements, sizes), mesh)

    def told():
        if not 0 <= src_data_rank < mesh.size():
            raise ValueError(
                f"distribute_tensor: src_data_rank {src_data_rank} is outside a "
                f"mesh of {mesh.size()} ranks"
            )
        _check_leaf(tensor)
        described = _describe("distribute_tensor", tensor)
        holds = mesh.mesh.flatten().tolist()[src_data_rank] == dist.get_rank()
        return src_data_rank, tensor.requires_grad, described if holds else None

    return _scatter("distribute_tensor", told, tensor, mesh, placements, sizes)


def _check_leaf(tensor):
    _check_plain("distribute_tensor", tensor)
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor: expected a leaf, got the result of "
            f"{type(tensor.grad_fn).__name__}, whose history would be lost; detach() "
            "it, or ShardTensor.from_local(x, mesh).redistribute(placements=...)"
        )


def _cut(tensor, spec, mesh):
    """Of what every rank has whole."""
    memory_format = suggest_memory_format(tensor)
    whole = _C.from_local(tensor.detach(), spec._core.replicated(), memory_format)
    local = _C.local(_C.redistribute(whole, spec._core))
    local = local.contiguous(memory_format=memory_format)
    local = local if local.is_meta else local.to(device_of(mesh))
    shard = _C.from_local(local, spec._core, memory_format)
    return shard.requires_grad_(tensor.requires_grad)


# ---- factories --------------------------------------------------------------


def zeros(*size: int, **options) -> ShardTensor:
    """zeros(4, 6, device_mesh=mesh, placements=[Shard(0)]), see full."""
    return _filled(size, lambda spec, **o: torch.zeros(spec.local_shape, **o), options)


def ones(*size: int, **options) -> ShardTensor:
    """ones(4, 6, device_mesh=mesh, placements=[Shard(0)]), see full."""
    return _filled(size, lambda spec, **o: torch.ones(spec.local_shape, **o), options)


def empty(*size: int, **options) -> ShardTensor:
    """As torch.empty, see full."""
    return _filled(size, lambda spec, **o: torch.empty(spec.local_shape, **o), options)


def full(
    size: Sequence[int],
    fill_value: float,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sizes: Sizes | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> ShardTensor:
    """As torch.full, each rank making its own piece. All factories take the
    mesh (the one entered, or DistributedManager's), placements (Replicate), `sizes` for
    an uneven split, dtype and requires_grad. No communication."""
    options = {
        "device_mesh": device_mesh,
        "placements": placements,
        "sizes": sizes,
        "dtype": dtype,
        "requires_grad": requires_grad,
    }
    return _filled(
        (size,),
        lambda spec, **o: torch.full(spec.local_shape, fill_value, **o),
        options,
    )


def rand(*size: int, **options) -> ShardTensor:
    """As torch.rand, see full: the numbers of one device with the same seed, in
    any layout; under the policy "counter" those of `random_policy`. Seed all ranks
    alike, and draw alike on every rank."""
    return _filled(size, _random(_C.rand), options)


def randn(*size: int, **options) -> ShardTensor:
    """As torch.randn, see rand."""
    return _filled(size, _random(_C.randn), options)


def _filled(size: Sequence, make: Callable, options: dict) -> ShardTensor:
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    mesh = options.pop("device_mesh", None) or default_mesh()
    placements = options.pop("placements", None)
    placements = replicated(mesh.ndim) if placements is None else placements
    placements = check_placements(placements, mesh.ndim)
    spec = make_spec(mesh, shape, placements, options.pop("sizes", None))
    if not all(p.is_shard() or p.is_replicate() for p in placements):
        raise ValueError(f"factories make Shard and Replicate, not {placements}")
    dtype = options.pop("dtype", None)
    requires_grad = options.pop("requires_grad", False)
    if options:
        raise TypeError(f"a factory got unexpected arguments: {', '.join(options)}")
    made = make(spec, dtype=dtype, device=device_of(mesh))
    if not isinstance(made, ShardTensor):
        made = ShardTensor.from_spec(made, spec)
    return made.requires_grad_(requires_grad)


def _random(draw: Callable) -> Callable:
    def make(spec: ShardTensorSpec, **options) -> ShardTensor:
        return draw(spec._core, torch.empty(0, **options))

    return make
