"""Zarr arrays by tensorstore, where it is installed: its threads read and decode
chunks while the program goes on."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import zarr

if TYPE_CHECKING:
    import tensorstore

_DRIVERS = {2: ("zarr", ".zarray"), 3: ("zarr3", "zarr.json")}
# Of format 2 tensorstore takes a chunk whose end, the checksum, is missing for whole.
_UNCHECKED = ("bz2", "gzip", "zlib")

_is_forked = False


def _forget():
    """Of a process that has tensorstore's threads: it aborts where they are not."""
    global _is_forked
    _is_forked = _is_forked or "tensorstore" in sys.modules


os.register_at_fork(after_in_child=_forget)


def is_possible() -> bool:
    return not _is_forked


def open_array(array: zarr.Array) -> tensorstore.TensorStore | None:
    """None where zarr must read it: without tensorstore, or if this does not know the
    metadata, of which it reads nothing itself: they may be consolidated."""
    try:
        import tensorstore
        from zarr.core.buffer import default_buffer_prototype

        driver, key = _DRIVERS[array.metadata.zarr_format]
        text = array.metadata.to_buffer_dict(default_buffer_prototype())[key]
        metadata = json.loads(text.to_bytes())
        metadata.pop("attributes", None)
        if (metadata.get("compressor") or {}).get("id") in _UNCHECKED:
            return None
        folder = os.path.join(os.path.abspath(array.store.root), array.path, "")
        store = tensorstore.open(
            {
                "driver": driver,
                "kvstore": {"driver": "file", "path": folder},
                "metadata": metadata,
                "assume_metadata": True,
            },
            read=True,
        ).result()
    except Exception:  # noqa: BLE001  of many kinds, and zarr may know better
        return None
    is_same = store.dtype.numpy_dtype == array.dtype.newbyteorder("=")
    return store if is_same and store.shape == array.shape else None
