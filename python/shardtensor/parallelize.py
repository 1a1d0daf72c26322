"""Data parallel x domain parallel: one call for what the two must agree about."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardtensor.readers  # noqa: F401  tells the core what DDP and FSDP do
from shardtensor import _C
from shardtensor.agree import agree, gather
from shardtensor.constants import hold_in_checkpoints, new_tensors_on
from shardtensor.device_mesh import core_mesh, default_mesh, whole_group
from shardtensor.modes import gradient_policy
from shardtensor.shard_tensor import ShardTensor
from shardtensor.sync import sync_module_over_mesh, sync_pieces_over_mesh


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    data: str | None = "ddp",
    domain: Sequence[str] = ("domain",),
    *,
    tensor: str | Sequence[str] | None = None,
    new_tensors: bool = True,
    units: Sequence[nn.Module] | None = None,
    **options,
) -> nn.Module:
    """The module, ready for samples that lie on the `domain` axes of `mesh`, the same
    ones along its `tensor` axes, other samples along its other axes:

        model = parallelize(model, mesh, "ddp")           # mesh: data x domain
        x = array.read(sample, mesh["domain"], [Shard(2)])
        model(x).square().mean().backward()

    "ddp" gives DistributedDataParallel over all ranks, "fsdp" applies fully_shard
    over all ranks to `units` (the children with parameters by default) and the
    module, "hsdp" so that each index of the mesh's first axis has a copy, sharded
    over the other axes: their buckets then sum over data and domain at once, beside
    backward.
    None leaves the module as it is: where no axis has other samples. `options` are
    the wrapper's.

    Along `tensor` axes parameters are DTensors, which parallelize_module made before,
    or plain and equal; all ranks are then those of one index there. DDP would hold
    the DTensors' pieces as parameters of their own, of which clip_grad_norm_ sees
    one rank's: an error, "hsdp" has copies, too. For clip_grad_norm_ all parameters
    are DTensors: distribute_module(module, mesh["tensor"]) makes the others so.

    Buffers may be ShardTensors, on the domain; parameters only for None, or frozen ones
    under DDP.

    nn.SyncBatchNorm without a group normalizes over all samples, on CPUs, too.

    Parameters and buffers get the values of the mesh's first rank, DTensors along
    `tensor` those of the first ranks that hold the same piece. Forward runs
    under the gradient policy "deferred", or "coalesced" without a wrapper, and with
    `new_tensors` within new_tensors_on, so that tensors which the model makes to fill
    them (a Fourier layer's modes) stay cut; backward and what checkpoints recompute go
    by the same. Other modules go by their own. What a compiled forward makes is plain.

    The loss of a rank is that of its own samples, a mean for one device's numbers:
    gradients are averaged over data."""
    tensor = (tensor,) if isinstance(tensor, str) else tuple(tensor or ())
    told = data, domain, tensor, new_tensors
    units = _agree_on(module, mesh, told, units, options)
    core_mesh(mesh)
    samples = _without(mesh, tensor)
    if data != "ddp" or tensor:  # DDP broadcasts by itself, over its own ranks
        _make_equal(module, mesh, samples)
    _let_norms_meet(module, samples)
    policy = "deferred" if data else "coalesced"
    modes = [functools.partial(gradient_policy, policy)]
    if new_tensors:
        make = functools.partial(new_tensors_on, mesh[tuple(domain)])
        cut = data in _MESHES_OF_FSDP
        modes.append(functools.partial(_unless_compiled, make) if cut else make)
    _enter_around_forward(module, modes)
    if data == "ddp":
        _leave_pieces_out(module)
        return _Ddp(module, process_group=whole_group(samples), **options)
    if data in _MESHES_OF_FSDP:
        over = _MESHES_OF_FSDP[data](samples)
        _shard(module, over, units, options)
        if over != mesh[tuple(domain)]:
            _note_cut(module, over)
    return module


def _unless_compiled(mode):
    """FSDP's hooks cut a compiled forward into parts, of which the compiler traces none
    within a mode."""
    compiler = torch._C._dynamo.eval_frame  # asked without importing torch._dynamo
    if torch.compiler.is_compiling() or compiler.get_eval_frame_callback() is not None:
        return contextlib.nullcontext()
    return mode()


def _agree_on(module, mesh, told, units, options):
    """The units. All ranks get the same, or raise the same."""
    error = state = None
    data, domain, tensor, new_tensors = told
    try:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module: expected a module, got {module!r}")
        _check_axes(mesh, data, domain, tensor)
        _check_values(module)
        if data == "ddp" and tensor:
            _check_plain(module)
        if data:
            _check_no_pieces(module, data)
        units = None if units is None else [*units]
        told = data, tuple(domain), tensor, bool(new_tensors)
        told = *told, _names_in(module, units), _texts_of(options)
        state = [*module.named_parameters(), *module.named_buffers()]
        state = [f"{name} {x.dtype} {[*x.shape]}" for name, x in state]
    except Exception as problem:  # noqa: BLE001  whatever it is, all must know
        error = problem
    agree(mesh, error, (told, state), "parallelize: ")
    return units


_OF_ONE_RANK = ("device_ids", "output_device")  # of DDP: each rank's own


def _names_in(module, units):
    if units is None:
        return None
    names = {part: name for name, part in module.named_modules()}
    if strangers := [unit for unit in units if unit not in names]:
        raise ValueError(
            f"units: expected modules of {type(module).__name__}, got {strangers[0]}"
        )
    return [names[unit] for unit in units]


def _texts_of(options):
    """The same on ranks that have the same; of objects, which are a rank's own, the
    kinds."""
    plain = type(None), bool, int, float, str
    return {
        key: repr(value)
        if isinstance(value, plain) or dataclasses.is_dataclass(value)
        else type(value).__name__
        for key, value in sorted(options.items())
        if key not in _OF_ONE_RANK
    }


def _check_axes(mesh, data, domain, tensor):
    names = list(mesh.mesh_dim_names or ())
    for what, axes in (("domain", domain), ("tensor", tensor)):
        if any(name not in names for name in axes):
            raise ValueError(f"{what}: expected axes of {names}, got {tuple(axes)}")
    if not domain:
        raise ValueError(f"domain: expected axes of {names}, got {tuple(domain)}")
    if both := [name for name in tensor if name in domain]:
        raise ValueError(f"tensor: the axes {both} are the domain's, expected others")
    if data not in ("ddp", *_MESHES_OF_FSDP, None):
        raise ValueError(f'data: expected "ddp", "fsdp", "hsdp" or None, got {data!r}')
    others = [
        n
        for n, size in zip(names, mesh.mesh.shape, strict=True)
        if n not in domain and n not in tensor and size > 1
    ]
    if data is None and others:
        raise ValueError(
            f'data: the axes {others} have other samples, expected "ddp", "fsdp" or '
            '"hsdp", got None'
        )


def _check_values(module):
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if x.is_meta:
            raise ValueError(
                f"module: {name} is on meta, without values, expected values: "
                "to_empty() gives it memory, load_state_dict() or init what is in it"
            )


def _check_plain(module):
    cut = [name for name, p in module.named_parameters() if hasattr(p, "placements")]
    if cut:
        raise ValueError(
            f'data: {cut[0]} is a DTensor, of which "ddp" would train each piece as a '
            'parameter of its own, expected "fsdp" or "hsdp"'
        )


def _check_no_pieces(module, data):
    """A wrapper takes a parameter for the same on all ranks, or for its own to cut;
    DDP leaves out what it does not train."""
    for name, x in module.named_parameters():
        left_out = data == "ddp" and not x.requires_grad
        if isinstance(x, ShardTensor) and not left_out:
            raise ValueError(
                f'data: {name} is a ShardTensor, of which "{data}" would mix pieces '
                "of different ranks, expected None, or a parameter that is the same on "
                "all ranks"
            )


def _leave_pieces_out(module):
    """DDP would send buffers and frozen parameters that are cut to all ranks."""
    state = *module.named_parameters(), *module.named_buffers()
    names = [name for name, x in state if isinstance(x, ShardTensor)]
    ignore = nn.parallel.DistributedDataParallel
    ignore._set_params_and_buffers_to_ignore_for_model(module, names)


def _without(mesh, axes):
    """The sub-mesh of the other axes."""
    rest = tuple(name for name in mesh.mesh_dim_names if name not in axes)
    return mesh[rest] if axes else mesh


def _make_equal(module, mesh, samples):
    state = [*module.parameters(), *module.buffers()]
    if samples is not mesh and any(hasattr(x, "placements") for x in state):
        sync_pieces_over_mesh(module, _flat(samples))
        state = [x for x in state if not hasattr(x, "placements")]
    if state:
        sync_module_over_mesh(module, _flat(mesh))


class _Ddp(nn.parallel.DistributedDataParallel):
    def _passing_sync_batchnorm_handle(self, module):
        """SyncBatchNorm works with ShardTensors on CPUs, too."""


def _let_norms_meet(module, samples):
    """Over all samples, unless a program has chosen a group. Which copies of the
    module, averages for one, take for their own."""
    dist.ProcessGroup.__deepcopy__ = lambda group, _: group
    for layer in module.modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.process_group is None:
            layer.process_group = whole_group(samples)


def _flat(mesh):
    """All ranks along one axis."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


def _copies_by_shards(mesh):
    """The first axis, and all others along one."""
    if mesh.ndim < 2:
        raise ValueError(f'data: "hsdp" needs a mesh of 2 axes or more, got {mesh}')
    if mesh.ndim == 2:
        return mesh
    copies, *others = mesh.mesh_dim_names
    shards = mesh[tuple(others)]._flatten()
    return mesh._get_root_mesh()[(copies, *shards.mesh_dim_names)]


# What fully_shard gets, of a mesh of all that have samples.
_MESHES_OF_FSDP = {"fsdp": _flat, "hsdp": _copies_by_shards}


def _shard(module, mesh, units, options):
    from torch.distributed.fsdp import fully_shard

    for unit in _closed(_children(module) if units is None else units, module):
        fully_shard(unit, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)


def _closed(units, module):
    """Those with parameters, none of which lies outside, too: FSDP has each in one
    unit, that around all of its modules."""
    ways = Counter(m for _, m in module.named_modules(remove_duplicate=False))
    held = Counter(p for _, p in module.named_parameters(remove_duplicate=False))
    return [unit for unit in units if _is_closed(unit, ways, held)]


def _is_closed(unit, ways, held):
    own = Counter(p for _, p in unit.named_parameters(remove_duplicate=False))
    alone = all(held[p] == ways[unit] * count for p, count in own.items())
    return bool(own) and alone


def _note_cut(module, mesh):
    from shardtensor.dtensor import note_cut_by_fsdp

    cut = [p for p in module.parameters() if hasattr(p, "placements")]
    note_cut_by_fsdp(mesh, cut)


def _children(module):
    """Those of a container without a forward in its place, for fully_shard has none."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _children(child)
        else:
            yield child


class _Around:
    """The hooks of a forward that runs within modes. A copy of the module has its own,
    of the same modes."""

    def __init__(self, modes):
        self.modes = modes
        self._entered = threading.local()

    def __deepcopy__(self, memo):
        return _Around(self.modes)

    def enter(self, *_):
        stack = contextlib.ExitStack()
        for mode in self.modes:
            stack.enter_context(mode())
        self._entered.stack = [*getattr(self._entered, "stack", ()), stack]

    def leave(self, *_):
        self._entered.stack.pop().close()


def _enter_around_forward(module, modes):
    """A later call takes an earlier one's place."""
    hold_in_checkpoints()
    hooks = module._forward_pre_hooks.values()
    around = next(filter(None, map(_around_of, hooks)), None)
    if around is None:
        around = _Around(modes)
        module.register_forward_pre_hook(around.enter, prepend=True)
        module.register_forward_hook(around.leave, always_call=True)
    around.modes = modes


def _around_of(hook):
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, _Around) else None


