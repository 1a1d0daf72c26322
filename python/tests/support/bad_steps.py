"""What bad_calls.py has of rings, halos, planes in strips and kinds of tensors."""

import torch

from shardtensor import HaloConfig, halo_padding
from shardtensor import distributed as st
from shardtensor.distributed.fft import DistributedRFFT2
from shardtensor.distributed.utils import distributed_transpose
from shardtensor.ring import (
    RingPassingConfig,
    perform_ring_iteration_async,
    ring_sum,
)


def bad_steps(mine, mesh, step):
    """(What is wrong, the call, the error) of a step around a ring."""
    config = RingPassingConfig(0, mesh.size(), communication_method="p2p")
    other = RingPassingConfig(3 * mine, mesh.size(), communication_method="p2p")
    left = RingPassingConfig(0, mesh.size(), communication_method="p2p")
    left.ring_direction = "left" if mine else "forward"
    back = RingPassingConfig(0, mesh.size(), "backward" if mine else "forward", "p2p")
    x, differ = torch.ones(2, 3), (ValueError, "do not make the same call")

    yield (
        "a shape that is none",
        lambda: step(x, mesh, config, recv_shape=3 if mine else (2, 3)),
        (TypeError, f"{step.__name__}: recv_shape: expected integers, got 3 (on"),
    )
    yield (
        "another shape than comes",
        lambda: step(x, mesh, config, recv_shape=(2, 2 if mine else 3)),
        differ,
    )
    yield (
        "another shape of as many elements",
        lambda: step(x, mesh, config, recv_shape=(3, 2) if mine else (2, 3)),
        (ValueError, "2, 3], receive_sizes ["),
    )
    yield "no tensor", lambda: step(None if mine else x, mesh, config), (TypeError, "")
    yield (
        "no way round",
        lambda: step(x, mesh, left),
        (ValueError, "ring_direction: expected one of ['forward', 'backward'], got"),
    )
    yield "the other way round", lambda: step(x, mesh, back), differ
    yield (
        "an axis that there is not",
        lambda: step(x, mesh, other),
        (IndexError, f"{step.__name__}: mesh_dim: expected an axis of"),
    )
    if step is not perform_ring_iteration_async:
        return
    yield "another dtype", lambda: step(x.double() if mine else x, mesh, config), differ
    method = RingPassingConfig(0, mesh.size(), "forward", "a2a" if mine else "p2p")
    yield (
        "another method",
        lambda: step(x, mesh, method),
        (ValueError, "expected communication_method 'p2p', got 'a2a' (on rank"),
    )
    yield (
        "a tensor with gaps",
        lambda: step(torch.ones(3, 2).t() if mine else x, mesh, config),
        (ValueError, "tensor is not contiguous (on rank"),
    )
    for buffer, text in (
        (torch.ones(3, 2).t(), "recv_tensor is not contiguous"),
        (x.double(), "recv_tensor: expected torch.float32 on"),
        (
            torch.ones(3),
            "recv_tensor: expected the shape of recv_shape, [2, 3], got [3]",
        ),
    ):
        yield (
            f"a buffer of {buffer.dtype} and {[*buffer.stride()]}",
            lambda buffer=buffer: step(
                x, mesh, config, buffer if mine else None, (2, 3)
            ),
            (ValueError, text),
        )


def bad_transforms(mine, ranks, transform):
    """The same of a plane in strips."""
    x, s, dim = torch.ones(4, 2 * ranks), (None, None), (-2, -1)
    yield (
        "a dim that there is not",
        lambda: transform(x, s, (0, 2) if mine else dim),
        (IndexError, "FFT2: dim 2 of 2 dims (on rank"),
    )
    yield (
        "one dim",
        lambda: transform(x, s, (-1, 1) if mine else dim),
        (ValueError, "FFT2: expected two dims, got (-1, 1) (on rank"),
    )
    yield (
        "one extent",
        lambda: transform(x, (4,) if mine else s),
        (ValueError, "FFT2: expected two dims and two extents, got (-2, -1), (4,)"),
    )
    yield (
        "an extent of nothing",
        lambda: transform(x, (None, 0) if mine else s),
        (ValueError, "FFT2: expected extents of 1 or more, got (None, 0)"),
    )
    yield (
        "no such norm",
        lambda: transform(x, s, dim, "unitary" if mine else "ortho"),
        (ValueError, "FFT2: norm: expected one of (None, 'backward', 'forward',"),
    )
    yield (
        "another norm",
        lambda: transform(x, s, dim, "forward" if mine else "ortho"),
        (ValueError, "do not make the same call"),
    )
    yield "no tensor", lambda: transform(None if mine else x), (TypeError, "got None")
    if transform is DistributedRFFT2.apply:
        yield (
            "complex numbers",
            lambda: transform(x.to(torch.complex64) if mine else x),
            (TypeError, "FFT2: expected real numbers, got torch.complex64 (on rank"),
        )


def bad_halos(mine, mesh, cut):
    """The same of halo_padding. `cut`: a ShardTensor."""
    x = torch.ones(3, 2)

    def pad(tensor, **wrong):
        config = HaloConfig(0, 0, 1)
        for name, value in wrong.items() if mine else ():
            setattr(config, name, value)
        return halo_padding(tensor if mine else x, mesh, config)

    for wrong in (None, [1.0], x.to("meta"), cut):
        yield (
            f"of {type(wrong)}",
            lambda wrong=wrong: pad(wrong),
            (TypeError, "halo_padding: expected a "),
        )
    for name in ("tensor_dim", "halo_size", "edge_padding_size"):
        for wrong in (None, "1", 1.5):
            yield (
                f"{name} {wrong!r}",
                lambda name=name, wrong=wrong: pad(x, **{name: wrong}),
                (TypeError, f"halo_padding: {name}: expected an integer, got "),
            )
    yield (
        "an axis that there is not",
        lambda: pad(x, mesh_dim=3),
        (IndexError, "halo_padding: mesh_dim: expected an axis of"),
    )


def bad_kinds(mine, mesh):
    """The same of tensors that are none, or have no values in strides."""
    ranks = mesh.size()
    x = torch.ones(ranks, 2)
    sparse, meta, sized = (
        x.cpu().to_sparse(),
        x.to("meta"),
        "expected a local strided tensor",
    )
    for wrong, text in ((None, "got None"), (sparse, sized), (meta, sized)):
        yield (
            f"distributed_transpose: of {type(wrong)}",
            lambda wrong=wrong: distributed_transpose(wrong if mine else x, 0, 1),
            (TypeError, text),
        )
        yield (
            f"ring_sum: own {type(wrong)}",
            lambda wrong=wrong: ring_sum(
                lambda y, *_: y.sum(), x, wrong if mine else x, mesh=mesh
            ),
            (TypeError, text),
        )
    yield (
        "distributed_transpose: no dim",
        lambda: distributed_transpose(x, None if mine else 0, 1),
        (TypeError, "distributed_transpose: dim0: expected an integer, got None"),
    )
    yield (
        "fused_all_reduce: of a sparse tensor",
        lambda: st.fused_all_reduce([sparse if mine else x]),
        (TypeError, "fused_all_reduce: expected strided tensors, got one of "),
    )
    for wrong in (meta.sum(), torch.tensor(1j)):
        yield (
            f"reduce_loss: {wrong}",
            lambda wrong=wrong: st.reduce_loss(wrong if mine else 1.0),
            (TypeError, "reduce_loss: expected one number, got tensor("),
        )
