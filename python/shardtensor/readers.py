"""Who reads the gradients of parameters inside backward: DDP and FSDP."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.parallel import DistributedDataParallel

from shardtensor import _C
from shardtensor.compile import as_written


def _serve_ddp() -> None:
    """From now on it says of its parameters over which ranks it averages."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def begin(self, *args, **kwargs):
        original(self, *args, **kwargs)
        ranks = dist.get_process_group_ranks(self.process_group)
        for parameter in self._module_parameters:
            _C.note_reader(parameter, ranks)

    DistributedDataParallel.__init__ = begin


@as_written
def _note_what_fsdp_reads() -> None:
    """The core calls it in each backward: FSDP makes parameters in forward. It is not
    imported here, for that takes seconds."""
    for reference in [*_module_state_mapping.values()]:
        for group in _groups_of(reference()):
            ranks = group.mesh_info.mesh.mesh.flatten().tolist()
            for parameter in group.fsdp_params:
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    _C.note_reader(whole, ranks)


def _groups_of(state: object) -> Iterator:
    """Of a module's parameters. Older versions have one for each module."""
    yield from getattr(state, "_fsdp_param_groups", ())
    if not hasattr(state, "_fsdp_param_groups"):
        if (group := getattr(state, "_fsdp_param_group", None)) is not None:
            yield group


_serve_ddp()
_C.set_gradient_readers(_note_what_fsdp_reads)