# ---- drift ------------------------------------------------------------------


def check_replicas(module: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Raises on all ranks, with names, where a parameter or buffer is not the same,
    bit for bit, on all ranks of `mesh` that hold the same piece of it. Default:
    DistributedManager's mesh. Communication: a small reduction, a gather of
    a digest for each."""
    mesh = default_mesh() if mesh is None else mesh
    state: dict[str, torch.Tensor] = {}
    mine = error = None
    try:
        if not isinstance(module, nn.Module):
            raise TypeError(f"check_replicas: expected a module, got {module!r}")
        state = dict([*module.named_parameters(), *module.named_buffers()])
        mine = [(_digest(x), _piece(x)) for x in state.values()]
    except Exception as problem:  # noqa: BLE001  whatever it is, all must know
        error = problem
    everyone = gather(mesh, error, mine, "check_replicas: ")
    counts = [len(rows) for rows in everyone]
    if len({*counts}) > 1:
        raise RuntimeError(
            f"check_replicas: the ranks have {counts} parameters and buffers"
        )
    problems = _differences(list(state), everyone)
    if problems:
        raise RuntimeError("check_replicas: replicas differ\n" + "\n".join(problems))


def _differences(names, rows):
    problems = []
    for index, name in enumerate(names):
        seen: dict[int, tuple[int, int]] = {}
        for rank, row in enumerate(rows):
            digest, piece = row[index]
            first = seen.setdefault(piece, (digest, rank))
            if first[0] != digest:
                problems.append(f"{name}: mesh ranks {first[1]} and {rank}")
                break
    return problems


def _local(x):
    if isinstance(x, ShardTensor):
        return _C.local(x)
    return x.to_local() if hasattr(x, "to_local") else x


def _digest(x):
    local = _local(x).detach().cpu().contiguous()
    told = hashlib.blake2b(repr((local.shape, local.dtype)).encode(), digest_size=8)
    told.update(local.view(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(told.digest(), "little", signed=True)


def _piece(x):
    """A number for which piece of x this rank holds."""
    if not hasattr(x, "placements"):
        return 0
    number = 0
    mesh = x.device_mesh
    for axis, placement in enumerate(x.placements):
        place = 0 if placement.is_replicate() else mesh.get_local_rank(axis)
        number = number * mesh.size(axis) + place
    return number
