"""Ghost cells for programs that write their own stencils."""

from shardtensor import _C
from shardtensor.shard_tensor import ShardTensor


def halo_exchange(x, width, dims=None, boundary="none"):
    """This rank's shard of `x` with its ghost cells, a plain tensor.

    `width` is the number of ghost cells: one number for both sides, a pair
    (before, after), or a dict from dim to either. `dims` are the dims that get
    them, by default every sharded one. Beyond the ends of the domain stands
    what `boundary` says: "zeros", "periodic", "reflect" or "replicate"; with
    "none" nothing does, and the shards at the ends get fewer rows.

    Differentiable to any order: the gradient of a ghost cell is added where
    the cell came from. Communication: one message per rank that has ghost
    cells of ours, corners included.

        u = halo_exchange(x, 1, boundary="periodic")  # x cut along dim 0
        laplacian = u[2:] - 2 * u[1:-1] + u[:-2]      # this rank's rows
    """
    return _C.halo_exchange(x, _widths(x, width, dims), boundary)


def halo_trim(local, like, width, dims=None, boundary="none"):
    """The inverse of halo_exchange: drops the ghost cells of the plain tensor
    `local` and returns what is left as a ShardTensor laid out as `like`, a
    ShardTensor. No communication.

        halo_trim(halo_exchange(x, 2), x, 2)  # x again
    """
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
