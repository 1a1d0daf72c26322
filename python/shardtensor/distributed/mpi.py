"""MPI as a backend of torch.distributed.

Importing this package registers it as `shardtensor_mpi` where the library was
built with MPI: PyTorch's wheels know the name `mpi` but have no such backend.
Programs are started by mpirun; CPU tensors travel from process to process on
one machine, which takes far less time than gloo's sockets. Tensors of devices
travel through the host, as over gloo.
"""

import torch.distributed as dist

from shardtensor import _C

BACKEND = "shardtensor_mpi"


def register():
    if _C.has_mpi() and not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(
            BACKEND, _make, extended_api=True, devices=["cpu", "cuda"]
        )


def _make(group, _options):
    # The default group lists no ranks.
    ranks = group.global_ranks_in_group or range(group.group_size)
    return _C.make_mpi_backend(list(ranks), group.timeout)
