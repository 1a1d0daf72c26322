"""Everything about a ShardTensor but its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C
from shardtensor.device_mesh import core_mesh, device_mesh, find_mesh
from shardtensor.infer import ShapesAlongAxes, errors_while_asking, infer_layout
from shardtensor.placements import check_placements, from_core, to_core

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    from shardtensor.placements import Placements

# Piece sizes: {tensor dim: [5, 3, 2]}, or just [5, 3, 2] where one dim is cut.
# A dim's may also be another spec's partition, which may be repeated.
Sizes = Mapping[int, Sequence[int] | _C.Partition] | Sequence[int]


class ShardTensorSpec:
    """Mesh, placements, global shape and the cut of every sharded dim; every
    rank's piece is known without communication. Immutable.

        spec = make_spec(mesh, (10, 4), [Shard(0)], sizes=[6, 4])
        spec.local_shape      # (6, 4) on rank 0, (4, 4) on rank 1
        spec.offsets()        # (0,) on rank 0, (6,) on rank 1
        spec.sharding_shapes()  # {0: ((6, 4), (4, 4))}

    PhysicsNeMo's form is taken, too: ShardTensorSpec(mesh=..., placements=...,
    tensor_meta=..., _local_shape=..., _sharding_shapes=...). Without the last, which
    are as sharding_shapes() gives them, and where two axes cut one dim, of which those
    say too little, the ranks ask each other for their local shapes (one small gather);
    without either it is an OpenSpec.
    """

    __slots__ = ("_core", "_meta", "_settings")

    def __new__(cls, core=None, meta=None, **told):
        if core is None and not _tells_pieces(**told):
            return OpenSpec(**told)
        return super().__new__(cls)

    def __init__(
        self,
        core: _C.ShardSpec | None = None,
        meta: TensorMeta | None = None,
        **told,
    ):
        self._core = _layout_of(**told) if core is None else core
        self._meta = told.get("tensor_meta", meta)
        self._settings = None  # that a graph keeps, see ShardTensor.__tensor_flatten__

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks that hold the pieces."""
        return device_mesh(self._core.mesh)

    device_mesh = mesh

    @property
    def placements(self) -> Placements:
        """One for each mesh axis; dims are counted from the front."""
        return tuple(map(from_core, self._core.placements))

    @property
    def shape(self) -> torch.Size:
        """The whole tensor's."""
        return torch.Size(self._core.sizes)

    @property
    def ndim(self) -> int:
        """The number of the tensor's dims."""
        return len(self._core.sizes)

    @property
    def tensor_meta(self) -> TensorMeta | None:
        """Shape, stride and dtype; None for a spec that no tensor has yet."""
        return self._meta

    @property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's shard."""
        return torch.Size(self._core.local_sizes(self._position))

    @local_shape.setter
    def local_shape(self, shape: torch.Size) -> None:
        _check_size(shape)
        if shape != self.local_shape:
            raise ValueError(
                f"local_shape: this rank's piece has {tuple(self.local_shape)}, not "
                f"{tuple(shape)}; make a spec with make_spec or from_local"
            )

    @property
    def _local_shape(self) -> torch.Size:
        return self.local_shape

    def sharding_shapes(
        self, mesh_dim: int | None = None
    ) -> dict[int, tuple[torch.Size, ...]] | tuple[torch.Size, ...]:
        """For each mesh axis that shards a dim, the local shapes of the ranks
        along that axis, with this rank's coordinates on the other axes."""
        if mesh_dim is None:
            return {
                axis: self.sharding_shapes(axis)
                for axis, placement in enumerate(self._core.placements)
                if placement.kind == "shard"
            }
        mesh = self._core.mesh
        return tuple(
            torch.Size(
                self._core.local_sizes(
                    mesh.with_coordinate(self._position, mesh_dim, rank)
                )
            )
            for rank in range(mesh.shape[mesh_dim])
        )

    sharding_sizes = sharding_shapes

    @property
    def _sharding_shapes(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """sharding_shapes() in plain tuples. None may be assigned, which means
        "ask again" to PhysicsNeMo: nothing is to be asked here."""
        known = self.sharding_shapes()
        return {axis: tuple(map(tuple, shapes)) for axis, shapes in known.items()}

    @_sharding_shapes.setter
    def _sharding_shapes(self, shapes):
        if shapes is not None and _in_tuples(shapes) != self._sharding_shapes:
            raise ValueError(
                f"_sharding_shapes: a spec cannot be changed from "
                f"{self._sharding_shapes} to {shapes}; make one with make_spec"
            )

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """For each mesh axis, where this rank's shard begins in the dim that
        the axis shards; 0 where it shards none."""
        if mesh_dim is None:
            return tuple(self.offsets(axis) for axis in range(len(self.placements)))
        placement = self._core.placements[mesh_dim]
        if placement.kind != "shard":
            return 0
        return self._core.interval(placement.dim, self._position)[0]

    def sizes(self) -> dict[int, list[int]]:
        """The piece sizes of each sharded dim, as redistribute takes them."""
        dims = self._core.sharded_dims
        return {dim: self._core.partition(dim).sizes for dim in dims}

    def is_sharded(self, dim: int | None = None) -> bool:
        """Whether any mesh axis cuts the dim (any dim for None). IndexError where
        there is no such dim; 0 is the first, negative ones are not counted."""
        return self._core.is_sharded() if dim is None else self._core.is_sharded(dim)

    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor: no Shard and no Partial."""
        return self._core.is_replicated()

    def partition(self, dim: int) -> _C.Partition:
        """The cut of a sharded dim: sizes, offsets, repeat, period."""
        return self._core.partition(dim)

    def interval(self, dim: int, position: int | None = None) -> tuple[int, int]:
        """What a mesh position (this rank's by default) owns of `dim`, in one
        repetition of its partition: (begin, end)."""
        return self._core.interval(
            dim, self._position if position is None else position
        )

    def without_partial(self) -> ShardTensorSpec:
        """Each Partial made Replicate: the layout of a gradient."""
        return ShardTensorSpec(self._core.without_partial(), self._meta)

    @property
    def _position(self):
        position = self._core.mesh.position
        if position < 0:
            raise RuntimeError(f"this rank is not in {self._core.mesh}")
        return position

    def __eq__(self, other):
        return isinstance(other, ShardTensorSpec) and self._core == other._core

    def __hash__(self):
        return hash(self._core)

    def _stable_hash_for_caching(self) -> str:
        return repr(self._core)

    def __repr__(self):
        return repr(self._core).replace("ShardSpec", "ShardTensorSpec", 1)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        """In plain words, for the same place in an equal mesh."""
        mesh, core = self.mesh, self._core
        return _rebuild_spec, (
            mesh.device_type,
            mesh.mesh.tolist(),
            mesh.mesh_dim_names,
            list(core.sizes),
            [(p.kind, p.dim, p.reduce) for p in core.placements],
            [(p.sizes, p.repeat) if p else None for p in core.partitions],
        )


class OpenSpec:
    """ShardTensorSpec(mesh=..., placements=..., tensor_meta=...) of pieces that nobody
    has told: ShardTensor(local, spec) asks for them."""

    def __init__(
        self,
        *,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        tensor_meta: TensorMeta,
        _local_shape: None = None,
        _sharding_shapes: None = None,
    ):
        self.mesh = self.device_mesh = mesh
        self.placements = check_placements(placements, mesh.ndim)
        self.tensor_meta = tensor_meta
        self._local_shape = None

    @property
    def local_shape(self) -> torch.Size | None:
        """None; set, it is what ShardTensor(local, spec) expects."""
        return self._local_shape

    @local_shape.setter
    def local_shape(self, shape: torch.Size) -> None:
        _check_size(shape)
        self._local_shape = shape

    def of(self, local: torch.Tensor) -> ShardTensorSpec:
        """With this rank's piece. Communication: one small gather."""
        with errors_while_asking(self.mesh, "infer"):
            if not isinstance(local, torch.Tensor):
                raise TypeError(f"ShardTensor: expected a tensor, got {local!r}")
            if self._local_shape not in (None, local.shape):
                raise ValueError(
                    f"ShardTensor: local_shape says {tuple(self._local_shape)}, the "
                    f"tensor has {tuple(local.shape)}"
                )
        return ShardTensorSpec(
            mesh=self.mesh,
            placements=self.placements,
            tensor_meta=self.tensor_meta,
            _local_shape=local.shape,
        )

    def __getattr__(self, name: str):
        raise AttributeError(
            f"ShardTensorSpec: its pieces are not known, so it has no {name!r}; "
            "expected _local_shape or _sharding_shapes, or ShardTensor(local, spec)"
        )

    def __repr__(self):
        told = f"mesh={self.mesh}, placements={self.placements}"
        return f"OpenSpec({told}, tensor_meta={self.tensor_meta})"


def _tells_pieces(_local_shape=None, _sharding_shapes=None, **_) -> bool:
    return _local_shape is not None or _sharding_shapes is not None


def _layout_of(
    *,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    tensor_meta: TensorMeta,
    _local_shape: torch.Size | None = None,
    _sharding_shapes: ShapesAlongAxes | None = None,
) -> _C.ShardSpec:
    """What PhysicsNeMo's form of a spec says."""
    if _local_shape is None:
        _local_shape = _own_shape(mesh, _sharding_shapes, tensor_meta)
    placements = check_placements(placements, mesh.ndim)
    if _cuts_a_dim_twice(placements, len(tensor_meta.shape)):
        _sharding_shapes = None
    options = {"dtype": tensor_meta.dtype, "device": mesh.device_type}
    return infer_layout(
        "ShardTensorSpec",
        torch.empty((), **options).expand(_local_shape),
        mesh,
        placements,
        "infer" if _sharding_shapes is None else _sharding_shapes,
        tensor_meta.shape,
    )


def _cuts_a_dim_twice(placements, ndim):
    dims = [p.dim % max(ndim, 1) for p in placements if p.is_shard()]
    return len({*dims}) < len(dims)


def _own_shape(mesh, sharding_shapes, tensor_meta):
    """Every axis that cuts has this rank's whole shape among those along it, so the
    first says it; without one nothing is cut."""
    for axis, shapes in sharding_shapes.items():
        return torch.Size(shapes[mesh.get_local_rank(axis)])
    return tensor_meta.shape


def _check_size(shape):
    if not isinstance(shape, torch.Size):
        raise TypeError(
            f"local_shape: expected a torch.Size, got a {type(shape).__name__}"
        )


def _in_tuples(shapes):
    return {axis: tuple(map(tuple, along)) for axis, along in shapes.items()}


def _rebuild_spec(device_type, ranks, names, sizes, placements, cuts):
    make = {
        "shard": lambda dim, _: _C.Placement.shard(dim),
        "replicate": lambda *_: _C.Placement.replicate(),
        "partial": lambda _, reduce: _C.Placement.partial(reduce),
    }
    whole = torch.tensor(ranks, device="cpu")
    here = dist.get_world_size() if dist.is_initialized() else 0
    if int(whole.max()) >= here:
        raise RuntimeError(
            f"a ShardTensor of a mesh of ranks {ranks} cannot be loaded in a job of "
            f"{here} ranks; use shardtensor.checkpoint for what another number of "
            "ranks shall load"
        )
    return ShardTensorSpec(
        _C.make_spec(
            core_mesh(find_mesh(device_type, ranks, names)),
            sizes,
            [make[kind](dim, reduce) for kind, dim, reduce in placements],
            [_C.Partition(*cut) if cut else None for cut in cuts],
        )
    )


def make_spec(
    mesh: DeviceMesh,
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Sizes | None = None,
) -> ShardTensorSpec:
    """A layout. `sizes` gives the piece sizes of sharded dims, in mesh order
    (row-major over the axes when several shard one dim); the others are cut as
    torch.chunk would."""
    placements = check_placements(placements, mesh.ndim)
    return ShardTensorSpec(
        _C.make_spec(
            core_mesh(mesh),
            list(shape),
            [to_core(p) for p in placements],
            partitions(placements, len(shape), sizes),
        )
    )


def compute_sharding_shapes_from_chunking_global_shape(
    mesh: DeviceMesh, placements: Sequence[Placement], global_shape: Sequence[int]
) -> dict[int, list[torch.Size]]:
    """For each mesh axis that shards a dim, the local shapes along it where every
    dim is cut as torch.chunk would: what from_local takes as sharding_shapes.
    PhysicsNeMo's name for make_spec(...).sharding_shapes(). No communication."""
    shapes = make_spec(mesh, global_shape, placements).sharding_shapes()
    return {axis: list(along) for axis, along in shapes.items()}


def partitions(
    placements: Placements, ndim: int, sizes: Sizes | None
) -> list[_C.Partition | None]:
    """The core's form of `sizes`: one entry per tensor dim, or none at all."""
    if sizes is None:
        return []
    dims = {p.dim % ndim for p in placements if p.is_shard() and -ndim <= p.dim < ndim}
    if not isinstance(sizes, Mapping):
        if len(dims) != 1:
            raise ValueError(
                f"sizes: a list of piece sizes needs one sharded dim, but "
                f"{placements} shards {len(dims)}; give a dict {{dim: sizes}}"
            )
        sizes = {next(iter(dims)): sizes}
    result: list[_C.Partition | None] = [None] * ndim
    for dim, pieces in sizes.items():
        if not -ndim <= dim < ndim or dim % ndim not in dims:
            raise ValueError(f"sizes: dim {dim} is not sharded by {placements}")
        is_partition = isinstance(pieces, _C.Partition)
        result[dim % ndim] = pieces if is_partition else _C.Partition(list(pieces))
    return result


torch.serialization.add_safe_globals([_rebuild_spec])
