"""Which gradients of parameters FSDP reads inside backward; DDP: see _patches.py."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed._composable_state import _module_state_mapping

from shardtensor import _C
from shardtensor.compile import as_written


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


_C.set_gradient_readers(_note_what_fsdp_reads)
