"""The real FFT of a plane that the ranks of a group hold in strips: local tensors
in and out, one exchange each way. For ShardTensors `torch.fft` does this."""

import torch

from shardtensor import _ops
from shardtensor.distributed.manager import DistributedManager
from shardtensor.distributed.utils import compute_split_shapes

GROUP = "spatial_parallel"


class DistributedRFFT2:
    """torch.fft.rfft2 of a tensor that is cut along `dim[1]`, in any pieces."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        s: tuple[int | None, int | None] = (None, None),
        dim: tuple[int, int] = (-2, -1),
        norm: str = "ortho",
    ) -> torch.Tensor:
        """This rank's rows along `dim[0]`, cut by compute_split_shapes; all
        n // 2 + 1 entries along `dim[1]`. Differentiable to any order; s, dim and
        norm are torch.fft.rfft2's."""
        rows, columns = _two_dims("DistributedRFFT2", x, s, dim)
        if x.is_complex():
            raise TypeError(f"DistributedRFFT2: expected real numbers, got {x.dtype}")
        x = _along_both(torch.fft.fft, x, s, (rows, columns), norm)
        return x.narrow(columns, 0, x.shape[columns] // 2 + 1)


class DistributedIRFFT2:
    """torch.fft.irfft2 of what DistributedRFFT2 gives."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        s: tuple[int | None, int | None] = (None, None),
        dim: tuple[int, int] = (-2, -1),
        norm: str = "ortho",
    ) -> torch.Tensor:
        """This rank's columns along `dim[1]`, cut by compute_split_shapes, of the
        inverse; `x` is cut along `dim[0]`, in any pieces."""
        rows, columns = _two_dims("DistributedIRFFT2", x, s, dim)
        extent = 2 * (x.shape[columns] - 1) if s[1] is None else s[1]
        x = _with_conjugates(x, columns, extent)
        # The columns may come first, unlike those of irfft2: no real transform.
        extents, dims = (extent, s[0]), (columns, rows)
        return _along_both(torch.fft.ifft, x, extents, dims, norm).real


def _two_dims(name, x, s, dim):
    if len(dim) != 2 or len(s) != 2:
        raise ValueError(f"{name}: expected two dims and two extents, got {dim}, {s}")
    for d in dim:
        if not -x.dim() <= d < x.dim():
            raise IndexError(f"{name}: dim {d} of {x.dim()} dims")
    rows, columns = (d % x.dim() for d in dim)
    if rows == columns:
        raise ValueError(f"{name}: expected two dims, got {dim}")
    return rows, columns


def _along_both(transform, x, extents, dims, norm):
    """Along the first dim, which is whole, then the second, which is cut."""
    whole, cut = dims
    x = transform(x, extents[0], whole, norm)
    return transform(_transpose(x, whole, cut), extents[1], cut, norm)


def _with_conjugates(x, dim, extent):
    """The half spectrum of `extent` real numbers, each entry counted for its
    conjugate, too: its inverse has their real part."""
    kept = min(extent // 2 + 1, x.shape[dim])
    counts = torch.full((kept,), 2.0, dtype=x.real.dtype, device=x.device)
    counts[0] = 1.0
    if extent % 2 == 0 and kept == extent // 2 + 1:
        counts[-1] = 1.0
    shape = [kept if d == dim else 1 for d in range(x.dim())]
    return x.narrow(dim, 0, kept) * counts.view(shape)


def _transpose(x, whole, cut):
    """From pieces of `cut` to pieces of `whole`."""
    group = DistributedManager().group(GROUP)
    rank, ranks, name = group.rank(), group.size(), group.group_name
    mine = torch.tensor([x.shape[cut]], device=x.device)
    theirs = _ops.all_gather_v(mine, 0, [1] * ranks, name).tolist()
    shares = compute_split_shapes(x.shape[whole], ranks)
    parts = x.split(shares, whole)
    sent = torch.cat([part.reshape(-1) for part in parts])
    shapes = []
    for extent in theirs:
        shape = list(x.shape)
        shape[whole], shape[cut] = shares[rank], extent
        shapes.append(shape)
    counts = [torch.Size(shape).numel() for shape in shapes]
    came = _ops.all_to_all_v(sent, 0, [part.numel() for part in parts], counts, name)
    pieces = [
        p.view(shape) for p, shape in zip(came.split(counts), shapes, strict=True)
    ]
    return torch.cat(pieces, cut)
