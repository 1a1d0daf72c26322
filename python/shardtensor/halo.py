"""Ghost cells for programs that write their own stencils."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C, _ops, traced
from shardtensor.agree import errors_on_all_ranks
from shardtensor.device_mesh import check_axis, group_along
from shardtensor.distributed.autograd import check_local, number
from shardtensor.shard_tensor import ShardTensor


@traced.one_node
def halo_exchange(
    x, width, dims=None, boundary="none", *, vector=False, pole_rows=False
):
    """This rank's shard of `x` with its ghost cells, a plain tensor.

    `width` is the number of ghost cells: one number for both sides, a pair
    (before, after), or a dict from dim to either. `dims` are the dims that get
    them, by default every sharded one. Beyond the ends of the domain stands
    what `boundary` says: "zeros", "periodic", "reflect" or "replicate"; with
    "none" nothing does, and the shards at the ends get fewer rows. "sphere" is for
    two dims, latitude and longitude (by default the last two), which go on around
    the sphere; `vector` and `pole_rows` are those of nn.functional.pad_sphere, and
    widths are the same on both sides.

    Differentiable to any order: the gradient of a ghost cell is added where
    the cell came from. Communication: one message per rank that has ghost
    cells of ours, corners included.

        u = halo_exchange(x, 1, boundary="periodic")  # x cut along dim 0
        laplacian = u[2:] - 2 * u[1:-1] + u[:-2]      # this rank's rows
    """
    if boundary == "sphere":
        widths = _widths_on_sphere("halo_exchange", width, dims)
        return _C.halo_exchange_on_sphere(x, *widths, vector, pole_rows)
    return _C.halo_exchange(x, _widths(x, width, dims), boundary)


def _widths_on_sphere(what, width, dims):
    """The widths on each side, and their dims."""
    if not isinstance(width, dict):
        width = {dim: width for dim in ((-2, -1) if dims is None else dims)}
    pairs = [_pair(w) for w in width.values()]
    if len(pairs) != 2 or any(before != after for before, after in pairs):
        raise ValueError(
            f"{what}: the sphere has two dims with widths that are the same on "
            f"both sides, got {width}"
        )
    return [before for before, _ in pairs], list(width)


@traced.one_node
def halo_trim(local, like, width, dims=None, boundary="none"):
    """The inverse of halo_exchange: drops the ghost cells of the plain tensor
    `local` and returns what is left as a ShardTensor laid out as `like`, a
    ShardTensor; the other arguments are those of halo_exchange. No communication.

        halo_trim(halo_exchange(x, 2), x, 2)  # x again
    """
    if boundary == "sphere":
        widths = _widths_on_sphere("halo_trim", width, dims)
        return _C.halo_trim_on_sphere(local, like._spec._core, *widths)
    return _C.halo_trim(local, like._spec._core, _widths(like, width, dims), boundary)


def _widths(x, width, dims):
    """A list of (dim, before, after)."""
    if not isinstance(x, ShardTensor):
        raise TypeError(f"expected a ShardTensor, got a {type(x).__name__}")
    if isinstance(width, dict):
        if dims is not None and sorted(dims) != sorted(width):
            raise ValueError(f"width names the dims {list(width)}, dims {dims}")
        return [(dim, *_pair(w)) for dim, w in width.items()]
    if dims is None:
        dims = [d for d in range(x.dim()) if x._spec.is_sharded(d)]
    elif isinstance(dims, int):
        dims = [dims]
    return [(dim, *_pair(width)) for dim in dims]


def _pair(width):
    if isinstance(width, int):
        return width, width
    if len(width) != 2:
        raise ValueError(f"expected a width or a pair of widths, got {width}")
    return tuple(width)


# ---- local tensors ----------------------------------------------------------


@dataclass
class HaloConfig:
    """How halo_padding pads: `halo_size` rows of `tensor_dim` from each
    neighbour along the mesh axis `mesh_dim`, `edge_padding_size` rows of zeros
    at the ends of the domain. `communication_method`, "a2a" or "p2p", and
    `async_op` are hints: the same data moves, and is there on return."""

    mesh_dim: int
    tensor_dim: int
    halo_size: int
    edge_padding_size: int = 0
    async_op: bool = False
    communication_method: str = "a2a"

    def __post_init__(self):
        if self.communication_method not in ("a2a", "p2p"):
            raise ValueError(
                "HaloConfig: communication_method: expected 'a2a' or 'p2p', got "
                f"{self.communication_method!r}"
            )
        if self.async_op and self.communication_method == "p2p":
            raise ValueError("HaloConfig: async_op needs communication_method 'a2a'")


def halo_padding(
    tensor: torch.Tensor, mesh: DeviceMesh, halo_config: HaloConfig
) -> torch.Tensor:
    """A local tensor between its neighbours' rows, for programs that know their
    own piece only; halo_exchange does more, for ShardTensors: any width, and
    any boundary. Differentiable: a halo row's gradient is added where the row
    came from. Raises, on all ranks, where a rank has fewer than `halo_size`
    rows. Communication: the rows, and three integers from each rank to each (not
    inside torch.compile, where nothing is compared)."""
    group = group_along(mesh, halo_config.mesh_dim)
    with errors_on_all_ranks("halo_padding", group):
        check_local(tensor)
        check_axis(mesh, halo_config.mesh_dim)
        told = [
            number(name, getattr(halo_config, name))
            for name in ("tensor_dim", "halo_size", "edge_padding_size")
        ]
    return _ops.halo_padding(tensor, *told, group.group_name)


def unhalo_padding(
    tensor: torch.Tensor, mesh: DeviceMesh, halo_config: HaloConfig
) -> torch.Tensor:
    """A padded local tensor without what halo_padding added. Differentiable, no
    communication. Raises unless it has as many rows."""
    axis, dim = halo_config.mesh_dim, halo_config.tensor_dim
    check_axis(mesh, axis)
    check_local(tensor)
    rank, ranks = mesh.get_local_rank(axis), mesh.size(axis)
    width, edge = halo_config.halo_size, halo_config.edge_padding_size
    before = width if rank > 0 else edge
    after = width if rank < ranks - 1 else edge
    if tensor.shape[dim] < before + after:
        raise ValueError(
            f"unhalo_padding: expected at least {before} + {after} rows of padding in "
            f"dim {dim}, got a tensor of sizes {[*tensor.shape]}"
        )
    return tensor.narrow(dim, before, tensor.shape[dim] - before - after)
