"""Named tensors in a file that C++ reads and writes: see examples/cpp/tensor_file.h."""

import struct

import torch

DTYPES = (torch.float32, torch.int64, torch.float64)


def write(path, tensors):
    """One after the other."""
    with open(path, "wb") as file:
        for name, x in tensors.items():
            encoded = name.encode()
            head = [DTYPES.index(x.dtype), x.dim(), *x.shape]
            file.write(struct.pack("<q", len(encoded)) + encoded)
            file.write(struct.pack(f"<{len(head)}q", *head))
            file.write(x.contiguous().numpy().tobytes())


def read(path):
    tensors = {}
    with open(path, "rb") as file:

        def numbers(count):
            return struct.unpack(f"<{count}q", file.read(8 * count))

        while head := file.read(8):
            name = file.read(*struct.unpack("<q", head)).decode()
            dtype, dims = numbers(2)
            x = torch.empty(numbers(dims), dtype=DTYPES[dtype])
            file.readinto(x.flatten().numpy())
            tensors[name] = x
    return tensors
