"""The real FFT of a plane that the ranks of a group hold in strips: local tensors
in and out, one exchange each way. For ShardTensors `torch.fft` does this.

The group is that which DistributedManager has by the name "spatial_parallel": make it
with create_process_subgroup, or as the axis of that name of a mesh. Arguments that do
not fit, or differ between ranks, are an error on all of them.
"""

import torch

from shardtensor import _ops
from shardtensor.agree import agree_on_call, errors_on_all_ranks
from shardtensor.distributed.autograd import check_local
from shardtensor.distributed.manager import DistributedManager
from shardtensor.distributed.utils import compute_split_shapes

GROUP = "spatial_parallel"
NORMS = (None, "backward", "forward", "ortho")


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
        group = DistributedManager().group(GROUP)
        with errors_on_all_ranks("DistributedRFFT2", group):
            rows, columns = _two_dims(x, s, dim, norm)
            if x.is_complex():
                raise TypeError(f"expected real numbers, got {x.dtype}")
            along_rows = torch.fft.fft(x, s[0], rows, norm)
        _agree_on_call("DistributedRFFT2", x, columns, s, dim, norm, group)
        cut = _transpose(along_rows, rows, columns, group)
        y = torch.fft.fft(cut, s[1], columns, norm)
        return y.narrow(columns, 0, y.shape[columns] // 2 + 1)


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
        group = DistributedManager().group(GROUP)
        with errors_on_all_ranks("DistributedIRFFT2", group):
            rows, columns = _two_dims(x, s, dim, norm)
            extent = 2 * (x.shape[columns] - 1) if s[1] is None else s[1]
            # The columns come first, unlike those of irfft2: no real transform.
            halves = _with_conjugates(x, columns, extent)
            along_columns = torch.fft.ifft(halves, extent, columns, norm)
        _agree_on_call("DistributedIRFFT2", x, rows, s, dim, norm, group)
        cut = _transpose(along_columns, columns, rows, group)
        return torch.fft.ifft(cut, s[0], rows, norm).real


def _two_dims(x, s, dim, norm):
    check_local(x)
    if len(dim) != 2 or len(s) != 2:
        raise ValueError(f"expected two dims and two extents, got {dim}, {s}")
    for d in dim:
        if not -x.dim() <= d < x.dim():
            raise IndexError(f"dim {d} of {x.dim()} dims")
    rows, columns = (d % x.dim() for d in dim)
    if rows == columns:
        raise ValueError(f"expected two dims, got {dim}")
    if any(extent is not None and extent < 1 for extent in s):
        raise ValueError(f"expected extents of 1 or more, got {s}")
    if norm not in NORMS:
        raise ValueError(f"norm: expected one of {NORMS}, got {norm!r}")
    return rows, columns


def _agree_on_call(name, x, cut, s, dim, norm, group):
    sizes = ["*" if d == cut else str(size) for d, size in enumerate(x.shape)]
    told = f"{name} of {x.dtype} tensors [{', '.join(sizes)}], "
    agree_on_call(group, f"{told}s={tuple(s)}, dim={tuple(dim)}, norm={norm!r}", x=x)


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


def _transpose(x, whole, cut, group):
    """From pieces of `cut` to pieces of `whole`."""
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
