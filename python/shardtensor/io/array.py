"""Arrays in files, of which each rank reads its piece."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.agree import agree, gather
from shardtensor.create import scatter_tensor
from shardtensor.device_mesh import core_mesh, default_mesh, device_of, whole_group
from shardtensor.halo import halo_exchange
from shardtensor.io import boxes, cf
from shardtensor.io.sources import Path, Source, is_counted_together, open_source
from shardtensor.io.sources.joined import JoinedTimes
from shardtensor.placements import check_placements, replicated
from shardtensor.shard_tensor import ShardTensor
from shardtensor.spec import ShardTensorSpec, Sizes, make_spec

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# What hold numbers that float32 does not: unpacked in float64.
_WIDE = (
    torch.float64, torch.complex128, torch.int32, torch.int64, torch.uint32,
    torch.uint64,
)  # fmt: skip


def open(  # noqa: A001  the name that such functions have everywhere
    path: Path,
    variable: str | None = None,
    *,
    mesh: DeviceMesh | None = None,
    decode: bool = True,
    dtype: torch.dtype | None = None,
) -> Array:
    """An array in a file: HDF5, NetCDF, Zarr, .npy, NIfTI, meshes or tables of
    numbers as text, by the end of its name. `variable` is its path in the file
    ("group/t2m"), not needed where there is one only. Several files, a list or a
    pattern ("era5_*.nc"), follow each other along the first dim. `decode` applies
    CF's scale, offset and missing values (NaN), each file's its own; `dtype`
    converts, and float64 unpacks in float64.

    Nothing is opened before it is needed, and an error is raised by what needs it.
    With a `mesh` the file is opened at once, and the error of one of its ranks is
    raised on all of them."""
    array = Array(path, variable, decode=decode, dtype=dtype)
    if mesh is not None:
        core_mesh(mesh)
        array._agree_to_open(mesh)
    return array


class Array:
    """A variable of a file: shape, dtype, chunks, dims, attributes, coordinates.

        array = shardtensor.io.open("era5.zarr", "t2m")
        array[0, :10]                                     # a plain tensor
        array.read((0,), mesh, [Shard(0)])                # each rank its rows

    It can be sent to other processes, which open the file for themselves.

    Thread safety / ordering: `read` and `open(mesh=...)` communicate, everything
    else is this rank's own."""

    def __init__(
        self,
        path: Path,
        variable: str | None = None,
        *,
        decode: bool = True,
        dtype: torch.dtype | None = None,
    ):
        self.path = path
        self.variable = variable
        self._decode = decode
        self._dtype = dtype
        self._rounds: list[list] | None = None  # what all ranks have counted

    # ---- what the file says -------------------------------------------------

    @functools.cached_property
    def _opened(self):
        with explaining("open", self._name):
            return open_source(self.path, self.variable)

    @functools.cached_property
    def _source(self):
        source = self._opened
        with explaining("open", self._name):
            for counts in self._rounds or ():
                if not source.counted:
                    source.found(counts)
            while not source.counted:
                source.found([source.count(0, 1)])
            if source.dtype.kind not in "biufc":
                raise TypeError(f"expected numbers, the file holds {source.dtype}")
            _check_conversion(_torch_dtype(source, self._decode), self._dtype)
            return source

    def _count_together(self, mesh, what=None):
        """Where a shape is known after counting only, each rank counts a part."""
        core_mesh(mesh)
        what = what or self._name
        if self._rounds is not None or not self._is_counted_together(mesh, what):
            return
        group = whole_group(mesh)
        rounds: list[list] = []
        source: Source | None = None
        while True:
            mine = problem = None
            try:
                source = source or open_source(self.path, self.variable)
                if rounds and not source.counted:
                    source.found(rounds[-1])
                if not source.counted:
                    mine = source.count(group.rank(), group.size())
            except Exception as error:  # noqa: BLE001  whatever it is, all must know
                problem = explained("open", what, error)
            found = source is None or source.counted, mine
            told = gather(mesh, problem, found, title("open", what))
            if all(is_counted for is_counted, _ in told):
                break
            rounds.append([counts for _, counts in told])
        self.close()
        self._rounds, self._opened = rounds, source

    def _is_counted_together(self, mesh, what):
        try:
            return is_counted_together(self.path)
        except Exception as error:  # noqa: BLE001  whatever it is, all must know
            # Whether the others count or not, they agree on something next.
            agree(mesh, explained("open", what, error))

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._source.shape)

    @property
    def ndim(self) -> int:
        return len(self._source.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is read."""
        if self._dtype is not None:
            return self._dtype
        return _torch_dtype(self._source, self._decode)

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """The sizes of a chunk; None where the file has none."""
        return self._source.chunks

    @property
    def dims(self) -> tuple[str | None, ...] | None:
        """The names of the dims, where the file has any; None for a dim without."""
        return self._source.dims

    @property
    def attributes(self) -> dict:
        """Of several files those that all have alike."""
        return dict(self._source.attributes)

    @functools.cached_property
    def coordinates(self) -> dict[str, numpy.ndarray]:
        """The coordinates of each dim that has some, and those that CF's attribute
        "coordinates" names (of several dims, or of none); times as datetime64, or as
        cftime's objects in calendars that NumPy does not know. Missing ones are NaT
        or None. Where a unit or its date is none, the numbers."""
        found = {}
        named = str(self.attributes.get("coordinates", "")).split()
        for name in dict.fromkeys([*filter(None, self.dims or ()), *named]):
            with explaining("read", f"{self._name}, coordinate {name}"):
                source = self._source.beside(name)
                if source is not None:
                    found[name] = _coordinate(source)
        return found

    def chunk_sizes(self, dim: int, pieces: int, index: object = ...) -> list[int]:
        """Sizes for `read`, cut at the borders of chunks as evenly as they allow, so
        that each chunk is decoded by one rank. `dim` is one of the result's."""
        rows, kept = boxes.selected(index, self.shape)
        dim = kept[dim]
        return boxes.chunk_sizes(rows[dim], self._source.chunk_begins(dim), pieces)

    def close(self) -> None:
        """Lets go of the file, which is opened again when needed. HDF5 and NetCDF
        files that somebody reads cannot be written."""
        self.__dict__.pop("_source", None)
        if "_opened" in self.__dict__:
            self.__dict__.pop("_opened").close()

    def __getstate__(self) -> dict:
        """Without the file, which another process opens for itself."""
        kept = dict(self.__dict__)
        for name in ("_opened", "_source"):
            kept.pop(name, None)
        return kept

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError(f"{self._name} has no dims, and so no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Array({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    # ---- reading ------------------------------------------------------------

    def __getitem__(self, index: object) -> torch.Tensor:
        """A plain tensor, read by this rank alone."""
        return self._begin(index)()

    def _begin(
        self, index: object, dtype: torch.dtype | None = None
    ) -> Callable[[], torch.Tensor]:
        """Asks for what `array[index]` is, of another dtype if one is given; the
        call waits for it. Boxes that are asked for together are read side by side
        where the format can."""
        try:
            rows, kept = boxes.selected(index, self.shape)
        except Exception as error:
            raise self._explained("index", index, error) from error
        return self._begin_box(rows, kept, dtype)

    def read(
        self,
        index: object = ...,
        mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        sizes: Sizes | str | None = None,
        halo: boxes.Halo | None = None,
    ) -> ShardTensor | tuple[ShardTensor, torch.Tensor]:
        """A ShardTensor of what `index` selects, cut as `placements` and `sizes`
        say (see make_spec), by default the whole on every rank; each rank reads its
        own box. sizes="chunks" cuts at the borders of chunks.

        With a `halo` (rows on both sides of every sharded dim, a pair (before,
        after), or a dict by dim) the result is (tensor, ghosts): ghosts, plain, is
        this rank's piece with its ghost rows, what halo_exchange(tensor, halo)
        gives, of empty pieces, too, and the tensor's piece is a view of it. All
        is read once.

        What goes wrong on one rank is an error on all of them. Communication: one
        small reduction; a small gather at the first read of lines of text and of
        meshes, where each rank counts a part of the file; and of a mesh that is read as
        a whole the rows."""
        mesh = default_mesh() if mesh is None else mesh
        core_mesh(mesh)  # may make a group, with all ranks
        self._count_together(mesh, self._name + print_box(index))
        told = spec = local = problem = None
        try:
            told = self.shape, self.dtype, index, self._source.whole
            rows, kept = boxes.selected(index, self.shape)
            spec = self._spec(rows, kept, mesh, placements, sizes)
            told = *told, repr(spec._core), halo
            wanted = boxes.widened(spec, 0 if halo is None else halo)
            if not self._source.whole:
                local = self._begin_box(boxes.within(rows, kept, wanted), kept)()
        except Exception as error:  # noqa: BLE001  whatever it is, all must know
            problem = self._explained("read", index, error)
        agree(mesh, problem, told, title("read", self._name))
        if self._source.whole:
            return self._scatter(rows, kept, spec, halo)
        return _finish(local.to(device_of(mesh)), spec, wanted, halo is not None)

    def _spec(self, rows, kept, mesh, placements, sizes) -> ShardTensorSpec:
        if placements is None:
            placements = replicated(mesh.ndim)
        placements = check_placements(placements, mesh.ndim)
        shape = [len(rows[dim]) for dim in kept]
        if not all(p.is_shard() or p.is_replicate() for p in placements):
            raise ValueError(f"expected Shard and Replicate, got {placements}")
        if isinstance(sizes, str):
            if sizes != "chunks":
                raise ValueError(
                    f'sizes: expected piece sizes or "chunks", got {sizes!r}'
                )
            sizes = self._aligned(rows, kept, mesh, placements)
        return make_spec(mesh, shape, placements, sizes)

    def _aligned(self, rows, kept, mesh, placements):
        pieces: dict[int, int] = {}
        for axis, placement in enumerate(placements):
            if placement.is_shard():
                dim = placement.dim % max(len(kept), 1)
                pieces[dim] = pieces.get(dim, 1) * mesh.size(axis)
        return {
            dim: boxes.chunk_sizes(
                rows[kept[dim]], self._source.chunk_begins(kept[dim]), count
            )
            for dim, count in pieces.items()
        }

    def _begin_box(self, rows: list[range], kept: list[int], dtype=None):
        """Of the file's dims, those in `kept` stay."""
        shape = [len(rows[dim]) for dim in kept]
        dtype = dtype or self.dtype
        if not all(map(len, rows)):
            return functools.partial(torch.empty, shape, dtype=dtype, device="cpu")
        box = tuple(map(boxes.as_slice, rows))
        what = f"{self._name}{print_box(box)}"
        with explaining("read", what):
            source = self._source
            if self._decode:
                begun = source.begin_values(box, dtype in _WIDE)
            else:
                begun = source.begin(box)
        return functools.partial(self._wait, begun, what, shape, dtype)

    def _wait(self, begun, what, shape, dtype) -> torch.Tensor:
        with explaining("read", what):
            values = begun()
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        values = numpy.require(values, requirements=["C", "W"]).reshape(shape)
        return torch.from_numpy(values).to(dtype)

    def _scatter(self, rows, kept, spec, halo):
        """For files that can only be read whole: the first rank does."""
        first = int(spec.mesh.mesh.flatten()[0])
        whole = problem = None
        try:
            if torch.distributed.get_rank() == first:
                whole = self._begin_box(rows, kept)()
        except Exception as error:  # noqa: BLE001
            problem = error
        agree(spec.mesh, problem)
        x = scatter_tensor(whole, first, spec.mesh, spec.placements, sizes=spec.sizes())
        return x if halo is None else (x, halo_exchange(x, halo))

    # ---- errors -------------------------------------------------------------

    @property
    def _name(self) -> str:
        return str(self.path) + (f" variable {self.variable}" if self.variable else "")

    def _explained(self, verb, index, error):
        """Also of a file that cannot be opened: what of it is wanted."""
        begin, text = title("open", self._name), str(error)
        if not text.startswith(begin):
            return explained(verb, self._name, error)
        what = self._name + print_box(index)
        return type(error)(title("open", what) + text.removeprefix(begin))

    def _agree_to_open(self, mesh):
        self._count_together(mesh)
        problem = told = None
        try:
            told = self.shape, self.dtype, self.chunks
        except Exception as error:  # noqa: BLE001  whatever it is, all must know
            problem = explained("open", self._name, error)
        agree(mesh, problem, told, title("open", self._name))


def _finish(read, spec, wanted, with_ghosts):
    own = read
    for dim, (rows, all_rows) in enumerate(
        zip(boxes.own_rows(spec), wanted, strict=True)
    ):
        own = own.narrow(dim, rows.start - all_rows.start, len(rows))
    tensor = ShardTensor.from_spec(own, spec)
    return (tensor, read) if with_ghosts else tensor


def _torch_dtype(source, decode):
    read = source.value_dtype if decode else source.dtype.newbyteorder("=")
    try:
        return torch.from_numpy(numpy.empty(0, read)).dtype
    except TypeError:
        raise TypeError(f"expected numbers of PyTorch's, got {read}") from None


def _check_conversion(found, dtype):
    if dtype is not None and found.is_complex and not dtype.is_complex:
        raise TypeError(f"expected a complex dtype for {found}, got {dtype}")


def _coordinate(source, kinds="MO"):
    """Of these kinds, where it is times: NumPy's, or cftime's objects. Of several
    files all are of one kind, numbers where one file's are no times."""
    if isinstance(source, JoinedTimes):
        parts = [_coordinate(part, kinds) for part in source.parts]
        found = {part.dtype.kind for part in parts}
        if len(found) > 1 and found & {"M", "O"}:
            return _coordinate(source, "O" if found == {"M", "O"} else "")
        return numpy.concatenate(parts)
    stored = source.begin(tuple(slice(0, extent) for extent in source.shape))()
    stored = numpy.atleast_1d(stored)  # NumPy makes other things of one number
    found = None
    if kinds:
        told = source.attributes, source.decoding
        found = cf.times(stored, *told, objects="M" not in kinds)
    found = source.decoding(stored) if found is None else found
    return found.reshape(source.shape)


_OURS = (ImportError, IndexError, OSError, TypeError, ValueError)


@contextlib.contextmanager
def explaining(verb: str, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise explained(verb, what, error) from error


def explained(verb: str, what: str, error: Exception) -> Exception:
    """The same kind of error, with the name of the file."""
    text = str(error) or type(error).__name__
    if "shardtensor.io: cannot" in text:
        return error
    kind = next((k for k in _OURS if isinstance(error, k)), OSError)
    return kind(title(verb, what) + text)


def title(verb: str, what: str) -> str:
    return f"shardtensor.io: cannot {verb} {what}: "


def print_box(index: object) -> str:
    """Of a box, or of what a user asks for."""
    parts = index if isinstance(index, tuple) else (index,)
    return f"[{', '.join(map(_print_part, parts))}]"


def _print_part(part):
    if not isinstance(part, slice):
        return "..." if part is Ellipsis else repr(part)
    numbers = [part.start, part.stop, *([part.step] * (part.step not in (1, None)))]
    return ":".join("" if n is None else str(n) for n in numbers)
