"""Files that all ranks write."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.agree import agree
from shardtensor.device_mesh import core_mesh, default_mesh
from shardtensor.io import boxes
from shardtensor.io.array import explained, print_box, title
from shardtensor.io.sources import format_of
from shardtensor.io.sources.source import WritableFormat
from shardtensor.shard_tensor import ShardTensor

_NAMELESS = "data"  # of a variable in a file that must name it


def create(
    path: str | os.PathLike,
    variable: str | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
    *,
    chunks: Sequence[int] | None = None,
    dims: Sequence[str] | None = None,
    attributes: Mapping | None = None,
    **options,
) -> None:
    """Makes a variable in a file (Zarr, HDF5, NetCDF, .npy), to be filled by `write`
    piece by piece. Other variables of the file stay, and so do all where this one is
    refused, as it is where a group of this name holds any; a variable of this name is
    replaced, in NetCDF one of the same shape taken as it is. What nobody writes is
    the format's fill value. `options`: zarr_format, 2 or 3. One rank does it; an
    error is raised on all. Communication: one small reduction."""
    mesh = default_mesh() if mesh is None else mesh
    core_mesh(mesh)
    told = problem = None
    try:
        name = _path(path)
        chunks = None if chunks is None else tuple(map(int, chunks))
        told = variable, tuple(shape), dtype, chunks
        if mesh.get_coordinate() is not None and not any(mesh.get_coordinate()):
            numpy_dtype = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
            what = name, _in_file(name, variable), tuple(shape), numpy_dtype, chunks
            _writer(name).create(*what, dims, dict(attributes or {}), **options)
    except Exception as error:  # noqa: BLE001  whatever it is, all must know
        problem = explained("create", _title(path, variable), error)
    agree(mesh, problem, told, title("create", _title(path, variable)))


def write(
    path: str | os.PathLike,
    tensor: ShardTensor,
    variable: str | None = None,
    *,
    index: object = None,
    **options,
) -> None:
    """Writes a ShardTensor; each rank its piece, a replicated one once. Into a new
    variable, `options` as in `create`; or with an `index` into that part of one
    that is there: `write(path, x, "t2m", index=(step,))`.

    The ranks write at once where chunks are files (Zarr) or pages (.npy), in turn
    where one process may write at a time (HDF5, NetCDF). Chunks that two ranks share
    are sent to one of them before. What goes wrong is one error on all ranks.
    Communication: small reductions; the rows of shared chunks."""
    if not isinstance(tensor, ShardTensor):
        raise TypeError(f"write: expected a ShardTensor, got {type(tensor).__name__}")
    mesh = tensor.device_mesh
    if index is not None and options:
        told = ", ".join(options)
        agree(mesh, TypeError(f"write: {told} belong to a new variable"))
    if index is None:
        shape = tuple(tensor.shape)
        create(path, variable, shape, tensor.dtype, mesh, **options)
        index = ...
    problem = where = told = None
    try:
        where = _Target(_path(path), variable, index, tensor)
        told = index, where.rows, where.chunks, where.format.__name__
    except Exception as error:  # noqa: BLE001
        problem = explained("write", _title(path, variable), error)
    agree(mesh, problem, told, title("write", _title(path, variable)))
    pieces = _at_chunks(tensor, where)
    if where.format.one_writer_at_a_time:
        for position in range(mesh.size()):
            _write_piece(pieces, where, pieces._core.mesh.position == position)
    else:
        _write_piece(pieces, where, True)


class _Target:
    """Where the rows of a tensor are in a file."""

    def __init__(self, name, variable, index, tensor):
        self.name, self.variable = name, _in_file(name, variable)
        self.format = _writer(name)
        source = self.format.open_source(name, self.variable)
        self.rows, self.kept = boxes.selected(index, source.shape)
        self.chunks = source.chunks
        self.begins = [source.chunk_begins(dim) for dim in range(len(source.shape))]
        self.dtype = source.dtype
        self.decoding = source.decoding
        source.close()
        found = tuple(len(self.rows[dim]) for dim in self.kept)
        if found != tuple(tensor.shape):
            raise ValueError(f"the tensor has shape {tuple(tensor.shape)}, not {found}")

    def box(self, wanted: Sequence[range]) -> tuple[slice, ...]:
        return tuple(map(boxes.as_slice, boxes.within(self.rows, self.kept, wanted)))


def _at_chunks(tensor, where):
    """Cut at the borders of chunks, sums made."""
    from torch.distributed.tensor import Replicate

    spec = tensor._spec
    whole = [Replicate() if p.is_partial() else p for p in spec.placements]
    sizes = {}
    for dim in range(tensor.dim()):
        if not spec.is_sharded(dim):
            continue
        pieces, file_dim = spec.partition(dim).pieces, where.kept[dim]
        rows, begins = where.rows[file_dim], where.begins[file_dim]
        at_once = not where.format.one_writer_at_a_time
        if where.chunks is not None and at_once:
            sizes[dim] = boxes.chunk_sizes(rows, begins, pieces)
        elif spec.partition(dim).repeat != 1:
            sizes[dim] = boxes.chunk_sizes(rows, range(rows.stop), pieces)
    with torch.no_grad():
        return tensor.detach().redistribute(placements=whole, sizes=sizes or None)


def _write_piece(tensor, where, is_my_turn):
    problem, what = None, _title(where.name, where.variable)
    try:
        wanted = boxes.own_rows(tensor._spec)
        if is_my_turn and _is_first(tensor) and all(map(len, wanted)):
            box = where.box(wanted)
            what += print_box(box)
            local = tensor.to_local().resolve_conj().resolve_neg()
            values = local.cpu().contiguous().numpy()
            shape = [len(range(*part.indices(part.stop))) for part in box]
            values = where.decoding.encode(values, where.dtype).reshape(shape)
            where.format.write_box(where.name, where.variable, box, values)
    except Exception as error:  # noqa: BLE001
        problem = explained("write", what, error)
    agree(tensor.device_mesh, problem)


def _is_first(tensor):
    """Of the ranks with the same piece, one writes."""
    coordinate = tensor.device_mesh.get_coordinate()
    return not any(
        place
        for place, placement in zip(coordinate, tensor.placements, strict=True)
        if placement.is_replicate()
    )


def _writer(name) -> WritableFormat:
    found = format_of(name)
    if not hasattr(found, "write_box"):
        raise ValueError(
            "this kind of file is read only; expected Zarr, HDF5, NetCDF or .npy"
        )
    return found


def _in_file(name, variable):
    """HDF5 and NetCDF have no variable without a name."""
    if variable is None and _writer(name).one_writer_at_a_time:
        return _NAMELESS
    return variable


def _path(path):
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"expected a path, got {path!r}")
    return os.fspath(path)


def _title(name, variable):
    return str(name) + (f" variable {variable}" if variable else "")
