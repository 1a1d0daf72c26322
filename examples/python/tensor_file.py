"""Named tensors in a file that C++ reads: see examples/cpp/tensor_file.h."""

import struct

import torch

DTYPES = {torch.float32: 0, torch.int64: 1}


def write(path, tensors):
    """One after the other."""
    with open(path, "wb") as file:
        for name, x in tensors.items():
            encoded = name.encode()
            head = [DTYPES[x.dtype], x.dim(), *x.shape]
            file.write(struct.pack("<q", len(encoded)) + encoded)
            file.write(struct.pack(f"<{len(head)}q", *head))
            file.write(x.contiguous().numpy().tobytes())
